"""Shapes of Llama 3 models. Needs no torch, so that a recipe is checked quickly.

FLAVORS["8B"].dim        # 4096
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's scaling of the low rotary frequencies, for contexts longer than
    `original_max_seq_len`.
    """

    factor: float  # divisor of the low frequencies
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192  # tokens


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a model."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    hidden_dim: int
    vocab_size: int = 128_256
    tied_embeddings: bool = False
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    max_seq_len: int = 131_072  # tokens in the rotary tables

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads


FLAVORS = {
    "debug": ModelConfig(
        dim=256, n_layers=6, n_heads=8, n_kv_heads=4, hidden_dim=768, vocab_size=2048
    ),
    "1B": ModelConfig(
        2048, 16, 32, 8, 8192, tied_embeddings=True, rope_scaling=RopeScaling(factor=32.0)
    ),
    "3B": ModelConfig(
        3072, 28, 24, 8, 8192, tied_embeddings=True, rope_scaling=RopeScaling(factor=32.0)
    ),
    "8B": ModelConfig(4096, 32, 32, 8, 14336, rope_scaling=RopeScaling(factor=8.0)),
    "70B": ModelConfig(8192, 80, 64, 8, 28672, rope_scaling=RopeScaling(factor=8.0)),
    "405B": ModelConfig(16384, 126, 128, 8, 53248, rope_scaling=RopeScaling(factor=8.0)),
}
