"""Compute next-token cross-entropy as a sum over tokens, from logits or from hidden states.

    loss = Loss(VocabularyShard(vocab_size, tp.rank, tp.degree, tp.group), chunk=layout.loss_chunk)
    loss.of_output(model(tokens), labels)                      # chunk = 0: the model returns logits

    model.output.loss_sum = loss.of_hidden                     # chunk > 0: it returns their loss
    loss.of_output(model(tokens, labels=labels), labels)

A sum divided by the tokens of all ranks is the same on every layout. With `chunk`, the projection
to the vocabulary is part of the loss, which is computed for that many tokens at a time: neither the
logits of all tokens nor their gradient exist. It is the same loss but for rounding.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_lite.collectives import all_gather, all_reduce
from titan_lite.sharding import chunk_range

IGNORE_INDEX = -100  # a label that is not counted


class VocabularyShard(NamedTuple):
    """The part of the vocabulary whose logits a rank computes: all of it, or one of `degree`."""

    vocab_size: int
    rank: int = 0
    degree: int = 1  # ranks that share the vocabulary, ceil(vocab_size / degree) entries each
    group: str = ""  # name of their process group

    @property
    def entries(self) -> range:
        """The entries of the vocabulary on this rank. The last ranks may have fewer, or none."""
        return chunk_range(self.vocab_size, self.degree, self.rank)

    def find(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the index of each token among this rank's entries, and True where it is one.

        The index of a token on another rank, or of a label that is not counted, is 0.
        """
        index = tokens - self.entries.start
        inside = (index >= 0) & (index < len(self.entries))
        return index.where(inside, 0), inside


class Loss:
    """The summed loss of a microbatch: nats, float32, scalar or one for each sequence (B,).

    Where ranks share the vocabulary, each has the full loss: it must not be summed over them.
    """

    def __init__(
        self,
        vocabulary: VocabularyShard,
        *,
        chunk: int = 0,
        by_sequence: bool = False,
        compile: Callable[[Callable], Callable] | None = None,
    ):
        """Choose the loss of logits (chunk = 0) or that of hidden states, `chunk` tokens at a time.

        by_sequence: a sum for each sequence, for the losses of the sources of a mixture. compile:
        compiles the function; None: it runs eagerly, or within the graph of a compiled model.
        """
        self.vocabulary = vocabulary
        self.chunk = chunk
        self.by_sequence = by_sequence
        # (logits (B, T, v), labels (B, T)) -> loss
        self.of_logits: Callable[[Tensor, Tensor], Tensor] = self._of_logits
        # (hidden states (B, T, C), weight of the projection (v, C), labels (B, T)) -> loss
        self.of_hidden: Callable[[Tensor, Tensor, Tensor], Tensor] = self._of_hidden
        if compile is not None:
            self.of_logits = compile(self._of_logits)
            self.of_hidden = compile(self._of_hidden)

    def of_output(self, output: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of what the model returns: of its logits, or with `chunk` itself."""
        return output if self.chunk else self.of_logits(output, labels)

    def output_shape(self, sequences: int, tokens: int) -> tuple[int, ...]:
        """Return the shape of what the model returns for `sequences` of `tokens`."""
        if not self.chunk:
            return sequences, tokens, len(self.vocabulary.entries)
        return (sequences,) if self.by_sequence else ()

    def _of_logits(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self.vocabulary.degree == 1:
            return cross_entropy_sum(logits, labels, by_sequence=self.by_sequence)
        return vocabulary_parallel_cross_entropy_sum(
            logits, labels, self.vocabulary, by_sequence=self.by_sequence
        )

    def _of_hidden(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return chunked_cross_entropy_sum(
            hidden, weight, labels, self.vocabulary, chunk=self.chunk, by_sequence=self.by_sequence
        )


def counted(labels: Tensor) -> Tensor:
    """Return the number of counted labels of each sequence: (B, T) -> (B,)."""
    return (labels != IGNORE_INDEX).sum(1)


# --- The logits of all tokens ---------------------------------------------------------------------


def cross_entropy_sum(logits: Tensor, labels: Tensor, *, by_sequence: bool = False) -> Tensor:
    """Return the loss of logits (B, T, V) and labels (B, T), summed over counted tokens."""
    losses = F.cross_entropy(
        logits.flatten(0, 1).float(),
        labels.flatten(),
        ignore_index=IGNORE_INDEX,
        reduction="none" if by_sequence else "sum",
    )
    return losses.view(labels.shape).sum(1) if by_sequence else losses


def vocabulary_parallel_cross_entropy_sum(
    logits: Tensor, labels: Tensor, vocabulary: VocabularyShard, *, by_sequence: bool = False
) -> Tensor:
    """Return the loss of this rank's logits (B, T, v) and labels (B, T), the same on all ranks.

    No rank has the logits of all entries: three numbers for each label are reduced over the ranks
    (arXiv 1909.08053, section 3).
    """
    losses: Tensor = _VocabularyParallelCrossEntropy.apply(
        logits.flatten(0, 1), labels.flatten(), vocabulary
    )
    return _sum_of_tokens(losses, labels, by_sequence)


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
        shifted = shifted - all_reduce(shifted.amax(-1), "max", vocabulary.group).unsqueeze(-1)
        exponentials = shifted.exp()
        own, inside = vocabulary.find(labels)
        own = own.unsqueeze(-1)
        label_logit = shifted.gather(-1, own).squeeze(-1) * inside
        sums = torch.stack((exponentials.sum(-1), label_logit))
        total, label_logit = all_reduce(sums, "sum", vocabulary.group)
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


def chunked_cross_entropy_sum(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    vocabulary: VocabularyShard,
    *,
    chunk: int,
    by_sequence: bool = False,
) -> Tensor:
    """Return the loss of hidden states (B, T, C), with logits of at most `chunk` tokens at a time.

    weight: this rank's entries of the projection, (v, C). labels: (B, T).

    Gradients are computed along with the loss, before its own gradient is known, and are multiplied
    by it in backward: computing the logits again would cost a fourth product besides forward's one
    and backward's two, and a compiler would find it alike to the first and keep all logits. It
    costs a gradient of `weight` that is kept from forward to backward, and a second rounding of
    gradients in bfloat16. The gradient of `weight` is summed over chunks in float32.

    by_sequence: the gradients of all sequences must be equal, as in a mean; the gradient of
    `weight` is NaN otherwise.
    """
    if torch.is_grad_enabled():
        losses: Tensor = _ChunkedCrossEntropy.apply(
            hidden, weight, labels, vocabulary, chunk, by_sequence
        )
        return losses
    chunks = _compute_chunks(hidden, weight, labels, vocabulary, chunk, with_gradients=False)
    return _sum_of_tokens(chunks.losses, labels, by_sequence)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 torch's
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        vocabulary: VocabularyShard,
        chunk: int,
        by_sequence: bool,
    ) -> Tensor:
        chunks = _compute_chunks(hidden, weight, labels, vocabulary, chunk, with_gradients=True)
        ctx.save_for_backward(chunks.hidden_grad, chunks.weight_grad)
        return _sum_of_tokens(chunks.losses, labels, by_sequence)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:  # noqa: ANN401 torch's
        hidden_grad, weight_grad = ctx.saved_tensors
        gradient_of_all = gradient
        if gradient.dim():  # one for each sequence
            gradient_of_all = gradient.where(gradient == gradient[0], torch.nan).amax()
            gradient = gradient.view(-1, 1, 1)
        # in float32: torch would round a scalar to the dtype of a tensor in bfloat16
        hidden_grad = (hidden_grad.float() * gradient).to(weight_grad.dtype)
        weight_grad = (weight_grad.float() * gradient_of_all).to(weight_grad.dtype)
        return hidden_grad, weight_grad, None, None, None, None


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
        log_p = _log_probabilities(F.linear(x, weight), vocabulary)
        losses.append(-log_p.gather(-1, own).squeeze(-1).where(inside & counted, 0.0))
        if with_gradients:
            # of the logits, p - 1 at the label; it is masked where it has become narrow
            one_hot = inside.unsqueeze(-1).float()
            logits_grad = log_p.exp_().scatter_add_(-1, own, -one_hot).to(weight.dtype)
            del log_p  # before the products: its bytes are those of the logits
            mask = counted.unsqueeze(-1)
            hidden_grads.append(logits_grad @ weight * mask)
            product = logits_grad.T @ (x * mask)
            weight_grad = product.float() if weight_grad is None else _add(weight_grad, product)
            del logits_grad
    all_losses = torch.cat(losses)
    if vocabulary.degree > 1:  # the label of a token is in one rank's part of the vocabulary
        all_losses = all_reduce(all_losses, "sum", vocabulary.group)
    if weight_grad is None:
        return _Chunks(all_losses, hidden, weight)
    return _Chunks(
        all_losses, torch.cat(hidden_grads).view(hidden.shape), weight_grad.to(weight.dtype)
    )


def _log_probabilities(logits: Tensor, vocabulary: VocabularyShard) -> Tensor:
    """Return the log-probabilities of this rank's entries: (t, v) -> (t, v), float32."""
    log_p = F.log_softmax(logits, -1, dtype=torch.float32)  # as if this rank had all entries
    if vocabulary.degree == 1:
        return log_p
    highest, index = log_p.max(-1, keepdim=True)
    log_sum = logits.gather(-1, index).float() - highest  # log of the sum of own exponentials
    log_sums = all_gather(log_sum.T.contiguous(), vocabulary.degree, vocabulary.group)
    return log_p.add_(log_sum - log_sums.logsumexp(0).unsqueeze(-1))


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


# --- Of both --------------------------------------------------------------------------------------


def _sum_of_tokens(losses: Tensor, labels: Tensor, by_sequence: bool) -> Tensor:
    return losses.view(labels.shape).sum(1) if by_sequence else losses.sum()
