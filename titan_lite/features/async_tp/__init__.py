"""Tensor parallelism whose collectives travel beside their matrix products."""
