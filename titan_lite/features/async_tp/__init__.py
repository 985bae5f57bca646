"""Tensor parallelism whose collectives travel beside their matmuls."""
