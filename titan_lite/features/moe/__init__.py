"""Mixture of experts (MoE) in training: their balance, and the memory for their tokens."""
