"""Float8: matrix products of the blocks' linear layers, and what is gathered for them
(arXiv 2209.05433).
"""
