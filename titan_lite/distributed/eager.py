"""Resharding and overlap in eager mode; under torch.compile graph passes do both.

    eager = Eager()                                 # one for a model
    with eager.forward(reshard=True):               # what autograd saves of a weight that `remember` was told of is dropped
        whole = eager.gather(shard, plan)           # and the gathers that followed it last time are started
        eager.remember(whole, parameter, plan)
    rows = eager.reduce(gradient, plan, dtype)      # in backward: waited for when it is used

Both are passes of SimpleFSDP's compiler (arXiv 2411.00284); eager mode has no graph to look ahead in: it remembers.
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


class Reduction:
    """The sum of one gradient on its way, over one group after another; dtype: of the sum. left: collectives not waited for."""

    def __init__(self, gradient: Tensor, plan: GatherPlan, dtype: torch.dtype):
        self.plan, self.dtype, self.left = plan, dtype, len(plan.reduce_groups)
        self.size, self.device = (plan.own_rows, *gradient.shape[1:]), gradient.device
        self.rows = plan.start_reduce(gradient)
        self.onto: Reduction | None = None  # an earlier microbatch's, which this one is added to
        self.later: Reduction | None = None  # which is added to this one

    def go_on(self) -> None:
        """Wait for the collective in flight, and start the next one."""
        self.rows = self.plan.next_reduce(self.rows, len(self.plan.reduce_groups) - self.left)
        self.left -= 1

    def finish(self) -> Tensor:
        while self.left:
            self.go_on()
        self.rows = self.rows.to(self.dtype)
        if self.later is not None:
            self.later.finish()
        if self.onto is not None:
            self.onto.rows.add_(self.rows)
            self.onto.later, self.onto = None, None
        return self.rows

    def add(self, later: "Reduction") -> None:
        """Once it is there."""
        self.finish()
        self.later, later.onto = later, self


class Rows(AsyncCollectiveTensor):
    """The future result of a reduction. Any use waits for it, except that autograd passes it on or adds it to an earlier one."""

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
    """The state that the reads of one model's weights share.

    Resharding: whatever autograd would save of a weight that is not kept is dropped, and gathered anew in backward. A read is
    remembered by the address of the gathered weight's storage, so that its views (the transpose that a matrix product saves)
    are recognised; it counts while the weight lives, so that an activation at a freed weight's address is not taken for it.

    Overlap: weights are read in the same order every time, so a read starts the gathers that followed it last time; and a
    collective of a reduction is waited for when the gradient is used, or when IN_FLIGHT younger ones like it have been started:
    the reduce-scatter of HSDP, upon which its all-reduce starts, and that all-reduce once IN_FLIGHT more have started. Both
    bounds are the memory that overlap may cost. The order is learnt from the program alone, so it is the same on every rank.
    Adding a microbatch's gradient to an earlier one's uses neither. The limit is a weight that is read twice (tied): autograd
    adds up its two gradients when the second one comes, and waits for both.
    """

    IN_FLIGHT = 4

    def __init__(self) -> None:
        # gathered weights by storage address, only during a forward that reshards
        self.reads: dict[int, tuple[weakref.ref[Tensor], nn.Parameter, GatherPlan]] | None = None
        self.backward = False
        self.order: list[tuple[Tensor, GatherPlan]] = []  # of the gathers in this forward or backward so far
        # in the last backward (True) or forward
        self.last_order: dict[bool, list[tuple[Tensor, GatherPlan]]] = {False: [], True: []}
        self.gathering: dict[tuple[GatherPlan, int], InFlight] = {}  # the address tells whether the shard is still the same
        self.reducing: defaultdict[int, deque[Reduction]] = defaultdict(deque)  # lines, by collectives left to wait for

    def gather(self, shard: Tensor, plan: GatherPlan) -> Tensor:
        if plan.shard_degree == 1:
            return plan.start_gather(shard).wait()
        started = self.gathering.pop((plan, shard.data_ptr()), None) or plan.start_gather(shard)
        place, last = len(self.order), self.last_order[self.backward]
        self.order.append((shard.detach(), plan))
        if place < len(last) and last[place][1] is plan:
            for next_shard, next_plan in last[place + 1 : place + 1 + self.IN_FLIGHT]:
                key = (next_plan, next_shard.data_ptr())
                if key not in self.gathering:
                    self.gathering[key] = next_plan.start_gather(next_shard)
        return started.wait()

    def reduce(self, gradient: Tensor, plan: GatherPlan, dtype: torch.dtype) -> Tensor:
        """This rank's rows of the sum; where there is anything to add, a tensor that its first use waits for."""
        if not plan.reduce_groups:
            return plan.start_reduce(gradient).to(dtype)
        if not self.reducing:  # the first of this backward
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        plan.note()
        reduction = Reduction(gradient, plan, dtype)
        self._line_up(reduction)
        return Rows(reduction)

    def _line_up(self, reduction: Reduction) -> None:
        """Behind those that have as many collectives left. The oldest of more than IN_FLIGHT goes on, into the next line."""
        line = self.reducing[reduction.left]
        line.append(reduction)
        if len(line) > self.IN_FLIGHT:
            oldest = line.popleft()
            if oldest.left > 1:
                oldest.go_on()
                self._line_up(oldest)
            else:
                oldest.finish()

    def _end_backward(self) -> None:
        """Start all that is left to start, so that no look at a gradient starts a collective on one rank alone. What is in flight
        then belongs to the optimizer, or to the next microbatch's backward."""
        left = [reduction for line in self.reducing.values() for reduction in line]
        self.reducing.clear()
        while left := [reduction for reduction in left if reduction.left > 1]:
            for reduction in left:
                reduction.go_on()

    @contextmanager
    def forward(self, reshard: bool) -> Iterator[None]:
        """One forward of the model."""
        self._begin(backward=False)
        self.reads = {} if reshard else None
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack) if reshard else nullcontext():
                yield
        finally:
            self._begin(backward=True)
            self.reads = None

    def remember(self, whole: Tensor, parameter: nn.Parameter, plan: GatherPlan) -> None:
        if self.reads is not None and whole.data_ptr() != local(parameter).data_ptr():
            self.reads[_storage_address(whole)] = (weakref.ref(whole), parameter, plan)

    def _pack(self, tensor: Tensor) -> Any:
        read = self.reads.get(_storage_address(tensor)) if self.reads and type(tensor) is Tensor else None
        if read is None or read[0]() is None:
            return tensor
        _, parameter, plan = read
        return (parameter, parameter._version, plan, tensor.size(), tensor.stride(), tensor.storage_offset())

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        parameter, version, plan, size, stride, offset = packed
        if parameter._version != version:
            raise RuntimeError(f"{plan.fqn} was changed between its forward and its backward, which needs what it was")
        return self.gather(local(parameter).detach(), plan).as_strided(size, stride, offset)

    def _begin(self, backward: bool) -> None:
        """A forward or a backward begins, and what came before is over."""
        while self.gathering:  # foreseen, and not read
            self.gathering.popitem()[1].wait()
        if self.order:
            self.last_order[self.backward] = self.order
        self.backward, self.order = backward, []


def _storage_address(tensor: Tensor) -> int:
    return int(tensor.data_ptr() - tensor.storage_offset() * tensor.element_size())
