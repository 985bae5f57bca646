"""Resharding and overlap in eager mode, in buckets; under torch.compile, graph passes do both.

    eager = Eager(plans, scales)                    # one for a model
    with eager.forward(reshard=True):               # autograd saves no weight given to `remember`
        weight = eager.gather(shard, plan, scale)   # its block, while the one that followed it last time is in flight
        eager.remember(weight, parameter, plan)
    rows = eager.reduce(gradient, plan, dtype)      # in backward: its first use waits for it

Both are passes of SimpleFSDP's compiler (arXiv 2411.00284). Eager mode has no graph to look ahead
in, so it records the order.
"""

import functools
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import _disable_current_modes

from titan_lite.distributed.buckets import Bucket, Buckets, Plans, gather_blocks, reduce_buckets
from titan_lite.distributed.float8_scales import Scales
from titan_lite.distributed.param_collectives import InFlight, ShardSpec
from titan_lite.dtensor import local

aten = torch.ops.aten


class Sum:
    """The rows of one gradient, summed over ranks, and over microbatches if these accumulate."""

    def __init__(self, adding: "Reduction"):
        self.rows: Tensor | None = None
        self.adding: Reduction | None = adding  # not finished
        self.earlier: Sum | None = None  # of an earlier microbatch; this one is added to it

    def wait(self) -> Tensor:
        if self.adding is not None:
            self.adding.finish()
        assert self.rows is not None
        return self.rows

    def add(self, rows: Tensor) -> None:
        self.rows, self.adding = rows if self.rows is None else self.rows.add_(rows), None
        if self.earlier is not None:
            self.earlier.add(rows)


class Reduction:
    """The asynchronous sums of a bucket's gradients, over one group after another.

    Some gradients may be missing.
    """

    def __init__(self, bucket: Bucket, dtype: torch.dtype):
        self.bucket, self.dtype, self.groups = bucket, dtype, bucket.plans[0].reduce_groups
        self.gradients: dict[str, Tensor] = {}  # by FQN, until it starts
        self.sums: dict[str, Sum] = {}
        self.left = len(self.groups)  # collectives not waited for

    def start(self) -> None:
        if self.gradients:
            present = tuple(plan for plan in self.bucket.plans if plan.fqn in self.gradients)
            self.bucket = self.bucket if present == self.bucket.plans else Bucket(present)
            self.flat = self.bucket.start_reduce([self.gradients.pop(plan.fqn) for plan in present])

    def advance(self) -> None:
        """Wait for the collective in flight, and start the next one.

        After the last one, add the rows to their sums.
        """
        self.flat = self.bucket.as_one.next_reduce(self.flat, len(self.groups) - self.left)
        self.left -= 1
        if not self.left:
            for plan, rows in zip(
                self.bucket.plans, self.bucket.rows_of(self.flat.to(self.dtype)), strict=True
            ):
                self.sums.pop(plan.fqn).add(rows)
            del self.flat

    def finish(self) -> None:
        self.start()
        while self.left:
            self.advance()


class Rows(AsyncCollectiveTensor):
    """The future rows of a gradient.

    Any use waits for them, except autograd's detach and its sum with earlier ones.
    """

    future: Sum

    @staticmethod
    def __new__(
        cls, future: Sum, size: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> "Rows":
        rows = Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=device)
        rows.future = future
        return rows

    @property
    def elem(self) -> Tensor:  # type: ignore[override]
        return self.future.wait()

    def trigger_wait(self) -> Tensor:
        return self.future.wait()

    wait = trigger_wait

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        rows = args[0]
        same = func is aten.view.default and tuple(args[1]) == rows.shape
        same |= (
            func is aten.view_as.default and args[1].shape == rows.shape
        )  # as dispatched within a custom operator
        if func is aten.detach.default or same:
            return Rows(rows.future, rows.shape, rows.dtype, rows.device)
        if (
            func is aten.add_.Tensor
            and not kwargs
            and isinstance(rows, Rows)
            and isinstance(args[1], Rows)
        ):
            later = args[1].future
            if later.adding is not None and later.earlier is None:
                rows.future.wait()
                rows.future.adding, later.earlier = later.adding, rows.future
                return rows
        return super().__torch_dispatch__(func, types, args, kwargs)


class Eager:
    """State shared by all reads of one model's weights.

    Resharding: autograd saves no gathered weight that is resharded; backward gathers it again. A
    weight is recognised by the address of its storage, because autograd saves views of it (the
    transpose in a matrix product). The entry is valid while the weight is alive: later, an
    activation may have its address.

    Overlap: a forward or backward keeps the block of its last read gathered. Blocks are read in the
    same order every time, so the next one is in flight meanwhile: two are alive at once. A bucket
    of gradients is reduced when it has all of them, or at the end of backward. It is waited for
    when a gradient is used or when the next bucket of the same groups starts; in HSDP, its
    all-reduce then starts. Accumulating gradients over microbatches waits for neither. The order
    comes from the program alone, so it is the same on every rank. Limit: a weight that is read
    twice (tied) has two gradients, whose sum waits for both.
    """

    def __init__(self, plans: Plans, scales: Scales) -> None:
        self.plans, self.scales = plans, scales
        # gathered weights by storage address, only during a forward that reshards
        self.reads: dict[int, tuple[weakref.ref[Tensor], nn.Parameter, ShardSpec]] | None = None
        self.gathers_again = (
            False  # backward will: the last forward has read weights to be resharded
        )
        self.phase = ""  # forward, backward or weights; empty outside, where nothing stays gathered
        self.order: list[str] = []  # blocks gathered in this phase so far
        self.last_order: dict[str, list[str]] = defaultdict(list)  # in the last phase of each name
        self.gathered: dict[str, Tensor] = {}  # weights of the last block, by FQN
        self.gathering: dict[str, list[InFlight]] = {}  # the buckets of the next block
        self.collecting: dict[Bucket, Reduction] = {}  # buckets that lack gradients
        self.reducing: dict[tuple[str, ...], list[Reduction]] = defaultdict(
            list
        )  # those in flight, by groups

    @functools.cached_property
    def blocks(self) -> dict[str, Buckets]:
        return gather_blocks(self.plans)

    @functools.cached_property
    def block_of(self) -> dict[str, str]:
        return {
            plan.fqn: name
            for name, each in self.blocks.items()
            for _, bucket in each
            for plan in bucket.plans
        }

    @functools.cached_property
    def reduced_with(self) -> dict[str, tuple[list[nn.Parameter], Bucket]]:
        return {plan.fqn: each for each in reduce_buckets(self.plans) for plan in each[1].plans}

    def gather(self, shard: Tensor, plan: ShardSpec, scale: Tensor | None = None) -> Tensor:
        if plan.shard_degree == 1 or not self._begun():
            return plan.start_gather(shard, scale).wait()
        if plan.fqn not in self.gathered:
            self._gather_block(self.block_of[plan.fqn])
        return self.gathered[plan.fqn]

    # Hidden from dispatch modes: selective checkpointing counts operators, and a read may find its
    # block gathered or not.
    @_disable_current_modes()
    @torch.no_grad()
    def _gather_block(self, block: str) -> None:
        """Gather a block in place of the last one, and start the one that followed it last time."""
        self.gathered.clear()
        self._start(block)
        for (_, bucket), started in zip(self.blocks[block], self.gathering.pop(block), strict=True):
            self.gathered |= zip(
                (plan.fqn for plan in bucket.plans), bucket.finish_gather(started), strict=True
            )
        del started  # before the next block needs memory
        place, last = len(self.order), self.last_order[self.phase]
        self.order.append(block)
        if last[place : place + 1] == [block]:
            self._start(*last[place + 1 : place + 2])

    @_disable_current_modes()
    @torch.no_grad()
    def _start(self, *blocks: str) -> None:
        for block in blocks:
            if block not in self.gathering:
                self.gathering[block] = [
                    bucket.start_gather(
                        [*map(local, members)], [self.scales.of(plan.fqn) for plan in bucket.plans]
                    )
                    for members, bucket in self.blocks[block]
                ]

    def reduce(self, gradient: Tensor, plan: ShardSpec, dtype: torch.dtype) -> Tensor:
        """Return this rank's rows of the sum. The first use of the result waits for it."""
        if not plan.reduce_groups:
            return plan.start_reduce(gradient).to(dtype)
        self._begun()
        members, bucket = self.reduced_with[plan.fqn]
        earlier = self.collecting.get(bucket)
        if earlier is not None and (
            plan.fqn in earlier.sums or not earlier.gradients
        ):  # read twice, or used already
            self._start_reduction(bucket)
        reduction = self.collecting.setdefault(bucket, Reduction(bucket, dtype))
        reduction.gradients[plan.fqn], reduction.sums[plan.fqn] = gradient, Sum(reduction)
        rows = Rows(
            reduction.sums[plan.fqn], (plan.own_rows, *plan.row_shape), dtype, gradient.device
        )
        if len(reduction.sums) == sum(member.requires_grad for member in members):
            self._start_reduction(bucket)
        return rows

    def _start_reduction(self, bucket: Bucket) -> None:
        """Start the sum of a bucket.

        Those of the same groups that are in flight go on to their next collective, or end.
        """
        reduction = self.collecting.pop(bucket)
        in_flight = self.reducing[reduction.groups]
        for earlier in (each for each in in_flight if each.left):
            earlier.advance()
        reduction.start()
        in_flight[:] = [each for each in (*in_flight, reduction) if each.left]

    def _end_backward(self) -> None:
        """Start all remaining collectives, so that reading a gradient on one rank alone starts
        none. The optimizer or the next microbatch waits for them.
        """
        for bucket in [*self.collecting]:
            self._start_reduction(bucket)
        while left := [
            each for in_flight in self.reducing.values() for each in in_flight if each.left > 1
        ]:
            for each in left:
                each.advance()
        self._begin("")

    @contextmanager
    def forward(self, reshard: bool) -> Iterator[None]:
        """Run one forward of the model inside this context."""
        self._begin("forward")
        self.reads = {} if reshard else None
        try:
            with (
                torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
                if reshard
                else nullcontext()
            ):
                yield
        finally:
            self._begin("")
            self.gathers_again, self.reads = bool(self.reads), None

    @contextmanager
    def weights(self) -> Iterator[None]:
        """Run the half of a backward that computes gradients of weights, by several runs of
        autograd's engine.
        """
        self._begin("weights")
        yield
        self._end_backward()

    def remember(self, weight: Tensor, parameter: nn.Parameter, plan: ShardSpec) -> None:
        if self.reads is not None and weight.data_ptr() != local(parameter).data_ptr():
            self.reads[_storage_address(weight)] = (weakref.ref(weight), parameter, plan)

    def _pack(self, tensor: Tensor) -> Any:
        read = (
            self.reads.get(_storage_address(tensor))
            if self.reads and type(tensor) is Tensor
            else None
        )
        if read is None or read[0]() is None:
            return tensor
        return (
            *read[1:],
            read[1]._version,
            tensor.size(),
            tensor.stride(),
            tensor.storage_offset(),
        )

    def _unpack(self, packed: Any) -> Tensor:
        self._begun()
        if isinstance(packed, Tensor):
            return packed
        parameter, plan, version, size, stride, offset = packed
        if parameter._version != version:
            raise RuntimeError(
                f"{plan.fqn} was changed between its forward and its backward; update it after"
                " backward"
            )
        return self.gather(local(parameter).detach(), plan, self.scales.of(plan.fqn)).as_strided(
            size, stride, offset
        )

    def _begun(self) -> bool:
        """Begin a backward if autograd's engine runs. Return True in a forward or backward."""
        if not self.phase and torch._C._current_graph_task_id() != -1:
            self._begin("backward")
            if self.gathers_again:
                self._start(
                    *self.last_order["backward"][:1]
                )  # under the backward of what is kept, such as the output
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        return bool(self.phase)

    def _begin(self, phase: str) -> None:
        """End the last phase and begin another."""
        while self.gathering:  # not read
            for started in self.gathering.popitem()[1]:
                started.wait()
        if self.order:
            self.last_order[self.phase] = self.order
        self.phase, self.order = phase, []
        for state in (self.gathered, self.collecting, self.reducing):
            state.clear()


def _storage_address(tensor: Tensor) -> int:
    return int(tensor.data_ptr() - tensor.storage_offset() * tensor.element_size())
