"""Mixtures of experts in training: their balance, and the memory for their tokens."""
