"""The collectives that make sharded parameters whole, and gradients of the whole those of the shards.

    whole = plan.gather(shard)                                      # as nodes of a graph
    whole = plan.start_gather(shard).wait()                         # in eager mode
    rows = plan.finish_reduce(plan.start_reduce(gradient))          # the sum over ranks of this rank's rows; either mode
    wholes = bucket.finish_gather(bucket.start_gather(shards))      # several parameters at once, in eager mode

The collectives of SimpleFSDP (arXiv 2411.00284) are these and no others; simple_fsdp.py says when they run. A bucket is laid out
as one of a graph is (compiler/bucketing.py): a rank's padded shards lie one behind the other.

    gathered   w1 of rank 0, w2 of rank 0, w1 of rank 1, w2 of rank 1        one row a rank; a weight is a few columns
    reduced    the same of gradients; each rank gets the sum of its row
"""

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

from titan_lite.compiler.collectives import all_gather_single, collectives

# What eager mode has started last: nanoseconds of the clock, group, parameters.
started_last: deque[tuple[int, str, str]] = deque(maxlen=1000)


class InFlight(NamedTuple):
    """A tensor that may be read once its communication is waited for."""

    tensor: Tensor
    work: dist.Work | None

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.tensor


@dataclass(frozen=True)
class GatherPlan:
    """The gathering of one parameter and the reduction of its gradient; plain values only, so that tracing sees constants.

    fqn: its name, the first one where weights are tied. rows: length of dimension 0 of the whole; own_rows: of this rank's
    shard. A shard has ceil(rows / shard_degree) rows, the last shards fewer or none: these are padded for the collectives.
    row_shape: of one row. sum_groups: the groups whose ranks have the same shard, and gradients of it to add up.
    """

    fqn: str
    rows: int
    own_rows: int
    row_shape: tuple[int, ...]
    shard_degree: int
    shard_group: str
    sum_groups: tuple[str, ...]
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype

    @property
    def chunk(self) -> int:
        """Rows of a padded shard."""
        return -(-self.rows // self.shard_degree)

    @property
    def reduce_groups(self) -> tuple[str, ...]:
        """The groups of a reduction's collectives, in order."""
        return (self.shard_group, *self.sum_groups) if self.shard_degree > 1 else self.sum_groups

    def gather(self, shard: Tensor) -> Tensor:
        """This rank's rows -> the whole in param_dtype, as nodes of a graph."""
        shard = shard.to(self.param_dtype)
        if self.shard_degree == 1:
            return shard
        if self.rows % self.shard_degree:  # all ranks pad, if only by nothing: so their graphs, and schedules, are the same
            shard = F.pad(shard, [0, 0] * (shard.dim() - 1) + [0, self.chunk - self.own_rows])
        whole = collectives.all_gather_into_tensor(shard, self.shard_degree, self.shard_group)
        return collectives.wait_tensor(whole)[: self.rows]

    # Out of sight of dispatch modes: selective checkpointing counts operators, and this may be a gather ahead of its read.
    @_disable_current_modes()
    @torch.no_grad()
    def start_gather(self, shard: Tensor) -> InFlight:
        """The same in eager mode, on its way."""
        shard = shard.to(self.param_dtype)
        if self.shard_degree == 1:
            return InFlight(shard, None)
        shard = _pad_rows(shard, self.chunk)
        whole = shard.new_empty(self.chunk * self.shard_degree, *shard.shape[1:])
        group = _resolve_process_group(self.shard_group)  # type: ignore[arg-type]
        self.note()
        return InFlight(whole[: self.rows], all_gather_single(whole, shard, group=group, async_op=True))

    def note(self) -> None:
        """To be called in eager mode before a collective starts: should it hang, it can be told what for."""
        started_last.extend((time.time_ns(), group, self.fqn) for group in self.reduce_groups[:1])

    def start_reduce(self, gradient: Tensor) -> Tensor:
        """This rank's gradient of the whole -> the sum of this rank's rows over the first group that has any to add, in
        reduce_dtype; perhaps still in flight."""
        gradient = gradient.to(self.reduce_dtype)
        if self.shard_degree > 1:
            gradient = _pad_rows(gradient, self.chunk * self.shard_degree).contiguous()
            return collectives.reduce_scatter_tensor(gradient, "sum", self.shard_degree, self.shard_group)
        return collectives.all_reduce(gradient.contiguous(), "sum", self.sum_groups[0]) if self.sum_groups else gradient

    def finish_reduce(self, gradient: Tensor) -> Tensor:
        """The result of start_reduce -> the sum over all groups."""
        for number in range(len(self.reduce_groups)):
            gradient = self.next_reduce(gradient, number)
        return gradient

    def next_reduce(self, gradient: Tensor, number: int) -> Tensor:
        """The result of a reduction's collective `number`, waited for -> that of the next one, perhaps still in flight; after the
        last, the sum over all groups."""
        gradient = collectives.wait_tensor(gradient)
        if number == 0:  # after the reduce-scatter: only a shard travels between copies
            gradient = gradient[: self.own_rows]
        following = self.reduce_groups[number + 1 :]
        return collectives.all_reduce(gradient.contiguous(), "sum", following[0]) if following else gradient


@dataclass(frozen=True)
class Bucket:
    """Parameters whose collectives are one. plans: of one shard group, and of the same dtype and sum groups where it matters."""

    plans: tuple[GatherPlan, ...]

    def start_gather(self, shards: Sequence[Tensor]) -> InFlight:
        rows = [_pad_rows(shard.to(plan.param_dtype), plan.chunk) for plan, shard in zip(self.plans, shards, strict=True)]
        return self.as_one.start_gather(_cat([shard.reshape(-1) for shard in rows]))

    def finish_gather(self, started: InFlight) -> list[Tensor]:
        """The wholes: copies, but for a weight that is alone."""
        table = started.wait().view(self.plans[0].shard_degree, -1)
        return [
            columns.reshape(plan.chunk * plan.shard_degree, *plan.row_shape)[: plan.rows]
            for plan, columns in zip(self.plans, table.split(self._numbers, 1), strict=True)
        ]

    def start_reduce(self, gradients: Sequence[Tensor]) -> Tensor:
        tables = [
            _pad_rows(gradient.to(plan.reduce_dtype), plan.chunk * plan.shard_degree).reshape(plan.shard_degree, -1)
            for plan, gradient in zip(self.plans, gradients, strict=True)
        ]
        self.as_one.note()
        return self.as_one.start_reduce(_cat(tables, 1).view(-1))

    def finish_reduce(self, started: Tensor) -> list[Tensor]:
        """This rank's rows of every gradient: views of one tensor."""
        parts = self.as_one.finish_reduce(started).split(self._numbers)
        return [part.view(-1, *plan.row_shape)[: plan.own_rows] for plan, part in zip(self.plans, parts, strict=True)]

    @property
    def _numbers(self) -> list[int]:
        """In each parameter's padded shard."""
        return [plan.chunk * math.prod(plan.row_shape) for plan in self.plans]

    @property
    def as_one(self) -> GatherPlan:
        """The plan of one parameter of as many numbers, which no rank has to pad."""
        first, own = self.plans[0], sum(self._numbers)
        fqn = " ".join(plan.fqn for plan in self.plans)
        return replace(first, fqn=fqn, rows=own * first.shard_degree, own_rows=own, row_shape=())


def _pad_rows(tensor: Tensor, rows: int) -> Tensor:
    missing = rows - tensor.shape[0]
    return torch.cat((tensor, tensor.new_zeros(missing, *tensor.shape[1:]))) if missing else tensor


def _cat(tensors: list[Tensor], dimension: int = 0) -> Tensor:
    """As torch.cat, but no copy of what is alone."""
    return torch.cat(tensors, dimension) if len(tensors) > 1 else tensors[0]


def local(parameter: Tensor) -> Tensor:
    """This rank's rows; differentiable."""
    assert isinstance(parameter, DTensor)
    return parameter.to_local()
