"""Muon and Shampoo: optimizers of complete matrices, each with one owner among the ranks."""
