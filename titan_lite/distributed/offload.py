"""Gradients of parameters in host memory (training.offload = "all"): they leave the device as soon as they are reduced.

    offload_gradients([model], host.put)        # of a model that is sharded with offload=True, once

A shard is then in host memory, and each gather copies it to the device (`GatherPlan.cast`). Autograd would want its gradient in
host memory, too, and add up microbatches there. So it accumulates into a stand-in for the shard, a tensor on the device that has
no memory. Gradients are given away from there when those of the next block are being reduced, so that reductions overlap.
"""

import functools
from collections import deque
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from titan_lite.compiler.fqns import block_of, last_block
from titan_lite.distributed.simple_fsdp import model_of

Put = Callable[[nn.Parameter, Tensor], None]


class Leaving:
    """Reduced gradients on their way out of autograd. put: called with a parameter and the rows of its gradient."""

    def __init__(self, put: Put):
        self.put, self.queue = put, deque[tuple[Hashable, nn.Parameter, Tensor]]()
        self.latest: tuple[Hashable, Hashable] = None, None  # the last two blocks

    def take(self, parameter: nn.Parameter, block: Hashable, leaf: Tensor) -> None:
        """Take the gradient of a leaf, of which nothing stays. Called by autograd."""
        assert leaf.grad is not None
        if not self.queue:
            torch.autograd.Variable._execution_engine.queue_callback(self.end)
        self.queue.append((block, parameter, leaf.grad))
        leaf.grad = None
        if block != self.latest[1]:
            self.latest = self.latest[1], block
        while self.queue[0][0] not in self.latest:
            self._put_first()

    def end(self) -> None:
        """Give away all that are left, at the end of a backward."""
        while self.queue:
            self._put_first()

    def _put_first(self) -> None:
        _, parameter, rows = self.queue.popleft()
        self.put(
            parameter, rows.trigger_wait() if isinstance(rows, AsyncCollectiveTensor) else rows
        )


def offload_gradients(roots: Sequence[nn.Module], put: Put | None) -> None:
    """Give each reduced gradient of parameters in host memory, if there are any, to `put`, on the device's current stream."""
    for model in map(model_of, roots):
        if not model.leaves:
            continue
        assert put is not None
        model.put, leaving = put, Leaving(put)
        last = last_block(plan.fqn for plan in model.plans.values())
        for parameter, plan in model.plans.items():
            block = block_of(plan.fqn, last)
            model.leaves[plan.fqn].register_post_accumulate_grad_hook(
                functools.partial(leaving.take, parameter, block)
            )
