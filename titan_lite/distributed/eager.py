"""Resharding and overlap in eager mode; under torch.compile graph passes do both.

    eager = Eager()                                 # one for a model
    with eager.forward(reshard=True):               # what autograd saves of a weight that `remember` was told of is dropped
        whole = eager.gather(shard, plan)           # and the gathers that followed it last time are started
        eager.remember(whole, parameter, plan)
    rows = eager.reduce(gradient, plan, dtype)      # in backward: waited for when it is used

Both are passes of SimpleFSDP's compiler (arXiv 2411.00284); eager mode has no graph to look ahead in: it remembers.
"""

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from titan_lite.distributed.gather import GatherPlan, InFlight, local


class Eager:
    """The state that the reads of one model's weights share.

    Resharding: whatever autograd would save of a weight that is not kept is dropped, and gathered anew in backward. A read is
    remembered by the address of the gathered weight's storage, so that its views (the transpose that a matrix product saves)
    are recognised; it counts while the weight lives, so that an activation at a freed weight's address is not taken for it.

    Overlap: weights are read in the same order every time, so a read starts the gathers that followed it last time; and a
    reduction is waited for when its gradient is used, or when IN_FLIGHT younger ones have been started. Both bounds are the
    memory that overlap may cost. The order is learnt from the program alone, so it is the same on every rank. What DDP and HSDP
    all-reduce is waited for at once.
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
        self.reducing: deque[AsyncCollectiveTensor] = deque()

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
        plan.note()
        started = plan.start_reduce(gradient)
        if plan.shard_degree == 1 or plan.sum_groups or started.shape[0] != plan.own_rows or started.dtype != dtype:
            return plan.finish_reduce(started).to(dtype)
        waits_when_used = AsyncCollectiveTensor(started)
        if not self.reducing:  # the first of this backward; after the last, gradients belong to the optimizer alone
            torch.autograd.Variable._execution_engine.queue_callback(self.reducing.clear)
        self.reducing.append(waits_when_used)
        if len(self.reducing) > self.IN_FLIGHT:
            self.reducing.popleft().trigger_wait()
        return waits_when_used

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
