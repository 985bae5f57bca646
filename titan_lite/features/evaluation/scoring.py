"""Log-probabilities of tokens after others, on the sharded model as it trains.

    results = score(parallel_model, [Request([1, 5, 9, 2], scored=2)], batch_size=8)

Requests are sorted by length, and each block of them is split over the ranks of data and context
parallelism, so that all compute rows of about the same length:

    rank 0   | 7 3 3 1 8 6 |   rank 1   | 7 3 3 1 9 . |    . : padding, after a request
             | 7 3 5 . . . |            | . . . . . . |    an empty row, since there is no fourth

All ranks know all lengths, so they agree on blocks without a message. Rows are padded to the
longest of their block. As in generation (distributed/generation.py), ranks have whole sequences,
and modules run in eager mode: another length makes no graph.

Dimensions: as in models/transformer.py.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titan_lite.distributed.context_parallel import whole_sequences
from titan_lite.distributed.mesh import data_rank
from titan_lite.distributed.parallelize import ParallelModel
from titan_lite.distributed.pipeline import Pipeline
from titan_lite.distributed.tensor_parallel import all_tokens_on_each_rank, axis_of
from titan_lite.models.loss import IGNORE_INDEX, LabelScores, VocabularyShard
from titan_lite.models.transformer import Transformer, rope_tables


class Request(NamedTuple):
    """Tokens, of which the last ones are scored."""

    tokens: Sequence[int]
    scored: int


def score(
    model: ParallelModel,
    requests: Sequence[Request],
    *,
    batch_size: int,
    after_batch: Callable[[], None] = lambda: None,
) -> list[tuple[float, bool]]:
    """Return the log-probability of the scored tokens of each request, nats, and True if each of
    them is the likeliest at its place. A collective of all ranks of the mesh.

    requests: the same on all ranks. batch_size: requests of a rank at a time. after_batch: called
    between two batches, by all ranks.
    """
    mesh = model.mesh
    dp_rank, dp_degree = data_rank(mesh)
    cp = mesh["cp"].size()
    rank, ranks = dp_rank * cp + mesh["cp"].get_local_rank(), dp_degree * cp
    lengths = [len(request.tokens) for request in requests]
    order = sorted(range(len(requests)), key=lambda i: -lengths[i])
    results = torch.zeros(len(requests), 2, dtype=torch.float64, device=model.device)
    with ExitStack() as contexts:
        stages = [contexts.enter_context(_Scorer(stage.model, model)) for stage in model.stages]
        for start in range(0, len(order), batch_size * ranks):
            block = order[start : start + batch_size * ranks]
            own = block[rank::ranks]
            rows = -(-len(block) // ranks)
            inputs, labels = _padded([requests[i] for i in own], rows, lengths[block[0]] - 1)
            scores = _forward(model, stages, inputs.to(model.device), labels.to(model.device))
            if scores is not None and own:
                results[own] = scores[: len(own)]
            after_batch()
    for axis in ("pp", "dp_replicate", "dp_shard", "cp"):  # tp: the ranks have the same
        if mesh[axis].size() > 1:
            dist.all_reduce(results, group=mesh.get_group(axis))
    return [(log_probability, wrong == 0) for log_probability, wrong in results.tolist()]


def _padded(requests: Sequence[Request], rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Return inputs and labels (rows, length), where labels that are not scored do not count."""
    inputs = torch.zeros(rows, max(1, length), dtype=torch.int64)
    labels = torch.full_like(inputs, IGNORE_INDEX)
    for row, (tokens, scored) in enumerate(requests):
        last = len(tokens) - 1
        inputs[row, :last] = torch.tensor(tokens[:-1])
        if scored:
            labels[row, last - scored : last] = torch.tensor(tokens[-scored:])
    return inputs, labels


@torch.no_grad()
def _forward(
    model: ParallelModel, stages: Sequence["_Scorer"], inputs: Tensor, labels: Tensor
) -> Tensor | None:
    """Return the LabelScores of a batch (B, T); None before the last stage."""
    for stage in stages:
        stage.labels = labels
    runner = model.runner
    if not isinstance(runner, Pipeline):
        return stages[0](inputs)
    output, sends = runner.forward(stages, inputs, (*inputs.shape, model.layout.model.dim))
    for work, _ in sends:
        work.wait()
    return output if runner.has_last else None


class _Scorer:
    """A pipeline stage that takes tokens or hidden states of whole sequences, of any length; the
    last one returns LabelScores of `labels`. A context, after which it trains as before.
    """

    labels: Tensor

    def __init__(self, stage: Transformer, model: ParallelModel):
        self.stage = stage
        self.rope = rope_tables(stage.config, range(stage.config.max_seq_len), model.device)
        tp = axis_of(model.mesh["tp"])
        self.scores = LabelScores(
            VocabularyShard(stage.config.vocab_size, tp.rank, tp.degree, tp.group)
        )

    def __enter__(self) -> "_Scorer":
        stage = self.stage
        self.contexts = ExitStack()
        self.contexts.enter_context(whole_sequences(stage))
        self.contexts.enter_context(all_tokens_on_each_rank(stage))
        self.contexts.callback(stage.train, stage.training)
        stage.eval()
        if stage.output is not None:
            self.contexts.callback(setattr, stage.output, "loss", stage.output.loss)
            stage.output.loss = self.scores
        return self

    def __exit__(self, *error: object) -> None:
        self.contexts.close()

    def __call__(self, x: Tensor) -> Tensor:
        stage = self.stage
        cos, sin = (table[: x.shape[1]] for table in self.rope)
        if stage.tok_embeddings is not None:
            x = stage.tok_embeddings(x)
        for layer in stage.layers.values():
            x = layer(x, cos, sin, None)
        x = x if stage.norm is None else stage.norm(x)
        return x if stage.output is None else stage.output(x, self.labels)
