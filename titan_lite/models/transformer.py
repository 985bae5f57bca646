"""A transformer of any family in plain torch, with nothing distributed, and what families share.

    model = Transformer(LLAMA3.flavors["debug"])    # on torch.device("meta") for the large ones
    model.init_weights(seed=0)
    logits = model(tokens)                          # (B, T) int64 -> (B, T, V)

Around the blocks are the embedding, the last norm and the output. A block comes from the file of
its family, such as models/llama3.py, which puts it together from the modules and functions here and
from its own.

Modules have the names of Llama's reference implementation (`layers.3.attention.wq.weight`) and its
layout of rotary pairs: neighbouring dimensions (2i, 2i+1) rotate together, while Hugging Face pairs
i with i + D/2 and permutes the weights.

Dimensions: B sequences, T tokens, C model dim, H query heads, K key/value heads, D head dim, V
vocabulary.
"""

import hashlib
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_lite.config import ConfigError
from titan_lite.config.errors import shown
from titan_lite.config.families import FAMILIES, ModelConfig, run_file
from titan_lite.models.attention import Documents, attend_within_documents, documents_of
from titan_lite.models.experts import experts_of, routers_of
from titan_lite.models.fqns import is_of_experts
from titan_lite.models.shapes import check_block

Mask = Tensor | Documents | None  # of `attention_mask`, or what a kernel takes in its place


def rope_tables(
    config: ModelConfig, positions: Sequence[int], device: torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines by position and frequency: (len(positions), D / 2), float32."""
    exponents = torch.arange(0, config.head_dim, 2, device=device).float() / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is not None:
        # of each frequency within the original context
        turns = scaling.original_max_seq_len * frequencies / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        frequencies = torch.lerp(frequencies / scaling.factor, frequencies, keep)
    angles = torch.outer(torch.tensor(positions, device=device).float(), frequencies)
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (2i, 2i+1) of x (B, T, H, D) by the angles of its positions.

    cos and sin: (T, D / 2).
    """
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return rotated.flatten(-2).type_as(x)


def attention_mask(doc_starts: Tensor, positions: Tensor, tokens: int) -> Tensor:
    """Return a mask (B, 1, t, T), True where a token attends: its document up to itself.

    doc_starts: (B, t), the position at which each token's document begins. positions: (t,), of
    these tokens among all T = `tokens`.
    """
    keys = torch.arange(tokens, device=doc_starts.device)
    queries = positions[:, None]
    return ((keys <= queries) & (keys >= doc_starts[..., None]))[:, None]


def has_grouped_kernel(q: Tensor) -> bool:
    """Return True if a kernel of causal attention takes fewer key than query heads.

    On a GPU FlashAttention and cuDNN do, in half precision. In float32 only the memory-efficient
    kernel avoids a matrix of all scores, and it needs as many key as query heads. With a mask no
    CUDA kernel takes fewer.
    """
    return not q.is_cuda or q.dtype in (torch.float16, torch.bfloat16)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Attend: q (B, T, H, D), k and v (B, T, K, D) -> (B, T, H, D).

    mask: see `attention_mask`; None: causal.
    """
    if isinstance(mask, Documents):
        return attend_within_documents(q, k, v, mask)
    if mask is not None or not has_grouped_kernel(q):
        k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    q = q.transpose(1, 2)
    k = k.transpose(1, 2)
    v = v.transpose(1, 2)
    grouped = k.shape[1] < q.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=grouped)
    return out.transpose(1, 2)


def attentions_of(model: "Transformer", user: str, otherwise: str = "") -> dict[str, Any]:
    """Return the modules `attention` of the blocks, by the block's number, to replace `attend`.

    user: who replaces it, and does what; otherwise: what else a user can do. Raises ConfigError for
    a block without one, or with a function of its own, which would be lost.
    """
    attentions = {}
    for number, block in model.layers.items():
        attention = getattr(block, "attention", None)
        found = getattr(attention, "attend", None)
        if found is not attend:
            what = f"layers.{number}.attention.attend is {_name_of(found)}"
            if found is None:
                what = f"layers.{number} has no module `attention` with a function `attend`"
            raise ConfigError(
                f"model.name = {shown(model.config.family)}: {what};"
                f" {user} in place of titan_lite.models.transformer.attend, and of no other"
                f" function; use that one{otherwise}"
            )
        attentions[number] = attention
    return attentions


def takes_documents(model: "Transformer") -> bool:
    """Return True if all blocks attend by `attend`, which takes Documents in place of a mask."""
    attentions = (getattr(block, "attention", None) for block in model.layers.values())
    return all(getattr(attention, "attend", None) is attend for attention in attentions)


def _name_of(function: object) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


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
    """Attention and SwiGLU, each after a norm and added to its input.

    (B, T, C) -> (B, T, C).
    """

    def __init__(self, config: ModelConfig, attention: nn.Module):
        super().__init__()
        self.attention = attention
        self.feed_forward = FeedForward(config)
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, mask)
        return x + self.feed_forward(self.ffn_norm(x))


class Output(nn.Linear):
    """Projection to the vocabulary: hidden states (B, T, C) -> logits (B, T, V).

    With labels (B, T), the output is their summed loss by sequence (B,).
    """

    # (hidden states, weight, labels) -> loss: a Loss (models/loss.py), set when training
    loss: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None

    def forward(self, input: Tensor, labels: Tensor | None = None) -> Tensor:
        if labels is None:
            return super().forward(input)
        assert self.loss is not None
        return self.loss(input, self.weight, labels)


def saved_buffers(module: nn.Module) -> list[str]:
    """Return the names of the buffers within a module that a checkpoint has: those of routers."""
    return [f"{fqn}.{name}" for fqn, router in routers_of(module).items() for name in router.SAVED]


def _module_of(family: str) -> ModuleType:
    """Return the file with a family's `build_block`, as a module. Raises ConfigError."""
    if family in FAMILIES:
        return importlib.import_module(f"titan_lite.models.{family}")
    return run_file(family)


class Transformer(nn.Module):
    """The model, or a pipeline stage of it.

    A stage is a Transformer without some modules: they are None, or missing in `layers`. Instead of
    tokens or logits, it takes or returns hidden states (B, T, C).
    """

    tok_embeddings: nn.Embedding | None
    norm: RMSNorm | None
    output: Output | None
    rope_cos: Tensor
    rope_sin: Tensor
    own_positions: Tensor

    def __init__(self, config: ModelConfig, positions: Sequence[int] | None = None):
        """Build the modules. positions: of the tokens within their sequence; None: the first T."""
        super().__init__()
        self.config = config
        self.positions = range(config.max_seq_len) if positions is None else positions
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        # a ModuleDict, so that FQNs such as "layers.7" do not change in a pipeline stage
        build_block = _module_of(config.family).build_block
        blocks = {str(i): build_block(config) for i in range(config.n_layers)}
        self.layers = nn.ModuleDict(blocks)
        self._check_blocks(blocks)
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = Output(config.dim, config.vocab_size, bias=False)
        if config.tied_embeddings:
            self.output.weight = self.tok_embeddings.weight
        cos, sin = rope_tables(config, self.positions)
        self.register_buffer("rope_cos", cos, persistent=False)
        self.register_buffer("rope_sin", sin, persistent=False)
        self.register_buffer("own_positions", torch.tensor(self.positions), persistent=False)
        for fqn, router in routers_of(self).items():
            router.fqn = fqn
        for fqn, experts in experts_of(self).items():
            experts.fqn = fqn

    def _check_blocks(self, blocks: Mapping[str, nn.Module]) -> None:
        """Raise ConfigError unless blocks have the shapes that their family says."""
        first = blocks["0"]
        parameters = {name: parameter.shape for name, parameter in first.named_parameters()}
        buffers = {name: first.get_buffer(name).shape for name in saved_buffers(first)}
        check_block(self.config, parameters, buffers)

    def forward(
        self,
        tokens: Tensor,
        doc_starts: Tensor | None = None,
        doc_stats: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        """tokens (B, T) int64 -> logits (B, T, V), for any T up to config.max_seq_len.

        doc_starts: (B, T) int64, the position at which each token's document begins; attention then
        stays within documents. doc_stats: as in `Documents`, to attend with a kernel instead of a
        mask: on GPUs, without context parallelism. labels: (B, T); the result is the summed loss
        of each sequence, (B,).
        """
        mask = self._mask(doc_starts, doc_stats)
        x = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x, self.rope_cos, self.rope_sin, mask)
        x = x if self.norm is None else self.norm(x)
        return x if self.output is None else self.output(x, labels)

    def _mask(self, doc_starts: Tensor | None, doc_stats: Tensor | None) -> Mask:
        if doc_starts is None:
            return None
        t = doc_starts.shape[1]
        positions = self.own_positions[:t]
        if doc_stats is not None:
            return documents_of(doc_starts, positions, doc_stats)
        ranks = self.config.max_seq_len // len(self.positions)  # that share a sequence
        return attention_mask(doc_starts, positions, tokens=t * ranks)

    @torch.no_grad()
    def init_weights(
        self, seed: int, shard_of: Callable[[Tensor], tuple[Tensor, tuple[int, ...]]] | None = None
    ) -> None:
        """Initialize every parameter and buffer in place.

        Values depend on seed and FQN, not on sharding.

        shard_of: parameter -> (this rank's shard, its offset in the unsharded parameter). None: the
        parameter itself.
        """
        device = self.rope_cos.device
        for fqn, parameter in self.named_parameters():
            shard, offset = shard_of(parameter) if shard_of else (parameter, (0,) * parameter.ndim)
            std, cutoff = self._init_std(fqn)
            if std is None:
                shard.fill_(1.0)
            else:
                key = f"{seed}/{fqn}"
                _fill_normal(shard, offset, parameter.shape, std, cutoff, key, device)
        self.init_buffers()

    @torch.no_grad()
    def init_buffers(self) -> None:
        """Fill every buffer with what it is before the first step."""
        device = self.rope_cos.device
        self.rope_cos, self.rope_sin = rope_tables(self.config, self.positions, device)
        self.own_positions = torch.tensor(self.positions, device=device)
        for router in routers_of(self).values():
            router.init_buffers()

    def _init_std(self, fqn: str) -> tuple[float | None, float]:
        """Return (standard deviation, cut-off) by name; None for norms, which start at one.

        Projections into the residual stream shrink with depth, so that its variance stays bounded.
        Logits start with a standard deviation of 1/4, so the first loss is ln(V) + 1/32. Tied
        weights are embeddings, too, and start four times larger: the first loss is about ln(V) +
        1/2 for 1B and 3B, more for a shallower model, where a token first predicts itself.
        """
        if "norm" in fqn:
            return None, 0.0
        if fqn == "tok_embeddings.weight" and not self.config.tied_embeddings:
            return 1.0, math.inf
        if fqn in ("output.weight", "tok_embeddings.weight"):
            std = self.config.dim**-0.5 * (1.0 if self.config.tied_embeddings else 0.25)
            return std, 3 * std
        layer, name = fqn.removeprefix("layers.").split(".", 1)
        if name in (
            *("attention.wo.weight", "feed_forward.w2.weight", "feed_forward.w3.weight"),
            *("moe.experts.w2", "moe.experts.w3"),
        ):
            return 0.02 / math.sqrt(2 * (int(layer) + 1)), 2.0
        return 0.02, 2.0


NUMBERS_PER_BLOCK = 2**20  # drawn by one generator, but at least a row


def _fill_normal(
    shard: Tensor,
    offset: tuple[int, ...],
    shape: torch.Size,
    std: float,
    cutoff: float,
    key: str,
    device: torch.device,
) -> None:
    """Fill `shard`, the part at `offset` of a weight, with normal numbers.

    A weight is (rows, columns), or has these for each expert, one below the other. Numbers are
    drawn on `device`, and truncated to +-cutoff. Rows are drawn in blocks, each from a generator of
    its own, so that a rank draws only the blocks that its shard overlaps.
    """
    if is_of_experts(shape):  # sharded by whole experts
        experts, rows, columns = shape
        shard = shard.view(-1, columns)
        offset = (offset[0] * rows, offset[2])
        shape = torch.Size((experts * rows, columns))
    rows, columns = shape
    first_row, first_column = offset
    end_row = first_row + shard.shape[0]
    end_column = first_column + shard.shape[1]
    block = max(1, NUMBERS_PER_BLOCK // columns)
    for start in range(first_row // block * block, end_row, block):
        numbers = torch.empty(min(block, rows - start), columns, device=device, dtype=torch.float32)
        digest = hashlib.sha256(f"{key}/{start}".encode()).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        if cutoff == math.inf:
            nn.init.normal_(numbers, 0.0, std, generator)
        else:
            nn.init.trunc_normal_(numbers, 0.0, std, -cutoff, cutoff, generator)
        low = max(start, first_row)
        high = min(start + block, end_row)
        own = numbers[low - start : high - start, first_column:end_column]
        shard[low - first_row : high - first_row] = own
