"""Next-token cross-entropy as a sum over tokens; divided by the tokens of all ranks, it is the same on every layout.

    loss = build_loss(vocab_size, tp.rank, tp.degree, tp.group)(logits, labels)         # (B, T, v), (B, T) -> nats, float32
    loss_sum = build_loss(vocab_size, tp.rank, tp.degree, tp.group, chunk=1024)
    loss = loss_sum(hidden, weight, labels)         # (B, T, C), (v, C), (B, T): 1024 tokens are projected at a time

The second takes the input of the projection, so that neither the logits of all tokens nor their gradient exist. by_sequence: a
sum for each sequence (B,) instead of one for the microbatch, for the loss of each source of a mixture.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100  # a label that is not counted


def cross_entropy_sum(logits: Tensor, labels: Tensor, *, by_sequence: bool = False) -> Tensor:
    """Return the loss of logits (B, T, V) and labels (B, T), summed over counted tokens: nats, float32, scalar or (B,)."""
    reduction = "none" if by_sequence else "sum"
    losses = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE_INDEX, reduction=reduction)
    return losses.view(labels.shape).sum(1) if by_sequence else losses


def counted(labels: Tensor) -> Tensor:
    """Return the number of counted labels of each sequence: (B, T) -> (B,)."""
    return (labels != IGNORE_INDEX).sum(1)


def build_loss(
    vocab_size: int, rank: int, degree: int, group: str, *, by_sequence: bool = False, chunk: int = 0
) -> Callable[..., Tensor]:
    """Return (logits, labels) -> loss for rank `rank` of `degree` that share the vocabulary, ceil(V / degree) tokens each.

    chunk: if given, return (hidden states, weight of the projection, labels) -> loss, of so many tokens at a time.
    """
    first = own_vocabulary(vocab_size, rank, degree).start
    if chunk:
        split = functools.partial(chunked_cross_entropy_sum, first=first, degree=degree, group=group)
        return functools.partial(split, chunk=chunk, by_sequence=by_sequence)
    if degree == 1:
        return functools.partial(cross_entropy_sum, by_sequence=True) if by_sequence else cross_entropy_sum
    return functools.partial(vocabulary_parallel_cross_entropy_sum, first=first, group=group, by_sequence=by_sequence)


def own_vocabulary(vocab_size: int, rank: int, degree: int) -> range:
    """Return the tokens whose logits are on rank `rank` of `degree`."""
    share = -(-vocab_size // degree)
    return range(min(rank * share, vocab_size), min((rank + 1) * share, vocab_size))


def vocabulary_parallel_cross_entropy_sum(
    logits: Tensor, labels: Tensor, *, first: int, group: str, by_sequence: bool = False
) -> Tensor:
    """Return the loss from logits (B, T, v) of the v tokens from `first` on; other ranks of `group` have the other tokens.

    No rank has the logits of all tokens: three numbers per label are reduced over the ranks (arXiv 1909.08053, section 3). The
    result is the same on all ranks of the group, and must not be summed over them.
    """
    losses: Tensor = _VocabularyParallelCrossEntropy.apply(logits.flatten(0, 1), labels.flatten(), first, group)
    return losses.view(labels.shape).sum(1) if by_sequence else losses.sum()


class _VocabularyParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, first: int, group: str) -> Tensor:
        shifted = logits.float()
        shifted = shifted - _all_reduce(shifted.amax(-1), "max", group).unsqueeze(-1)
        exponentials = shifted.exp()
        own = labels - first
        inside = (own >= 0) & (own < logits.shape[-1])
        own = own.where(inside, 0).unsqueeze(-1)
        label_logit = shifted.gather(-1, own).squeeze(-1) * inside
        total, label_logit = _all_reduce(torch.stack((exponentials.sum(-1), label_logit)), "sum", group)
        counted = labels != IGNORE_INDEX
        ctx.save_for_backward(exponentials / total.unsqueeze(-1), own, inside & counted, counted)
        ctx.dtype = logits.dtype
        return (total.log() - label_logit) * counted

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, own, inside, counted = ctx.saved_tensors
        result = (probabilities * counted.unsqueeze(-1)).scatter_add(-1, own, -inside.unsqueeze(-1).float())
        return (result * gradient.unsqueeze(-1)).to(ctx.dtype), None, None, None


def chunked_cross_entropy_sum(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, chunk: int, first: int, degree: int, group: str, by_sequence: bool = False
) -> Tensor:
    """Return the loss of hidden states (B, T, C), this rank's rows of the projection (v, C) and labels (B, T), with the logits of
    at most `chunk` tokens at a time. first, degree, group: as above.

    Gradients are computed along with the loss, before its own gradient is known, and are multiplied by it in backward: computing
    the logits again would cost a fourth product besides forward's one and backward's two, and a compiler would find it alike to
    the first and keep all logits. It costs a gradient of `weight` that is kept from forward to backward, and a second rounding
    of gradients in bfloat16. The gradient of `weight` is summed over chunks in float32.

    by_sequence: the gradients of all sequences must be equal, as in a mean; the gradient of `weight` is NaN otherwise.
    """
    arguments = hidden, weight, labels, chunk, first, degree, group
    if torch.is_grad_enabled():
        losses: Tensor = _ChunkedCrossEntropy.apply(*arguments, by_sequence)
        return losses
    return _total(_in_chunks(*arguments, gradients=False)[0], labels, by_sequence)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, *arguments: Any) -> Tensor:
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
        scaled = (each.float() * scale for each, scale in ((of_hidden, gradient), (of_weight, of_all)))
        hidden, weight = (each.to(of_weight.dtype) for each in scaled)
        return hidden, weight, None, None, None, None, None, None


def _total(losses: Tensor, labels: Tensor, by_sequence: bool) -> Tensor:
    return losses.view(labels.shape).sum(1) if by_sequence else losses.sum()


def _in_chunks(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int, first: int, degree: int, group: str, *, gradients: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of each token (B x T,) and the gradients of its sum: of `hidden`, and of `weight`, in their dtype."""
    losses, of_hidden = [], []
    of_weight = weight  # replaced by the first chunk
    for x, label in zip(hidden.flatten(0, 1).split(chunk), labels.flatten().split(chunk), strict=True):
        counted, own = label != IGNORE_INDEX, label - first
        inside = (own >= 0) & (own < weight.shape[0])
        own = own.where(inside, 0).unsqueeze(-1)
        log_p = _log_probabilities(F.linear(x, weight), degree, group)
        losses.append(-log_p.gather(-1, own).squeeze(-1).where(inside & counted, 0.0))
        if gradients:
            # of the logits, p - 1 at the label; it is masked where it has become narrow
            of_logits = log_p.exp_().scatter_add_(-1, own, -inside.unsqueeze(-1).float()).to(weight.dtype)
            del log_p
            mask = counted.unsqueeze(-1)
            of_hidden.append(of_logits @ weight * mask)
            product = of_logits.T @ (x * mask)
            of_weight = product.float() if of_weight is weight else _add(of_weight, product)
            del of_logits
    found = torch.cat(losses)
    if degree > 1:  # the label of a token is in one rank's vocabulary
        found = _all_reduce(found, "sum", group)
    return found, torch.cat(of_hidden).view(hidden.shape) if gradients else hidden, of_weight.to(weight.dtype)


def _add(total: Tensor, product: Tensor) -> Tensor:
    return _added(total, product) if torch.compiler.is_compiling() else total.add_(product)


# A compiler would fuse plain sums of all chunks into one kernel, and keep the products of all until then.
@torch.library.custom_op("titan_lite::added", mutates_args=())
def _added(total: Tensor, product: Tensor) -> Tensor:
    return total + product


@_added.register_fake
def _(total: Tensor, product: Tensor) -> Tensor:
    return torch.empty_like(total)


def _log_probabilities(logits: Tensor, degree: int, group: str) -> Tensor:
    """Return the logarithms of the probabilities of this rank's tokens of the vocabulary, (t, v) -> (t, v), float32."""
    found = F.log_softmax(logits, -1, dtype=torch.float32)
    if degree == 1:
        return found
    most, where = found.max(-1, keepdim=True)
    own = logits.gather(-1, where).float() - most  # logarithm of the sum of this rank's exponentials
    collectives = torch.ops._c10d_functional
    every = collectives.wait_tensor(collectives.all_gather_into_tensor(own.T.contiguous(), degree, group))
    return found.add_(own - every.logsumexp(0).unsqueeze(-1))


def _all_reduce(tensor: Tensor, operation: str, group: str) -> Tensor:
    collectives = torch.ops._c10d_functional
    return collectives.wait_tensor(collectives.all_reduce(tensor, operation, group))
