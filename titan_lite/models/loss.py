"""Compute next-token cross-entropy as a sum over the tokens of each sequence.

    loss = Loss(VocabularyShard(vocab_size, axis_of(mesh["tp"])), chunk=layout.loss_chunk)
    model.output.loss = loss
    model(tokens, labels=labels)                # (B,), nats, float32

The projection to the vocabulary is part of the loss. A sum divided by the tokens of all ranks is
the same on every layout. With `chunk`, the loss is computed for that many tokens at a time: neither
the logits of all tokens nor their gradient exist. It is the same loss but for rounding.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_lite.collectives import ALONE, Axis, all_gather, all_reduce
from titan_lite.sharding import chunk_range

IGNORE_INDEX = -100  # a label that is not counted


class VocabularyShard(NamedTuple):
    """The part of the vocabulary whose logits a rank computes: all of it, or one of `degree`."""

    vocab_size: int
    axis: Axis = ALONE  # ranks that share the vocabulary, ceil(vocab_size / degree) entries each

    @property
    def entries(self) -> range:
        """The entries of the vocabulary on this rank. The last ranks may have fewer, or none."""
        return chunk_range(self.vocab_size, self.axis.degree, self.axis.rank)

    def find(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the index of each token among this rank's entries, and True where it is one.

        The index of a token on another rank, or of a label that is not counted, is 0.
        """
        index = tokens - self.entries.start
        inside = (index >= 0) & (index < len(self.entries))
        return index.where(inside, 0), inside


class Loss:
    """Hidden states (B, T, C), the projection to this rank's entries of the vocabulary (v, C) and
    labels (B, T) -> the summed loss of each sequence (B,).

    Where ranks share the vocabulary, each has the full loss: it must not be summed over them.
    """

    def __init__(self, vocabulary: VocabularyShard, *, chunk: int = 0):
        """chunk: the tokens whose logits exist at a time; 0: all."""
        self.vocabulary = vocabulary
        self.chunk = chunk

    def __call__(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        vocabulary = self.vocabulary
        if self.chunk:
            return chunked_cross_entropy(hidden, weight, labels, vocabulary, chunk=self.chunk)
        return cross_entropy_on_ranks(F.linear(hidden, weight), labels, vocabulary)


def counted(labels: Tensor) -> Tensor:
    """Return the number of counted labels of each sequence: (B, T) -> (B,)."""
    return (labels != IGNORE_INDEX).sum(1)


# --- The logits of all tokens ---------------------------------------------------------------------


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of logits (B, T, V) and labels (B, T), summed over the counted tokens of each
    sequence: (B,).
    """
    losses = F.cross_entropy(
        logits.flatten(0, 1).float(),
        labels.flatten(),
        ignore_index=IGNORE_INDEX,
        reduction="none",
    )
    return losses.view(labels.shape).sum(1)


def cross_entropy_on_ranks(logits: Tensor, labels: Tensor, vocabulary: VocabularyShard) -> Tensor:
    """Return the `cross_entropy` of this rank's logits (B, T, v), the same on all ranks.

    No rank has the logits of all entries: three numbers for each label are reduced over the ranks
    (arXiv 1909.08053, section 3).
    """
    if vocabulary.axis.degree == 1:
        return cross_entropy(logits, labels)
    losses: Tensor = _VocabularyParallelCrossEntropy.apply(
        logits.flatten(0, 1), labels.flatten(), vocabulary
    )
    return losses.view(labels.shape).sum(1)


class _VocabularyParallelCrossEntropy(torch.autograd.Function):
    """(logits (N, v), labels (N,)) -> the loss of each token (N,)."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 torch's
        logits: Tensor,
        labels: Tensor,
        vocabulary: VocabularyShard,
    ) -> Tensor:
        shifted = logits.float()
        shifted = shifted - all_reduce(shifted.amax(-1), "max", vocabulary.axis.group).unsqueeze(-1)
        exponentials = shifted.exp()
        own, inside = vocabulary.find(labels)
        own = own.unsqueeze(-1)
        label_logit = shifted.gather(-1, own).squeeze(-1) * inside
        sums = torch.stack((exponentials.sum(-1), label_logit))
        total, label_logit = all_reduce(sums, "sum", vocabulary.axis.group)
        counted = labels != IGNORE_INDEX
        ctx.save_for_backward(exponentials / total.unsqueeze(-1), own, inside & counted, counted)
        ctx.dtype = logits.dtype
        return (total.log() - label_logit) * counted

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401 torch's
        probabilities, own, inside, counted = ctx.saved_tensors
        one_hot = inside.unsqueeze(-1).float()
        logits_grad = (probabilities * counted.unsqueeze(-1)).scatter_add(-1, own, -one_hot)
        return (logits_grad * gradient.unsqueeze(-1)).to(ctx.dtype), None, None


# --- A chunk of tokens at a time ------------------------------------------------------------------


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, vocabulary: VocabularyShard, *, chunk: int
) -> Tensor:
    """Return the loss of hidden states (B, T, C), with logits of at most `chunk` tokens at a time,
    summed over the counted tokens of each sequence: (B,).

    weight: this rank's entries of the projection, (v, C). labels: (B, T).

    Gradients are computed along with the loss, before its own gradient is known, and are multiplied
    by it in backward: computing the logits again would cost a fourth matmul besides forward's one
    and backward's two, and a compiler would find it alike to the first and keep all logits. It
    costs a gradient of `weight` that is kept from forward to backward, and a second rounding of
    gradients in bfloat16. The gradient of `weight` is summed over chunks in float32.

    The gradients of all sequences must be equal, as in a mean; the gradient of `weight` is NaN
    otherwise.
    """
    if torch.is_grad_enabled():
        losses: Tensor = _ChunkedCrossEntropy.apply(hidden, weight, labels, vocabulary, chunk)
        return losses
    chunks = _compute_chunks(hidden, weight, labels, vocabulary, chunk, with_gradients=False)
    return chunks.losses.view(labels.shape).sum(1)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 torch's
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        vocabulary: VocabularyShard,
        chunk: int,
    ) -> Tensor:
        chunks = _compute_chunks(hidden, weight, labels, vocabulary, chunk, with_gradients=True)
        ctx.save_for_backward(chunks.hidden_grad, chunks.weight_grad)
        return chunks.losses.view(labels.shape).sum(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None, None]:  # noqa: ANN401 torch's
        hidden_grad, weight_grad = ctx.saved_tensors
        gradient_of_all = gradient.where(gradient == gradient[0], torch.nan).amax()
        # in float32: torch would round a scalar to the dtype of a tensor in bfloat16
        hidden_grad = (hidden_grad.float() * gradient.view(-1, 1, 1)).to(weight_grad.dtype)
        weight_grad = (weight_grad.float() * gradient_of_all).to(weight_grad.dtype)
        return hidden_grad, weight_grad, None, None, None


class _Chunks(NamedTuple):
    """The losses of all chunks, and the gradients of their sum in the dtype of what they are of."""

    losses: Tensor  # of each token (B x T,)
    hidden_grad: Tensor  # (B, T, C); without meaning where no gradients were asked for
    weight_grad: Tensor  # (v, C)


def _compute_chunks(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    vocabulary: VocabularyShard,
    chunk: int,
    *,
    with_gradients: bool,
) -> _Chunks:
    losses: list[Tensor] = []
    hidden_grads: list[Tensor] = []
    weight_grad: Tensor | None = None  # float32
    for x, label in zip(
        hidden.flatten(0, 1).split(chunk), labels.flatten().split(chunk), strict=True
    ):
        counted = label != IGNORE_INDEX
        own, inside = vocabulary.find(label)
        own = own.unsqueeze(-1)
        log_p = log_probabilities(F.linear(x, weight), vocabulary)
        losses.append(-log_p.gather(-1, own).squeeze(-1).where(inside & counted, 0.0))
        if with_gradients:
            # of the logits, p - 1 at the label; it is masked where it has become narrow
            one_hot = inside.unsqueeze(-1).float()
            logits_grad = log_p.exp_().scatter_add_(-1, own, -one_hot).to(weight.dtype)
            del log_p  # before the matmuls: its bytes are those of the logits
            mask = counted.unsqueeze(-1)
            hidden_grads.append(logits_grad @ weight * mask)
            product = logits_grad.T @ (x * mask)
            weight_grad = product.float() if weight_grad is None else _add(weight_grad, product)
            del logits_grad
    all_losses = torch.cat(losses)
    if vocabulary.axis.degree > 1:  # the label of a token is in one rank's part of the vocabulary
        all_losses = all_reduce(all_losses, "sum", vocabulary.axis.group)
    if weight_grad is None:
        return _Chunks(all_losses, hidden, weight)
    return _Chunks(
        all_losses, torch.cat(hidden_grads).view(hidden.shape), weight_grad.to(weight.dtype)
    )


def log_probabilities(logits: Tensor, vocabulary: VocabularyShard) -> Tensor:
    """Return the log-probabilities of this rank's entries: (t, v) -> (t, v), float32."""
    log_p = F.log_softmax(logits, -1, dtype=torch.float32)  # as if this rank had all entries
    if vocabulary.axis.degree == 1:
        return log_p
    highest, index = log_p.max(-1, keepdim=True)
    log_sum = logits.gather(-1, index).float() - highest  # log of the sum of own exponentials
    log_sums = all_gather(log_sum.T.contiguous(), vocabulary.axis.degree, vocabulary.axis.group)
    return log_p.add_(log_sum - log_sums.logsumexp(0).unsqueeze(-1))


def _add(total: Tensor, product: Tensor) -> Tensor:
    return _added(total, product) if torch.compiler.is_compiling() else total.add_(product)


# A compiler would fuse plain sums of all chunks into one kernel, and keep the matmuls of all until
# then.
@torch.library.custom_op("titan_lite::added", mutates_args=())
def _added(total: Tensor, product: Tensor) -> Tensor:
    return total + product


@_added.register_fake
def _(total: Tensor, product: Tensor) -> Tensor:
    return torch.empty_like(total)
