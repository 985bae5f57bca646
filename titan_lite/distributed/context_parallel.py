"""Context parallelism: a rank has some tokens of every sequence, and attends to gathered keys and
values.

    positions = own_positions(seq_len, rank, degree)    # of this rank's tokens: input, labels, RoPE
    apply_context_parallel(model, axis_of(mesh["cp"]), causal_attention)

As in Llama 3 (arXiv 2407.21783, section 3.3.2), keys and values are all-gathered along the
sequence, and their gradients are reduce-scattered; GQA makes both small. Both are nodes of the
graph. With n ranks a sequence has 2n chunks. Rank r has chunks r and 2n - 1 - r, its head and its
tail, so that all ranks do the same work under a causal mask:

    chunks of one sequence, n = 2     [0 | 1 | 2 | 3]
    rank 0                             0           3     1 + 4 chunks attended to
    rank 1                                 1   2         2 + 3
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_lite.collectives import Axis
from titan_lite.distributed.tensor_parallel import gather_tokens
from titan_lite.models.attention import fits_flash
from titan_lite.models.transformer import Transformer, attend, attentions_of

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]  # as `causal_attention`


def own_positions(seq_len: int, rank: int, degree: int) -> list[int]:
    """Return the positions within a sequence of the tokens of rank `rank`, in its order."""
    if degree == 1:
        return [*range(seq_len)]
    chunk = seq_len // (2 * degree)
    head = rank * chunk
    tail = (2 * degree - 1 - rank) * chunk
    return [*range(head, head + chunk), *range(tail, tail + chunk)]


def apply_context_parallel(model: Transformer, axis: Axis, attend: Attend) -> None:
    """Replace the attention of `model` in place.

    Call it before `apply_tensor_parallel`. Raises ConfigError for a block whose attention is not
    what is replaced.
    """
    if axis.degree == 1:
        return
    user = f"parallelism.context_parallel_degree = {axis.degree} gathers keys and values"
    otherwise = ", or use parallelism.context_parallel_degree = 1"
    parallel = ContextParallelAttention(axis, attend)
    for attention in attentions_of(model, user, otherwise).values():
        attention.attend = parallel  # in place of the function


@contextmanager
def whole_sequences(model: Transformer) -> Iterator[None]:
    """Return a context without context parallelism: a rank has whole sequences of its own."""
    attentions: list[Any] = [getattr(block, "attention", None) for block in model.layers.values()]
    parallel = {
        attention: attention.attend
        for attention in attentions
        if isinstance(getattr(attention, "attend", None), ContextParallelAttention)
    }
    for attention in parallel:
        attention.attend = attend
    try:
        yield
    finally:
        for attention, attend_to_all in parallel.items():
            attention.attend = attend_to_all


@dataclass(frozen=True)
class ContextParallelAttention:
    """Attention from this rank's queries to the keys and values of all ranks."""

    axis: Axis
    attend: Attend

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Attend from own q (B, t, H, D) to k and v (B, t, K, D) of all ranks -> (B, t, H, D).

        mask: (B, 1, t, T).
        """
        gathered = gather_tokens(torch.cat((k, v), dim=2), self.axis)
        heads = [k.shape[2], v.shape[2]]
        k, v = in_position_order(gathered, self.axis.degree).split(heads, dim=2)
        head, tail = q.chunk(2, dim=1)
        head_mask, tail_mask = (None, None) if mask is None else mask.chunk(2, dim=2)
        chunk = head.shape[1]
        # positions up to the end of the head and of the tail
        head_end = (self.axis.rank + 1) * chunk
        tail_end = (2 * self.axis.degree - self.axis.rank) * chunk
        of_head = self.attend(head, k[:, :head_end], v[:, :head_end], head_mask)
        of_tail = self.attend(tail, k[:, :tail_end], v[:, :tail_end], tail_mask)
        return torch.cat((of_head, of_tail), dim=1)


def in_position_order(gathered: Tensor, degree: int) -> Tensor:
    """Reorder gathered tokens (B, T, ...) from rank order to position order."""
    by_rank = gathered.unflatten(1, (degree, 2, -1))  # rank, head or tail, token
    heads = by_rank[:, :, 0].flatten(1, 2)
    tails = by_rank[:, :, 1].flip(1).flatten(1, 2)
    return torch.cat((heads, tails), dim=1)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attend causally from q (B, t, H, D), the last t of S positions, to k and v (B, S, K, D) ->
    (B, t, H, D).

    mask: (B, 1, t, S or more), True where a query attends; None: causal. The kernel is
    FlashAttention in the version that attention.use_kernel has set, or
    F.scaled_dot_product_attention where that does not fit.
    """
    flash = (
        mask is None
        and q.is_cuda
        and fits_flash(q.dtype, q.shape[-1])
        and torch.backends.cuda.is_flash_attention_available()
    )
    # no CUDA kernel takes a mask and grouped heads
    if mask is not None or (q.is_cuda and not flash):
        heads_per_group = q.shape[2] // k.shape[2]
        k = k.repeat_interleave(heads_per_group, dim=2)
        v = v.repeat_interleave(heads_per_group, dim=2)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if flash:
        # Its causal mask is aligned to the lower right corner. F.scaled_dot_product_attention needs
        # a full mask for that, or torch.nn.attention.bias.causal_lower_right, which breaks the
        # graph.
        out = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, dropout_p=0.0, is_causal=True
        )[0]
        return out.transpose(1, 2)
    tokens, past = q.shape[2], k.shape[2]
    if mask is None:
        mask = torch.ones(tokens, past, dtype=torch.bool, device=q.device).tril(past - tokens)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask[..., :past], enable_gqa=k.shape[1] < q.shape[1]
    )
    return out.transpose(1, 2)
