"""A family of a user's own with experts: Llama's attention, and beside a mixture of experts one that
every token has, as docs/contributing.md describes.
"""

from torch import nn

from titan_lite.config.families import (
    Family,
    ModelConfig,
    attention_parameters,
    expert_buffers,
    expert_parameters,
    feed_forward_parameters,
    norm_parameters,
)
from titan_lite.models.experts import MixtureOfExperts
from titan_lite.models.llama3 import Attention
from titan_lite.models.transformer import FeedForward, RMSNorm


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config)
        self.moe = MixtureOfExperts(config)
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)

    def forward(self, x, cos, sin, mask=None):
        x = x + self.attention(self.attention_norm(x), cos, sin, mask)
        h = self.ffn_norm(x)
        return x + self.feed_forward(h) + self.moe(h)


def build_block(config):
    return Block(config)


def block_parameters(config):
    return {
        **attention_parameters(config),
        **feed_forward_parameters(config),
        **expert_parameters(config),
        **norm_parameters(config),
    }


FAMILY = Family(
    flavors={
        "debug": ModelConfig(128, 4, 8, 4, 64, vocab_size=2048, n_experts=4, experts_per_token=2)
    },
    block_parameters=block_parameters,
    block_buffers=expert_buffers,
    styles={"moe.router": "replicated"},
)
