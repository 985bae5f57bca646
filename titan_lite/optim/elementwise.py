"""Optimizers whose update of an element needs nothing but that element's own numbers: the
parameter, its gradient and its moments. So a rank updates its shards, on every layout.

    optimizer = OneAtATime(groups, config.optimizer, lion.update)
    optimizer.step(skip)                # skip: a scalar on the device; if it is 1, nothing changes

A file such as lion.py has the update of one parameter, in plain operations. Here is what is the
same for all: state by name, the factors of a step, moments in bfloat16, and steps that are skipped.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from titan_lite.config import Optimizer
from titan_lite.config.optimizers import OPTIMIZERS
from titan_lite.dtensor import gradient_shard, local

# (constants, factors, parameter, gradient, *moments) -> (parameter, *moments), as new tensors
Update = Callable[..., tuple[Tensor, ...]]


class Factors(NamedTuple):
    """The factors of a step for all parameters of a group: float32 scalars on their device."""

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
    the tensors of a parameter's shape that it keeps, of `dtype`.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        settings: dict[str, Any],
        moments: Sequence[str],
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__(groups, settings)
        self.moments = moments
        self.dtype = dtype

    def state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the live state of a parameter: of zeros before its first step."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for name in self.moments:
                state[name] = torch.zeros_like(parameter.detach(), dtype=self.dtype)
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
        raise NotImplementedError

    def _shards_of(self, parameters: list[nn.Parameter]) -> Shards:
        states = [self.state_of(parameter) for parameter in parameters]
        return Shards(
            parameters=[local(parameter) for parameter in parameters],
            gradients=[gradient_shard(parameter) for parameter in parameters],
            moments=[[local(state[name]) for state in states] for name in self.moments],
            steps=[state["step"] for state in states],
        )


class OneAtATime(Elementwise):
    """An optimizer that has the update of one parameter, such as lion.py.

    groups: as of Elementwise. constants: the section [optimizer].
    """

    def __init__(self, groups: list[dict[str, Any]], constants: Optimizer, update: Update):
        algorithm = OPTIMIZERS[constants.name]
        settings = {key: getattr(constants, key) for key in ("lr", *algorithm.keys)}
        dtype = getattr(torch, constants.state_dtype)
        super().__init__(groups, settings, algorithm.moments, dtype)
        self.constants = constants
        self.update = update

    def update_group(self, shards: Shards, group: Mapping[str, Any], skip: Tensor | None) -> None:
        skipped = torch.zeros_like(shards.steps[0]) if skip is None else skip
        torch._foreach_add_(shards.steps, 1 - skipped)
        step = shards.steps[0] + skipped  # nonzero even if the first step is skipped
        lr = group["lr"]
        factors = Factors(
            lr=torch.full_like(step, lr),
            decay=torch.full_like(step, 1 - lr * group["weight_decay"]),
            step=step,
        )
        is_skipped = skipped.bool()
        for parameter, gradient, *moments in zip(
            shards.parameters, shards.gradients, *shards.moments, strict=True
        ):
            in_float32 = [moment.float() for moment in moments]
            updated = self.update(self.constants, factors, parameter, gradient, *in_float32)
            for old, new in zip((parameter, *moments), updated, strict=True):
                torch.where(is_skipped, old, new.to(old.dtype), out=old)
