"""Blocks of Qwen3's MoE models (arXiv 2505.09388): Qwen3's attention, and experts in the
place of SwiGLU.

    block = build_block(QWEN3_MOE.flavors["debug"])
    y = block(x, cos, sin)                          # (B, T, C) -> (B, T, C)

The transformer around the blocks is models/transformer.py; shapes are in config/families.py.
"""

from torch import Tensor, nn

from titan_lite.config.families import ModelConfig
from titan_lite.models.experts import MixtureOfExperts
from titan_lite.models.qwen3 import Attention
from titan_lite.models.transformer import Mask, RMSNorm


class Block(nn.Module):
    """Attention and a mixture of experts, each after a norm and added to its input.

    (B, T, C) -> (B, T, C).
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.attention = Attention(config)
        self.moe = MixtureOfExperts(config)
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, mask)
        return x + self.moe(self.ffn_norm(x))


def build_block(config: ModelConfig) -> Block:
    return Block(config)
