"""A family of a user's own: Llama's block with gated attention, as docs/contributing.md describes.

The result of every head is multiplied by a gate (arXiv 2505.06708), which is computed from the
block's input.
"""

import torch
from torch import nn

from titan_lite.config.families import (
    Family,
    ModelConfig,
    attention_parameters,
    feed_forward_parameters,
    norm_parameters,
)
from titan_lite.models.transformer import TransformerBlock, apply_rope, attend


class GatedAttention(nn.Module):
    attend = staticmethod(attend)

    def __init__(self, config):
        super().__init__()
        width = config.n_heads * config.head_dim
        kv_width = config.n_kv_heads * config.head_dim
        self.head_dim = config.head_dim
        self.wq = nn.Linear(config.dim, width, bias=False)
        self.wk = nn.Linear(config.dim, kv_width, bias=False)
        self.wv = nn.Linear(config.dim, kv_width, bias=False)
        self.wo = nn.Linear(width, config.dim, bias=False)
        self.gate = nn.Linear(config.dim, width, bias=False)

    def forward(self, x, cos, sin, mask=None):
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        cos, sin = cos[: q.shape[1]], sin[: q.shape[1]]
        out = self.attend(apply_rope(q, cos, sin), apply_rope(k, cos, sin), v, mask)
        return self.wo(out.flatten(-2) * torch.sigmoid(self.gate(x)))


def build_block(config):
    return TransformerBlock(config, GatedAttention(config))


def block_parameters(config):
    return {
        **attention_parameters(config),
        "attention.gate.weight": (config.n_heads * config.head_dim, config.dim),
        **feed_forward_parameters(config),
        **norm_parameters(config),
    }


FAMILY = Family(
    flavors={"debug": ModelConfig(128, 4, 8, 4, 256, vocab_size=2048)},
    block_parameters=block_parameters,
    styles={"attention.gate": "columns"},
)
