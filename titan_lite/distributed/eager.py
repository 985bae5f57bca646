"""Resharding and overlap in eager mode; under torch.compile, graph passes do both.

    eager = Eager()                                 # one for a model
    with eager.forward(reshard=True):               # autograd saves no weight given to `remember`
        weight = eager.gather(shard, plan)          # also starts the gathers that followed it last time
        eager.remember(weight, parameter, plan)
    rows = eager.reduce(gradient, plan, dtype)      # in backward: its first use waits for it

Both are passes of SimpleFSDP's compiler (arXiv 2411.00284). Eager mode has no graph to look ahead in, so it records the order.
"""

import weakref
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from titan_lite.distributed.gather import GatherPlan, InFlight, local

aten = torch.ops.aten
Read = tuple[Tensor, GatherPlan, Tensor | None]  # shard, plan, scale of the cast to float8


class Reduction:
    """An asynchronous sum of one gradient, over one group after another. left: collectives not waited for; dtype: of the sum."""

    def __init__(self, gradient: Tensor, plan: GatherPlan, dtype: torch.dtype):
        self.plan, self.dtype, self.left = plan, dtype, len(plan.reduce_groups)
        self.size, self.device = (plan.own_rows, *gradient.shape[1:]), gradient.device
        self.rows = plan.start_reduce(gradient)
        self.earlier: Reduction | None = None  # of an earlier microbatch; this one is added to it
        self.later: Reduction | None = None  # of a later microbatch; it is added to this one

    def advance(self) -> None:
        """Wait for the collective in flight, and start the next one."""
        self.rows = self.plan.next_reduce(self.rows, len(self.plan.reduce_groups) - self.left)
        self.left -= 1

    def finish(self) -> Tensor:
        while self.left:
            self.advance()
        self.rows = self.rows.to(self.dtype)
        if self.later is not None:
            self.later.finish()
        if self.earlier is not None:
            self.earlier.rows.add_(self.rows)
            self.earlier.later, self.earlier = None, None
        return self.rows

    def add(self, later: "Reduction") -> None:
        """Add `later` to this sum, once it has finished."""
        self.finish()
        self.later, later.earlier = later, self


class Rows(AsyncCollectiveTensor):
    """The future result of a reduction. Any use waits for it, except autograd's detach and its sum with an earlier one."""

    reduction: Reduction

    @staticmethod
    def __new__(cls, reduction: Reduction) -> "Rows":
        rows = Tensor._make_wrapper_subclass(cls, reduction.size, dtype=reduction.dtype, device=reduction.device)
        rows.reduction = reduction
        return rows

    @property
    def elem(self) -> Tensor:  # type: ignore[override]
        return self.reduction.finish()

    def trigger_wait(self) -> Tensor:
        return self.reduction.finish()

    wait = trigger_wait

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        rows = args[0]
        if func is aten.detach.default or (func is aten.view.default and tuple(args[1]) == rows.shape):
            return Rows(rows.reduction)
        if func is aten.add_.Tensor and not kwargs and isinstance(rows, Rows) and isinstance(args[1], Rows):
            rows.reduction.add(args[1].reduction)
            return rows
        return super().__torch_dispatch__(func, types, args, kwargs)


class Eager:
    """State shared by all reads of one model's weights.

    Resharding: autograd saves no gathered weight that is resharded; backward gathers it again. A weight is recognised by the
    address of its storage, because autograd saves views of it (the transpose in a matrix product). The entry is valid while the
    weight is alive: later, an activation may have its address.

    Overlap: weights are read in the same order every time, so a read starts the IN_FLIGHT gathers that followed it last time.
    A reduction's collective is waited for when the gradient is used, or when IN_FLIGHT later ones of its kind have started. In
    HSDP, the all-reduce starts when the reduce-scatter has been waited for. IN_FLIGHT bounds the memory that overlap costs. The
    order comes from the program alone, so it is the same on every rank. Accumulating gradients over
    microbatches waits for neither. Limit: a weight that is read twice (tied) has two gradients, whose sum waits for both.
    """

    IN_FLIGHT = 4

    def __init__(self) -> None:
        # gathered weights by storage address, only during a forward that reshards
        self.reads: dict[int, tuple[weakref.ref[Tensor], nn.Parameter, GatherPlan, Tensor | None]] | None = None
        self.backward = False
        self.order: list[Read] = []  # gathers of this forward or backward so far
        # gathers of the last forward (False) and backward (True)
        self.last_order: dict[bool, list[Read]] = {False: [], True: []}
        self.gathering: dict[tuple[GatherPlan, int], InFlight] = {}  # by plan and address, which changes with the shard
        self.reducing: defaultdict[int, deque[Reduction]] = defaultdict(deque)  # queues, by collectives left to wait for

    def gather(self, shard: Tensor, plan: GatherPlan, scale: Tensor | None = None) -> Tensor:
        if plan.shard_degree == 1:
            return plan.start_gather(shard, scale).wait()
        started = self.gathering.pop((plan, shard.data_ptr()), None) or plan.start_gather(shard, scale)
        place, last = len(self.order), self.last_order[self.backward]
        self.order.append((shard.detach(), plan, scale))
        if place < len(last) and last[place][1] is plan:
            for next_shard, next_plan, next_scale in last[place + 1 : place + 1 + self.IN_FLIGHT]:
                key = (next_plan, next_shard.data_ptr())
                if key not in self.gathering:
                    self.gathering[key] = next_plan.start_gather(next_shard, next_scale)
        return started.wait()

    def reduce(self, gradient: Tensor, plan: GatherPlan, dtype: torch.dtype) -> Tensor:
        """Return this rank's rows of the sum. The first use of the result waits for it."""
        if not plan.reduce_groups:
            return plan.start_reduce(gradient).to(dtype)
        if not self.reducing:  # the first of this backward
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        plan.note()
        reduction = Reduction(gradient, plan, dtype)
        self._enqueue(reduction)
        return Rows(reduction)

    def _enqueue(self, reduction: Reduction) -> None:
        """Queue it with those that have as many collectives left. Of more than IN_FLIGHT, the oldest moves to the next queue."""
        queue = self.reducing[reduction.left]
        queue.append(reduction)
        if len(queue) > self.IN_FLIGHT:
            oldest = queue.popleft()
            if oldest.left > 1:
                oldest.advance()
                self._enqueue(oldest)
            else:
                oldest.finish()

    def _end_backward(self) -> None:
        """Start all remaining collectives, so that reading a gradient on one rank alone starts none. The optimizer or the next
        backward waits for them."""
        left = [reduction for queue in self.reducing.values() for reduction in queue]
        self.reducing.clear()
        while left := [reduction for reduction in left if reduction.left > 1]:
            for reduction in left:
                reduction.advance()

    @contextmanager
    def forward(self, reshard: bool) -> Iterator[None]:
        """Run one forward of the model inside this context."""
        self._begin(backward=False)
        self.reads = {} if reshard else None
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack) if reshard else nullcontext():
                yield
        finally:
            self._begin(backward=True)
            self.reads = None

    def remember(self, weight: Tensor, parameter: nn.Parameter, plan: GatherPlan, scale: Tensor | None = None) -> None:
        if self.reads is not None and weight.data_ptr() != local(parameter).data_ptr():
            self.reads[_storage_address(weight)] = (weakref.ref(weight), parameter, plan, scale)

    def _pack(self, tensor: Tensor) -> Any:
        read = self.reads.get(_storage_address(tensor)) if self.reads and type(tensor) is Tensor else None
        if read is None or read[0]() is None:
            return tensor
        return (*read[1:], read[1]._version, tensor.size(), tensor.stride(), tensor.storage_offset())

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        parameter, plan, scale, version, size, stride, offset = packed
        if parameter._version != version:
            raise RuntimeError(f"{plan.fqn} was changed between its forward and its backward; update it after backward")
        return self.gather(local(parameter).detach(), plan, scale).as_strided(size, stride, offset)

    def _begin(self, backward: bool) -> None:
        """End the last forward or backward and begin the next."""
        while self.gathering:  # prefetched, but not read
            self.gathering.popitem()[1].wait()
        if self.order:
            self.last_order[self.backward] = self.order
        self.backward, self.order = backward, []


def _storage_address(tensor: Tensor) -> int:
    return int(tensor.data_ptr() - tensor.storage_offset() * tensor.element_size())
