"""All-gather a sharded parameter and reduce its gradient; buckets.py joins several parameters.

    weight = spec.gather(shard)                             # unsharded, as nodes of a graph
    weight = spec.start_gather(shard).wait()                # in eager mode
    rows = spec.finish_reduce(spec.start_reduce(gradient))  # this rank's rows of the sum; in both

SimpleFSDP (arXiv 2411.00284) needs no other collectives; the gatherers of simple_fsdp.py run them.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import _disable_current_modes

from titan_lite.collectives import Axis, all_gather_single, collectives
from titan_lite.sharding import chunk_range, chunk_size

# The last collectives that eager mode has started: time.time_ns(), group, parameters.
started_last: deque[tuple[int, str, str]] = deque(maxlen=1000)


def record_start(group: str, parameters: str) -> None:
    """Record a collective that starts now in eager mode: the watchdog names it if it hangs.

    parameters: FQNs, with spaces between.
    """
    started_last.append((time.time_ns(), group, parameters))


class InFlight(NamedTuple):
    """A tensor that is valid after `wait`."""

    tensor: Tensor
    work: dist.Work | None

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.tensor


# What a module reads as its weight: the weight, or what its Transport returns.
Weight = Tensor | tuple[Tensor | None, ...]


class Transport:
    """The form in which weights travel when they are gathered, and in which modules read them.

    This one is that of most weights: both in param_dtype. A module whose attribute `transport` is
    of a subclass has that one for its weights (`apply_simple_fsdp`).
    """

    dtype: torch.dtype | None = None  # of what travels; None: param_dtype

    def allocate(self, device: torch.device) -> None:
        """Allocate the scales, before `parameters_have_changed`."""

    def parameters_have_changed(self, parameters: Mapping[str, Tensor]) -> None:
        """Compute the scales. A collective over the ranks of a stage. parameters: by FQN."""

    def scales(self, fqn: str) -> tuple[Tensor, ...]:
        """Return the scales of a weight, which are inputs of graphs: changed in place."""
        return ()

    def send(self, shard: Tensor, dtype: torch.dtype, *scales: Tensor) -> Tensor:
        """Return what travels of a shard, of the same shape. dtype: param_dtype."""
        return shard.to(dtype)

    def receive(self, weight: Tensor, stand_in: Tensor | None, *scales: Tensor) -> Weight:
        """Return what a module reads, given what has arrived. stand_in: ShardSpec.stand_in."""
        return weight


PLAIN = Transport()


@dataclass(frozen=True)
class ShardSpec:
    """The gather of one parameter and the reduction of its gradient.

    Plain values but for the transport, so that tracing sees constants. A shard has ceil(rows /
    degree) rows. The last shards have fewer or none, and are padded for the collectives.
    """

    fqn: str  # the first one of a tied weight
    rows: int  # of the unsharded parameter: its size in dimension 0
    row_shape: tuple[int, ...]
    axis: Axis  # whose ranks have a shard each
    sum_groups: tuple[str, ...]  # of ranks with the same shard: its gradient is summed over them
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    transport: Transport = PLAIN

    @property
    def gather_dtype(self) -> torch.dtype:
        """dtype of the gathered tensor."""
        return self.transport.dtype or self.param_dtype

    @property
    def scales(self) -> tuple[Tensor, ...]:
        """The scales of the parameter's transport."""
        return self.transport.scales(self.fqn)

    @property
    def own_rows(self) -> int:
        """Number of rows of this rank's shard."""
        return len(chunk_range(self.rows, self.axis.degree, self.axis.rank))

    @property
    def chunk(self) -> int:
        """Number of rows of a padded shard."""
        return chunk_size(self.rows, self.axis.degree)

    @property
    def reduce_groups(self) -> tuple[str, ...]:
        """Groups of a reduction's collectives, in order."""
        return (self.axis.group, *self.sum_groups) if self.axis.degree > 1 else self.sum_groups

    def to_send(self, shard: Tensor) -> Tensor:
        """Return what travels of a shard (Transport.send)."""
        return self.transport.send(shard, self.param_dtype, *self.scales)

    def gather(self, shard: Tensor, *scales: Tensor) -> Tensor:
        """Gather the full parameter in gather_dtype, as nodes of a graph. scales: inputs of it."""
        shard = self.transport.send(shard, self.param_dtype, *scales)
        if self.axis.degree == 1:
            return shard
        if self.rows % self.axis.degree:
            # all ranks pad, if only by 0 rows, so that their graphs are the same
            shard = F.pad(shard, [0, 0] * (shard.dim() - 1) + [0, self.chunk - self.own_rows])
        weight = collectives.all_gather_into_tensor(shard, self.axis.degree, self.axis.group)
        return collectives.wait_tensor(weight)[: self.rows]

    # Hidden from dispatch modes: selective checkpointing counts operators, and this gather may be
    # for a later read.
    @_disable_current_modes()
    @torch.no_grad()
    def start_gather(self, shard: Tensor) -> InFlight:
        """Start the same gather in eager mode."""
        return self.start_gather_of(self.to_send(shard))

    def start_gather_of(self, shard: Tensor, out: Tensor | None = None) -> InFlight:
        """Start the gather of a shard in gather_dtype. out: the padded result."""
        if self.axis.degree == 1:
            return InFlight(shard, None)
        shard = pad_rows(shard, self.chunk)
        if out is None:
            out = shard.new_empty(self.chunk * self.axis.degree, *shard.shape[1:])
        group = _resolve_process_group(self.axis.group)  # type: ignore[arg-type]
        self.record()
        work = all_gather_single(out, shard, group=group, async_op=True)
        return InFlight(out[: self.rows], work)

    def record(self) -> None:
        """Record a collective of this parameter, as `record_start`."""
        if self.reduce_groups:
            record_start(self.reduce_groups[0], self.fqn)

    def start_reduce(self, gradient: Tensor) -> Tensor:
        """Start to sum an unsharded gradient over the first of `reduce_groups`, in reduce_dtype.

        Returns this rank's rows, which may still be in flight.
        """
        gradient = gradient.to(self.reduce_dtype)
        if self.axis.degree > 1:
            padded = pad_rows(gradient, self.chunk * self.axis.degree).contiguous()
            return collectives.reduce_scatter_tensor(
                padded, "sum", self.axis.degree, self.axis.group
            )
        if self.sum_groups:
            return collectives.all_reduce(gradient.contiguous(), "sum", self.sum_groups[0])
        return gradient

    def finish_reduce(self, gradient: Tensor) -> Tensor:
        """Return the sum over all groups, given the result of `start_reduce`."""
        for number in range(len(self.reduce_groups)):
            gradient = self.next_reduce(gradient, number)
        return gradient

    def next_reduce(self, gradient: Tensor, number: int) -> Tensor:
        """Wait for collective `number` of a reduction, and start the next one.

        Returns its result, which may still be in flight; after the last collective, the sum.
        """
        gradient = collectives.wait_tensor(gradient)
        if number == 0:  # drop the padding of the reduce-scatter before the all-reduce
            gradient = gradient[: self.own_rows]
        if number + 1 == len(self.reduce_groups):
            return gradient
        return collectives.all_reduce(gradient.contiguous(), "sum", self.reduce_groups[number + 1])

    @property
    def has_stand_in(self) -> bool:
        """True if the weight travels in another dtype than param_dtype (`stand_in`)."""
        return self.gather_dtype != self.param_dtype

    def stand_in(self, weight: Tensor) -> Tensor | None:
        """Return what carries the gradient of a gathered weight in autograd; None: the weight."""
        return stand_in(weight, self.param_dtype) if self.has_stand_in else None

    def gradient_of(self, of_weight: Tensor | None, of_stand_in: Tensor | None) -> Tensor:
        """Return the gradient of a gathered weight: that of its stand-in, if it has one."""
        gradient = of_stand_in if self.has_stand_in else of_weight
        assert gradient is not None
        return gradient


def stand_in(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor that stands for another in autograd: it has the shape of `data` and a dtype
    but no storage, and its value is never read.
    """
    return data.new_empty((), dtype=dtype).expand(data.shape)


# (shard, spec) -> full weight
Gather = Callable[[Tensor, ShardSpec], Tensor]
# (unsharded gradient, spec, shard) -> this rank's rows of the sum, like the shard
Reduce = Callable[[Tensor, ShardSpec, Tensor], Tensor]


class _GatherContext(FunctionCtx):
    """The values that a gather keeps for backward."""

    shard: Tensor
    spec: ShardSpec
    reduce: Reduce


class GatheredWeight(torch.autograd.Function):
    """Shard -> (full weight as it travels, its stand-in or None). The gradient of the weight, or of
    its stand-in -> the gradient of the shard.

    gather and reduce: run the collectives.
    """

    @staticmethod
    def forward(
        ctx: _GatherContext,
        shard: Tensor,
        spec: ShardSpec,
        gather: Gather,
        reduce: Reduce,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.shard = shard
        ctx.spec = spec
        ctx.reduce = reduce
        ctx.set_materialize_grads(False)  # bytes have no gradient, for which autograd makes zeros
        weight = gather(shard, spec)
        weight = weight.view_as(weight)  # autograd needs a new tensor if nothing was gathered
        return weight, spec.stand_in(weight)

    @staticmethod
    def backward(
        ctx: _GatherContext, of_weight: Tensor | None, of_stand_in: Tensor | None
    ) -> tuple[Tensor, None, None, None]:
        gradient = ctx.spec.gradient_of(of_weight, of_stand_in)
        return ctx.reduce(gradient, ctx.spec, ctx.shard), None, None, None


def pad_rows(tensor: Tensor, rows: int) -> Tensor:
    missing = rows - tensor.shape[0]
    return torch.cat((tensor, tensor.new_zeros(missing, *tensor.shape[1:]))) if missing else tensor
