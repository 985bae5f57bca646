"""Optimizers whose update of an element needs nothing but that element's own numbers: the
parameter, its gradient and its moments. So a rank updates its shards, on every layout.

    updates = one_at_a_time(lion.update, config.optimizer)
    optimizer = Elementwise(groups, settings, ("exp_avg",), updates)
    optimizer.step(skip)                # skip: a scalar on the device; if it is 1, nothing changes

A file such as lion.py has the update of one parameter, in plain operations. Here is what is the
same for all: state by name, the factors of a step, steps that are skipped, and compilation.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from titan_lite.config import Optimizer
from titan_lite.dtensor import gradient_shard, local

# compiles a function
Compiler = Callable[[Callable], Callable]
# (constants, factors, parameter, gradient, *moments) -> (parameter, *moments), as new tensors
Update = Callable[..., tuple[Tensor, ...]]
# (factors, skip, parameters, gradients, moments): the step of all parameters of a group, in place;
# moments: a list of all parameters' for each name
Updates = Callable[..., None]


class Factors(NamedTuple):
    """The factors of a step for all parameters of a group: float32 scalars on their device.

    They are tensors, since a compiled graph would have numbers that change as constants.
    """

    lr: Tensor
    decay: Tensor  # of the parameter: 1 - lr x weight_decay
    step: Tensor  # its number, from 1 on; steps that were skipped do not count


class Shards(NamedTuple):
    """This rank's shards of the parameters of a group, and of their state."""

    parameters: list[Tensor]
    gradients: list[Tensor]
    moments: list[list[Tensor]]  # a list of all parameters' for each name
    steps: list[Tensor]  # scalars


class Elementwise(torch.optim.Optimizer):
    """The part of a step that is the same for all elementwise optimizers.

    groups: parameters, with a weight_decay each group. settings: of all groups. moments: names of
    the float32 tensors of a parameter's shape that it keeps. compile: compiles `updates`, to one
    graph for a group; the state is the same.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        settings: dict[str, Any],
        moments: Sequence[str],
        updates: Updates,
        compile: Compiler | None = None,
    ):
        super().__init__(groups, settings)
        self.moments = moments
        self.is_compiled = compile is not None
        self.updates = updates if compile is None else compile(updates)

    def state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the live state of a parameter: of zeros before its first step."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for name in self.moments:
                state[name] = torch.zeros_like(parameter.detach())
        return state

    @torch.no_grad()
    def step(self, skip: Tensor | None = None) -> None:  # type: ignore[override]
        """Update parameters.

        skip: a float32 scalar on their device, not read on the host; if it is 1, nothing changes.
        """
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                self.update_group(self._shards_of(parameters), group, skip)

    def update_group(self, shards: Shards, group: Mapping[str, Any], skip: Tensor | None) -> None:
        """Do one step of the parameters of a group, and count it."""
        skipped = torch.zeros_like(shards.steps[0]) if skip is None else skip
        torch._foreach_add_(shards.steps, 1 - skipped)
        step = shards.steps[0] + skipped  # nonzero even if the first step is skipped
        self.updates(
            self.factors(step, group),
            skipped.bool(),
            shards.parameters,
            shards.gradients,
            shards.moments,
        )

    def factors(self, step: Tensor, group: Mapping[str, Any]) -> NamedTuple:
        """Return what `updates` needs beside shards. step: its number, a float32 scalar."""
        lr = group["lr"]
        return Factors(
            lr=torch.full_like(step, lr),
            decay=torch.full_like(step, 1 - lr * group["weight_decay"]),
            step=step,
        )

    def _shards_of(self, parameters: list[nn.Parameter]) -> Shards:
        states = [self.state_of(parameter) for parameter in parameters]
        return Shards(
            parameters=[local(parameter) for parameter in parameters],
            gradients=[gradient_shard(parameter) for parameter in parameters],
            moments=[[local(state[name]) for state in states] for name in self.moments],
            steps=[state["step"] for state in states],
        )


def one_at_a_time(update: Update, constants: Optimizer) -> Updates:
    """Return the updates of all parameters of a group, from that of one parameter."""

    def updates(
        factors: Factors,
        skip: Tensor,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        moments: Sequence[Sequence[Tensor]],
    ) -> None:
        for parameter, gradient, *own in zip(parameters, gradients, *moments, strict=True):
            updated = update(constants, factors, parameter, gradient, *own)
            for old, new in zip((parameter, *own), updated, strict=True):
                torch.where(skip, old, new, out=old)

    return updates
