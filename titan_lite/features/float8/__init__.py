"""Float8: matmuls of the blocks' linear layers, and what is gathered for them
(arXiv 2209.05433).
"""
