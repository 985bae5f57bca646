"""The summed cross-entropy from hidden states and the projection to the vocabulary, a chunk of
tokens at a time.

    loss_sum = build_chunked_loss(vocab_size, tp.rank, tp.degree, tp.group, chunk=layout.loss_chunk)
    loss = loss_sum(hidden, weight, labels)         # (B, T, C), (v, C), (B, T) -> nats, float32, scalar or (B,)

Neither the logits of all tokens nor their gradient exist. It is the loss of models/loss.py but for
rounding.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_lite.models.loss import IGNORE_INDEX, all_reduce, build_loss
from titan_lite.sharding import chunk_range


def build_chunked_loss(
    vocab_size: int, rank: int, degree: int, group: str, *, chunk: int, by_sequence: bool = False
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return (hidden states, weight of the projection, labels) -> loss of `chunk` tokens at a time.

    Rest: as for `build_loss`.
    """
    first = chunk_range(vocab_size, degree, rank).start
    split = functools.partial(chunked_cross_entropy_sum, first=first, degree=degree, group=group)
    return functools.partial(split, chunk=chunk, by_sequence=by_sequence)


def build_losses(
    tokens: tuple[int, int],
    share: tuple[int, int, int, str],
    *,
    by_sequence: bool,
    chunk: int,
    in_graph: bool,
    compile: Callable[..., Callable],
) -> tuple[Callable[..., Tensor] | None, Callable[[Tensor, Tensor], Tensor], tuple[int, ...]]:
    """Return (the loss that the model computes or None, the loss of its output, the shape of that
    output for `tokens` (B, T)).

    share: the first arguments of `build_loss`. compile: for a loss that is not in the compiled
    graph of a model (in_graph).
    """
    if not chunk:
        vocab_size, rank, degree, _ = share
        return (
            None,
            compile(build_loss(*share, by_sequence=by_sequence), component="loss"),
            (*tokens, len(chunk_range(vocab_size, degree, rank))),
        )
    within = build_chunked_loss(*share, chunk=chunk, by_sequence=by_sequence)
    return (
        within if in_graph else compile(within, component="loss"),
        _given,
        tokens[:1] if by_sequence else (),
    )


def _given(losses: Tensor, labels: Tensor) -> Tensor:
    return losses


def chunked_cross_entropy_sum(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    chunk: int,
    first: int,
    degree: int,
    group: str,
    by_sequence: bool = False,
) -> Tensor:
    """Return the loss of hidden states (B, T, C), this rank's rows of the projection (v, C) and
    labels (B, T), with the logits of at most `chunk` tokens at a time. `first`: the first token of
    the vocabulary on this rank.

    Gradients are computed along with the loss, before its own gradient is known, and are multiplied
    by it in backward: computing the logits again would cost a fourth product besides forward's one
    and backward's two, and a compiler would find it alike to the first and keep all logits. It
    costs a gradient of `weight` that is kept from forward to backward, and a second rounding of
    gradients in bfloat16. The gradient of `weight` is summed over chunks in float32.

    by_sequence: the gradients of all sequences must be equal, as in a mean; the gradient of
    `weight` is NaN otherwise.
    """
    arguments = hidden, weight, labels, chunk, first, degree, group
    if torch.is_grad_enabled():
        losses: Tensor = _ChunkedCrossEntropy.apply(*arguments, by_sequence)
        return losses
    return _total(_in_chunks(*arguments, gradients=False)[0], labels, by_sequence)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, *arguments: Any
    ) -> Tensor:
        *where, by_sequence = arguments
        losses, of_hidden, of_weight = _in_chunks(hidden, weight, labels, *where, gradients=True)
        ctx.save_for_backward(of_hidden, of_weight)
        return _total(losses, labels, by_sequence)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        of_hidden, of_weight = ctx.saved_tensors
        of_all = gradient
        if gradient.dim():
            of_all = gradient.where(gradient == gradient[0], torch.nan).amax()
            gradient = gradient.view(-1, 1, 1)
        # in float32: torch would round a scalar to the dtype of a tensor in bfloat16
        scaled = (
            each.float() * scale for each, scale in ((of_hidden, gradient), (of_weight, of_all))
        )
        hidden, weight = (each.to(of_weight.dtype) for each in scaled)
        return hidden, weight, None, None, None, None, None, None


def _total(losses: Tensor, labels: Tensor, by_sequence: bool) -> Tensor:
    return losses.view(labels.shape).sum(1) if by_sequence else losses.sum()


def _in_chunks(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    chunk: int,
    first: int,
    degree: int,
    group: str,
    *,
    gradients: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of each token (B x T,) and the gradients of its sum: of `hidden`, and of
    `weight`, in their dtype.
    """
    losses, of_hidden = [], []
    of_weight = weight  # replaced by the first chunk
    for x, label in zip(
        hidden.flatten(0, 1).split(chunk), labels.flatten().split(chunk), strict=True
    ):
        counted, own = label != IGNORE_INDEX, label - first
        inside = (own >= 0) & (own < weight.shape[0])
        own = own.where(inside, 0).unsqueeze(-1)
        log_p = _log_probabilities(F.linear(x, weight), degree, group)
        losses.append(-log_p.gather(-1, own).squeeze(-1).where(inside & counted, 0.0))
        if gradients:
            # of the logits, p - 1 at the label; it is masked where it has become narrow
            of_logits = (
                log_p.exp_().scatter_add_(-1, own, -inside.unsqueeze(-1).float()).to(weight.dtype)
            )
            del log_p
            mask = counted.unsqueeze(-1)
            of_hidden.append(of_logits @ weight * mask)
            product = of_logits.T @ (x * mask)
            of_weight = product.float() if of_weight is weight else _add(of_weight, product)
            del of_logits
    found = torch.cat(losses)
    if degree > 1:  # the label of a token is in one rank's vocabulary
        found = all_reduce(found, "sum", group)
    return (
        found,
        torch.cat(of_hidden).view(hidden.shape) if gradients else hidden,
        of_weight.to(weight.dtype),
    )


def _add(total: Tensor, product: Tensor) -> Tensor:
    return _added(total, product) if torch.compiler.is_compiling() else total.add_(product)


# A compiler would fuse plain sums of all chunks into one kernel, and keep the products of all until
# then.
@torch.library.custom_op("titan_lite::added", mutates_args=())
def _added(total: Tensor, product: Tensor) -> Tensor:
    return total + product


@_added.register_fake
def _(total: Tensor, product: Tensor) -> Tensor:
    return torch.empty_like(total)


def _log_probabilities(logits: Tensor, degree: int, group: str) -> Tensor:
    """Return the logarithms of the probabilities of this rank's tokens of the vocabulary, (t, v) ->
    (t, v), float32.
    """
    found = F.log_softmax(logits, -1, dtype=torch.float32)
    if degree == 1:
        return found
    most, where = found.max(-1, keepdim=True)
    own = (
        logits.gather(-1, where).float() - most
    )  # logarithm of the sum of this rank's exponentials
    collectives = torch.ops._c10d_functional
    every = collectives.wait_tensor(
        collectives.all_gather_into_tensor(own.T.contiguous(), degree, group)
    )
    return found.add_(own - every.logsumexp(0).unsqueeze(-1))
