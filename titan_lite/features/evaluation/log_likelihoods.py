"""Log-likelihoods of continuations, on the sharded model as it trains.

    requests = [Request([1, 5, 6, 7], scored=2), ...]        # all of them, on all ranks
    log_likelihoods(model, requests, batch_size=8)           # [Score(-9.31, is_greedy=False), ...]

Ranks of data and of context parallelism share the requests; each has whole sequences. Ranks of
tensor parallelism have the logits of their own entries of the vocabulary, and pipeline stages send
hidden states on, as in training. Modules run in eager mode, whatever the recipe compiles, so
another length makes no graph. Nothing is gathered that a forward of training does not gather.

Dimensions: as in models/transformer.py; v, this rank's entries of the vocabulary.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from titan_lite import progress
from titan_lite.collectives import all_gather, all_reduce
from titan_lite.distributed.context_parallel import whole_sequences
from titan_lite.distributed.mesh import axis_of, data_rank, sum_of_losses
from titan_lite.distributed.parallelize import ParallelModel
from titan_lite.distributed.pipeline import Pipeline
from titan_lite.distributed.tensor_parallel import all_tokens_on_each_rank
from titan_lite.models.loss import IGNORE_INDEX, VocabularyShard, log_probabilities
from titan_lite.models.transformer import Transformer, rope_tables

WIDTH_MULTIPLE = 64  # of the tokens of a batch
CHUNK = 1024  # tokens whose logits exist at a time


class Request(NamedTuple):
    """Text of which the last `scored` tokens are to be scored: 1 to len(tokens) - 1 of them."""

    tokens: Sequence[int]
    scored: int


class Score(NamedTuple):
    """The log-likelihood of the scored tokens, in nats, and whether each is the likeliest one."""

    log_likelihood: float
    is_greedy: bool


def log_likelihoods(
    model: ParallelModel,
    requests: Sequence[Request],
    *,
    batch_size: int,
    after_batch: Callable[[], object] = lambda: None,
) -> list[Score]:
    """Return the score of each request, the same on all ranks. A collective of all of them.

    requests: the same on all ranks, of at most max_seq_len + 1 tokens each: the last one is only
    scored. batch_size: requests at a time on a rank. after_batch: is called after each batch, on
    all ranks.
    """
    dp_rank, dp_degree = data_rank(model.mesh)
    cp = model.mesh["cp"]
    readers = dp_degree * cp.size()  # which have requests of their own
    reader = dp_rank * cp.size() + cp.get_local_rank()
    found = torch.zeros(len(requests), 2, dtype=torch.float64, device=model.device)
    by_length = sorted(range(len(requests)), key=lambda i: -len(requests[i].tokens))
    scorer = _Scorer(model)
    with scorer.in_place():
        for start in range(0, len(requests), readers * batch_size):
            batch = by_length[start : start + readers * batch_size]
            width = _width(len(requests[batch[0]].tokens) - 1, model.layout.model.max_seq_len)
            own = batch[reader::readers]
            scores = scorer.scores([requests[i] for i in own], batch_size, width)
            if own and scores is not None:
                found[torch.tensor(own, device=model.device)] = scores[: len(own)]
            progress.beat()
            after_batch()
    sum_of_losses(found, model.mesh)
    return [Score(likelihood, wrong == 0) for likelihood, wrong in found.tolist()]


def _width(tokens: int, most: int) -> int:
    """Return the tokens that each sequence of a batch is padded to: few lengths are left."""
    return min(most, -(-tokens // WIDTH_MULTIPLE) * WIDTH_MULTIPLE)


class _Scorer:
    """Runs batches of requests through the stages of this rank."""

    def __init__(self, model: ParallelModel):
        self.model = model
        self.loss = LabelScores(
            VocabularyShard(model.layout.model.vocab_size, axis_of(model.mesh["tp"]))
        )
        most = model.layout.model.max_seq_len
        self.rope = rope_tables(model.layout.model, range(most), model.device)
        self.sends: list[tuple[dist.Work, Tensor]] = []  # hidden states of the batch before

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Return a context in which stages have whole sequences, and score labels."""
        with ExitStack() as contexts:
            for stage in self.model.stages:
                contexts.enter_context(whole_sequences(stage.model))
                contexts.enter_context(all_tokens_on_each_rank(stage.model))
                contexts.enter_context(_scoring(stage.model, self.loss))
            yield
            self._wait()

    @torch.no_grad()
    def scores(self, requests: Sequence[Request], rows: int, width: int) -> Tensor | None:
        """Return the scores of up to `rows` requests, also of none, as LabelScores does; None on
        ranks without the last stage.
        """
        device = self.model.device
        tokens = torch.zeros(rows, width, dtype=torch.int64)
        labels = torch.full((rows, width), IGNORE_INDEX)
        for row, (text, scored) in enumerate(requests):
            end = len(text) - 1
            tokens[row, :end] = torch.tensor(text[:-1])
            labels[row, end - scored : end] = torch.tensor(text[-scored:])
        tokens, labels = tokens.to(device), labels.to(device)
        rope = tuple(table[:width] for table in self.rope)
        stages = [
            functools.partial(_forward, stage.model, rope=rope, labels=labels)
            for stage in self.model.stages
        ]
        runner = self.model.runner
        if not isinstance(runner, Pipeline):
            return stages[0](tokens)
        # The next batch begins before this one has passed all stages.
        hidden = (rows, width, self.model.layout.model.dim)
        output, sends = runner.forward(stages, tokens, hidden)
        self._wait()
        self.sends = sends
        return output if runner.has_last else None

    def _wait(self) -> None:
        for work, _ in self.sends:
            work.wait()
        self.sends = []


def _forward(model: Transformer, x: Tensor, *, rope: tuple[Tensor, ...], labels: Tensor) -> Tensor:
    """Run tokens, or hidden states, through a stage, whose positions are those of `rope`."""
    if model.tok_embeddings is not None:
        x = model.tok_embeddings(x)
    for layer in model.layers.values():
        x = layer(x, *rope, None)
    x = x if model.norm is None else model.norm(x)
    return x if model.output is None else model.output(x, labels)


@contextmanager
def _scoring(model: Transformer, loss: "LabelScores") -> Iterator[None]:
    """Return a context in which a stage is in the mode of evaluation, and its loss is `loss`."""
    was_training = model.training
    model.eval()
    of_training = model.output.loss if model.output is not None else None
    if model.output is not None:
        model.output.loss = loss
    try:
        yield
    finally:
        if model.output is not None:
            model.output.loss = of_training
        model.train(was_training)


class LabelScores:
    """In place of a Loss (models/loss.py): hidden states (B, T, C), the projection to this rank's
    entries of the vocabulary (v, C) and labels (B, T) -> (B, 2) float64: the sum of the labels'
    log-probabilities, and how many of them are not the likeliest token.

    Logits exist of counted labels alone, and of CHUNK of them at a time.
    """

    def __init__(self, vocabulary: VocabularyShard):
        self.vocabulary = vocabulary

    def __call__(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        is_counted = labels != IGNORE_INDEX
        row, _ = is_counted.nonzero(as_tuple=True)
        parts = [
            self._of_tokens(F.linear(x, weight), label)
            for x, label in zip(
                hidden[is_counted].split(CHUNK), labels[is_counted].split(CHUNK), strict=True
            )
        ]
        found = torch.zeros(len(labels), 2, dtype=torch.float64, device=hidden.device)
        return found.index_add_(0, row, torch.cat(parts))

    def _of_tokens(self, logits: Tensor, labels: Tensor) -> Tensor:
        """(n, v) and (n,) -> (n, 2)"""
        vocabulary = self.vocabulary
        log_p = log_probabilities(logits, vocabulary)
        own, inside = vocabulary.find(labels)
        of_label = log_p.gather(-1, own.unsqueeze(-1)).squeeze(-1).where(inside, 0.0)
        highest, index = log_p.max(-1)
        likeliest = index + vocabulary.entries.start
        axis = vocabulary.axis
        if axis.degree > 1:
            of_label = all_reduce(of_label, "sum", axis.group)
            # a rank's best is exact in float64, its index included
            best = torch.stack((highest.double(), likeliest.double()))[None].contiguous()
            of_ranks = all_gather(best, axis.degree, axis.group)
            first = of_ranks[:, 0].argmax(0)  # of equals the lowest index, as without shards
            likeliest = of_ranks[:, 1].gather(0, first[None]).squeeze(0)
        return torch.stack((of_label.double(), (likeliest != labels).double()), dim=-1)
