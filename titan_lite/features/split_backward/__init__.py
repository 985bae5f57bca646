"""Split backward: gradients of inputs and of weights apart, for pipeline schedules without bubbles
(arXiv 2401.10241).
"""
