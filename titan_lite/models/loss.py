"""Next-token cross-entropy as a sum over tokens; divided by the tokens of all ranks, it is the same
on every layout.

by_sequence: a sum for each sequence (B,) instead of one for the microbatch, for the loss of each
source of a mixture.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_lite.sharding import chunk_range

IGNORE_INDEX = -100  # a label that is not counted


def cross_entropy_sum(logits: Tensor, labels: Tensor, *, by_sequence: bool = False) -> Tensor:
    """Return the loss of logits (B, T, V) and labels (B, T), summed over counted tokens: nats,
    float32, scalar or (B,).
    """
    reduction = "none" if by_sequence else "sum"
    losses = F.cross_entropy(
        logits.flatten(0, 1).float(),
        labels.flatten(),
        ignore_index=IGNORE_INDEX,
        reduction=reduction,
    )
    return losses.view(labels.shape).sum(1) if by_sequence else losses


def counted(labels: Tensor) -> Tensor:
    """Return the number of counted labels of each sequence: (B, T) -> (B,)."""
    return (labels != IGNORE_INDEX).sum(1)


def build_loss(
    vocab_size: int, rank: int, degree: int, group: str, *, by_sequence: bool = False
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return (logits, labels) -> loss for rank `rank` of `degree` that share the vocabulary, ceil(V
    / degree) tokens each.
    """
    if degree == 1:
        return (
            functools.partial(cross_entropy_sum, by_sequence=True)
            if by_sequence
            else cross_entropy_sum
        )
    first = chunk_range(vocab_size, degree, rank).start
    return functools.partial(
        vocabulary_parallel_cross_entropy_sum, first=first, group=group, by_sequence=by_sequence
    )


def vocabulary_parallel_cross_entropy_sum(
    logits: Tensor, labels: Tensor, *, first: int, group: str, by_sequence: bool = False
) -> Tensor:
    """Return the loss from logits (B, T, v) of the v tokens from `first` on; other ranks of `group`
    have the other tokens.

    No rank has the logits of all tokens: three numbers per label are reduced over the ranks (arXiv
    1909.08053, section 3). The result is the same on all ranks of the group, and must not be summed
    over them.
    """
    losses: Tensor = _VocabularyParallelCrossEntropy.apply(
        logits.flatten(0, 1), labels.flatten(), first, group
    )
    return losses.view(labels.shape).sum(1) if by_sequence else losses.sum()


class _VocabularyParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, first: int, group: str) -> Tensor:
        shifted = logits.float()
        shifted = shifted - all_reduce(shifted.amax(-1), "max", group).unsqueeze(-1)
        exponentials = shifted.exp()
        own = labels - first
        inside = (own >= 0) & (own < logits.shape[-1])
        own = own.where(inside, 0).unsqueeze(-1)
        label_logit = shifted.gather(-1, own).squeeze(-1) * inside
        total, label_logit = all_reduce(
            torch.stack((exponentials.sum(-1), label_logit)), "sum", group
        )
        counted = labels != IGNORE_INDEX
        ctx.save_for_backward(exponentials / total.unsqueeze(-1), own, inside & counted, counted)
        ctx.dtype = logits.dtype
        return (total.log() - label_logit) * counted

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, own, inside, counted = ctx.saved_tensors
        result = (probabilities * counted.unsqueeze(-1)).scatter_add(
            -1, own, -inside.unsqueeze(-1).float()
        )
        return (result * gradient.unsqueeze(-1)).to(ctx.dtype), None, None, None


def all_reduce(tensor: Tensor, operation: str, group: str) -> Tensor:
    collectives = torch.ops._c10d_functional
    return collectives.wait_tensor(collectives.all_reduce(tensor, operation, group))
