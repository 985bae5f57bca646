"""Let weights arrive, and gradients leave, while a compiled graph runs (accumulation.py starts the
collectives).

    register(weight, finish)                                  # weight: allocated, and not gathered yet
    weight, stands_in = Arriving.apply(weight, handle, plan)  # in a graph: calls `finish` once, before the first use
    takes[fqn] = take                                         # backward calls take(gradient) as soon as it has computed it

A graph can wait for a collective that was started outside of it: `wait_tensor` looks up the work of
its input's storage, and returns its input if there is none (torch's
`allow_inflight_collective_as_graph_input_ctx`). So one graph serves all microbatches. Autograd
accumulates the gradients of handles, which are empty. They keep `take_gradient` in the graph.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work, _register_work

from titan_lite.cost.collectives import collectives
from titan_lite.distributed.param_collectives import ShardSpec
from titan_lite.models.float8 import stand_in

# By FQN. A function must not keep its argument, whose memory the graph uses again.
takes: dict[str, Callable[[Tensor], None]] = {}


class Arrival(Work):
    """Work of `wait_tensor`: a function, which may be called again."""

    def __init__(self, finish: Callable[[], None]):
        super().__init__()
        self.finish = finish

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self.finish()
        return True


def register(weight: Tensor, finish: Callable[[], None]) -> Arrival:
    """Make the next `wait_tensor` on the storage of `weight` call `finish`.

    The caller keeps the result until then.
    """
    arrival = Arrival(finish)
    _register_work(weight, arrival)
    return arrival


class Arriving(torch.autograd.Function):
    """(weight, its handle (0,)) -> the results of simple_fsdp._Gather.

    Backward gives their gradient to `takes`.
    """

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, handle: Tensor, plan: ShardSpec
    ) -> tuple[Tensor, Tensor | None]:
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        weight = collectives.wait_tensor(weight)
        return weight, stand_in(weight, plan.param_dtype) if plan.float8 else None

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, Tensor, None]:
        gradient = gradients[1] if ctx.plan.float8 else gradients[0]
        assert gradient is not None
        return None, take_gradient(gradient, ctx.plan.fqn), None


@torch.library.custom_op("titan_lite::take_gradient", mutates_args=())
def take_gradient(gradient: Tensor, fqn: str) -> Tensor:
    """Give the gradient away. Returns that of the handle."""
    takes[fqn](gradient)
    return gradient.new_empty(0)


@take_gradient.register_fake
def _(gradient: Tensor, fqn: str) -> Tensor:
    return gradient.new_empty(0)
