"""Llama 3 (arXiv 2407.21783): one file, plain torch, nothing distributed.

    model = Transformer(FLAVORS["debug"])           # on torch.device("meta") for the large ones
    model.init_weights(seed=0)
    logits = model(tokens)                          # (B, T) int64 -> (B, T, V)

The modules carry the reference implementation's names (`layers.3.attention.wq.weight`), and its layout of rotary pairs:
neighbouring dimensions (2i, 2i+1) rotate together, where Hugging Face pairs i with i + D/2 and permutes wq and wk.

Letters: B sequences, T tokens, C model dim, H query heads, K key/value heads, D head dim, V vocabulary.
"""

import hashlib
import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_lite.attention import Documents, attend_within_documents, documents_of
from titan_lite.models.shapes import FLAVORS, ModelConfig, RopeScaling  # noqa: F401 - the whole model can be had from here

Mask = Tensor | Documents | None  # of `attention_mask`, or what a kernel takes in its place


def rope_tables(config: ModelConfig, positions: Sequence[int], device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every (position, frequency): two float32 tensors (len(positions), D / 2)."""
    frequencies = 1.0 / config.rope_theta ** (torch.arange(0, config.head_dim, 2, device=device).float() / config.head_dim)
    scaling = config.rope_scaling
    if scaling is not None:
        turns = scaling.original_max_seq_len * frequencies / (2 * math.pi)  # made by each frequency within the original context
        keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        frequencies = torch.lerp(frequencies / scaling.factor, frequencies, keep.clamp(0, 1))
    angles = torch.outer(torch.tensor(positions, device=device).float(), frequencies)
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (2i, 2i+1) of x (B, T, H, D) by the angles of its positions; cos and sin: (T, D / 2)."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).type_as(x)


def attention_mask(begins: Tensor, positions: Tensor, tokens: int) -> Tensor:
    """True (B, 1, t, T) where a token may look at another one of its sequence: one before it, of its own document.

    begins: (B, t), position at which the document of each of t tokens begins; positions: (t,), of these tokens among all T.
    """
    every, own = torch.arange(tokens, device=begins.device), positions[:, None]
    return ((every <= own) & (every >= begins[..., None]))[:, None]


def has_grouped_kernel(q: Tensor) -> bool:
    """True where causal attention takes fewer key than query heads without a matrix of all scores.

    On a GPU FlashAttention and cuDNN do, in half precision; in float32 only the memory-efficient kernel avoids that matrix, and
    it wants as many heads. With a mask no CUDA kernel takes groups.
    """
    return not q.is_cuda or q.dtype in (torch.float16, torch.bfloat16)


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    """Causal grouped-query attention: H query heads share K key/value heads. (B, T, C) -> (B, T, C)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.head_dim = config.head_dim
        self.wq = nn.Linear(config.dim, config.n_heads * config.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=False)
        self.wo = nn.Linear(config.n_heads * config.head_dim, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask = None) -> Tensor:
        # -1 and not a number of heads: a tensor-parallel rank holds only some of them
        q = self.wq(x).unflatten(-1, (-1, self.head_dim))
        k = self.wk(x).unflatten(-1, (-1, self.head_dim))
        v = self.wv(x).unflatten(-1, (-1, self.head_dim))
        cos, sin = cos[: q.shape[1]], sin[: q.shape[1]]
        out = self.attend(apply_rope(q, cos, sin), apply_rope(k, cos, sin), v, mask)
        return self.wo(out.flatten(-2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        """q (B, T, H, D), k and v (B, T, K, D) -> (B, T, H, D). mask: where a token looks; None: at all that come before."""
        if isinstance(mask, Documents):
            return attend_within_documents(q, k, v, mask)
        if mask is not None or not has_grouped_kernel(q):
            k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        grouped = k.shape[1] < q.shape[1]
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=grouped).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU. (B, T, C) -> (B, T, C)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.w2 = nn.Linear(config.hidden_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config)
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, mask)
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    """tokens (B, T) int64 -> logits (B, T, V). T may be anything up to config.max_seq_len.

    positions: of the tokens within their sequence, where they are not the first T (context parallelism). A pipeline stage is a
    Transformer without some of its modules: what it lacks is None, or not in `layers`, and in place of tokens or logits it takes
    or gives what travels between layers, (B, T, C).

    begins: (B, T) int64, the position at which each token's document begins, where attention is to stay within documents. counts:
    as of `Documents`, where a kernel is to see to that and no mask; of all T tokens, and on GPUs.
    """

    tok_embeddings: nn.Embedding | None
    norm: RMSNorm | None
    output: nn.Linear | None
    rope_cos: Tensor
    rope_sin: Tensor
    own_positions: Tensor

    def __init__(self, config: ModelConfig, positions: Sequence[int] | None = None):
        super().__init__()
        self.config = config
        self.positions = range(config.max_seq_len) if positions is None else positions
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        # keyed by name and not by position, so that a pipeline stage without layer 0 still calls its first one "layers.7"
        self.layers = nn.ModuleDict({str(i): TransformerBlock(config) for i in range(config.n_layers)})
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tied_embeddings:
            self.output.weight = self.tok_embeddings.weight
        cos, sin = rope_tables(config, self.positions)
        self.register_buffer("rope_cos", cos, persistent=False)
        self.register_buffer("rope_sin", sin, persistent=False)
        self.register_buffer("own_positions", torch.tensor(self.positions), persistent=False)

    def forward(self, tokens: Tensor, begins: Tensor | None = None, counts: Tensor | None = None) -> Tensor:
        mask: Mask = None
        if begins is not None:
            t = begins.shape[1]
            positions, every = self.own_positions[:t], t * (self.config.max_seq_len // len(self.positions))
            mask = attention_mask(begins, positions, every) if counts is None else documents_of(begins, positions, counts)
        x = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x, self.rope_cos, self.rope_sin, mask)
        x = x if self.norm is None else self.norm(x)
        return x if self.output is None else self.output(x)

    @torch.no_grad()
    def init_weights(self, seed: int, shard_of: Callable[[Tensor], tuple[Tensor, tuple[int, ...]]] | None = None) -> None:
        """Fill every parameter and buffer in place; the numbers depend on seed and FQN, not on how the model is sharded.

        shard_of: parameter -> (the tensor this rank holds of it, its offset in the whole); default: the whole.
        """
        for fqn, parameter in self.named_parameters():
            local, offset = (parameter, (0,) * parameter.dim()) if shard_of is None else shard_of(parameter)
            std, cutoff = self._init_std(fqn)
            if std is None:
                local.fill_(1.0)
            else:
                _fill_normal(local, offset, parameter.shape, std, cutoff, f"{seed}/{fqn}")
        self.rope_cos, self.rope_sin = rope_tables(self.config, self.positions, self.rope_cos.device)
        self.own_positions = torch.tensor(self.positions, device=self.own_positions.device)

    def _init_std(self, fqn: str) -> tuple[float | None, float]:
        """(standard deviation, cut-off) by name; None for norms, which start at one.

        Projections that write into the residual stream shrink with depth, so that its variance stays bounded. Logits start with
        a standard deviation of 1/4, so that the first loss is ln(V) + 1/32; tied weights serve as embeddings too and start
        four times larger, at about ln(V) + 1/2 for 1B and 3B, more for a shallower model, where a token first predicts itself.
        """
        if "norm" in fqn:
            return None, 0.0
        if fqn == "tok_embeddings.weight" and not self.config.tied_embeddings:
            return 1.0, math.inf
        if fqn in ("output.weight", "tok_embeddings.weight"):
            std = self.config.dim**-0.5 * (1.0 if self.config.tied_embeddings else 0.25)
            return std, 3 * std
        layer, _, name = fqn.removeprefix("layers.").partition(".")
        if name in ("attention.wo.weight", "feed_forward.w2.weight", "feed_forward.w3.weight"):
            return 0.02 / math.sqrt(2 * (int(layer) + 1)), 2.0
        return 0.02, 2.0


def flops_per_token(config: ModelConfig, seq_len: int, *, full_attention: bool = False) -> int:
    """Floating-point operations that training on one token needs: forward plus backward, recomputation not counted.

    6 for every weight of a matrix product (the embedding look-up is none; the output projection is one, tied or not), and
    6 C T a layer for causal attention: a token looks back at T / 2 others on average. full_attention: 12 C T, as if every token
    attended to all T, which is how PaLM (arXiv 2204.02311, appendix B) and torchtitan count.
    """
    attention = config.dim * config.head_dim * (2 * config.n_heads + 2 * config.n_kv_heads)
    weights = config.n_layers * (attention + 3 * config.dim * config.hidden_dim) + config.dim * config.vocab_size
    return 6 * weights + (12 if full_attention else 6) * config.n_layers * config.dim * seq_len


def _fill_normal(local: Tensor, offset: tuple[int, ...], shape: torch.Size, std: float, cutoff: float, key: str) -> None:
    """Truncated normal numbers for the part of a (rows, columns) weight that starts at `offset`.

    Rows are drawn in blocks of about a million numbers, each from a generator of its own, so that a rank draws what it holds
    (and a little around it) and no rank ever holds the whole.
    """
    rows, columns = shape
    block = max(1, 2**20 // columns)
    first, last = offset[0], offset[0] + local.shape[0]
    for start in range(first // block * block, last, block):
        seed = int.from_bytes(hashlib.sha256(f"{key}/{start}".encode()).digest()[:8], "big") >> 1
        numbers = torch.empty(min(block, rows - start), columns, device=local.device, dtype=torch.float32)
        generator = torch.Generator(local.device).manual_seed(seed)
        nn.init.normal_(numbers, 0.0, std, generator) if cutoff == math.inf else nn.init.trunc_normal_(
            numbers, 0.0, std, -cutoff, cutoff, generator
        )
        low, high = max(start, first), min(start + block, last)
        local[low - first : high - first] = numbers[low - start : high - start, offset[1] : offset[1] + local.shape[1]]
