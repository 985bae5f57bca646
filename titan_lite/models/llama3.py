"""Blocks of Llama 3 (arXiv 2407.21783): grouped-query attention and SwiGLU.

    block = build_block(LLAMA3.flavors["debug"])
    y = block(x, cos, sin)                          # (B, T, C) -> (B, T, C)

The transformer around them is models/transformer.py; shapes are in config/families.py.
Dimensions: as in models/transformer.py.
"""

from torch import Tensor, nn

from titan_lite.config.families import ModelConfig
from titan_lite.models.transformer import Mask, TransformerBlock, apply_rope, attend


class Attention(nn.Module):
    """Causal grouped-query attention: H query heads share K key/value heads.

    (B, T, C) -> (B, T, C).
    """

    attend = staticmethod(attend)  # context parallelism and a cache of keys replace it

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.head_dim = config.head_dim
        self.wq = nn.Linear(config.dim, config.n_heads * config.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=False)
        self.wo = nn.Linear(config.n_heads * config.head_dim, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask = None) -> Tensor:
        # -1, not the number of heads: a tensor-parallel rank has only some of them
        q = self.wq(x).unflatten(-1, (-1, self.head_dim))
        k = self.wk(x).unflatten(-1, (-1, self.head_dim))
        v = self.wv(x).unflatten(-1, (-1, self.head_dim))
        cos, sin = cos[: q.shape[1]], sin[: q.shape[1]]
        out = self.attend(apply_rope(q, cos, sin), apply_rope(k, cos, sin), v, mask)
        return self.wo(out.flatten(-2))


def build_block(config: ModelConfig) -> TransformerBlock:
    return TransformerBlock(config, Attention(config))
