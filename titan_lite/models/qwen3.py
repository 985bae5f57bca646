"""Blocks of Qwen3 (arXiv 2505.09388), dense: attention with a norm of every query and key head.

    block = build_block(QWEN3.flavors["debug"])
    y = block(x, cos, sin)                          # (B, T, C) -> (B, T, C)

Heads have a size of their own: H x D need not be C. The transformer around the blocks is
models/transformer.py; shapes are in config/families.py. Dimensions: as in models/transformer.py.
"""

from torch import Tensor, nn

from titan_lite.config.families import ModelConfig
from titan_lite.models.transformer import Mask, RMSNorm, TransformerBlock, apply_rope, attend


class Attention(nn.Module):
    """Causal grouped-query attention, with an RMSNorm of each query and key before they rotate.

    All query heads share the weight of a norm (D,), and so do all key heads. (B, T, C) -> (B, T,
    C).
    """

    attend = staticmethod(attend)  # context parallelism and a cache of keys replace it

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.head_dim = config.head_dim
        self.wq = nn.Linear(config.dim, config.n_heads * config.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=False)
        self.wo = nn.Linear(config.n_heads * config.head_dim, config.dim, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask = None) -> Tensor:
        # -1, not the number of heads: a tensor-parallel rank has only some of them
        q = self.q_norm(self.wq(x).unflatten(-1, (-1, self.head_dim)))
        k = self.k_norm(self.wk(x).unflatten(-1, (-1, self.head_dim)))
        v = self.wv(x).unflatten(-1, (-1, self.head_dim))
        cos, sin = cos[: q.shape[1]], sin[: q.shape[1]]
        out = self.attend(apply_rope(q, cos, sin), apply_rope(k, cos, sin), v, mask)
        return self.wo(out.flatten(-2))


def build_block(config: ModelConfig) -> TransformerBlock:
    return TransformerBlock(config, Attention(config))
