"""Build the optimizer of a recipe.

optimizer = build_optimizer(config, model.parameters)
optimizer.set_lr(3e-4)
optimizer.step(skip)            # skip: a scalar on the device; if it is 1, nothing changes
optimizer.zero_grad()
optimizer.state_tensors()       # {"layers.0.attention.wq.weight.exp_avg": DTensor, ...}
"""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from titan_lite.config import Config
from titan_lite.config.optimizers import OPTIMIZERS
from titan_lite.feature import features_of
from titan_lite.optim.adamw import AdamW
from titan_lite.optim.elementwise import Elementwise, OneAtATime


class PartOptimizer(Protocol):
    """An optimizer of some of the parameters: a torch.optim.Optimizer with state by name."""

    param_groups: list[dict[str, Any]]

    def step(self, skip: Tensor | None = None) -> None:
        """Update parameters, unless the scalar `skip` is 1."""

    def zero_grad(self) -> None:
        """Free the gradients."""

    def state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the live state of a parameter, by its names in the optimizer's file."""


class Optimizers:
    """Optimizers, of which each updates some of the parameters; state is named by FQN.

    parameters: by FQN.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizers: Sequence[PartOptimizer],
    ):
        self.parameters = dict(parameters)
        self.optimizers = list(optimizers)
        self.optimizer_of = _optimizer_of(self.optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers, as torch.optim has them."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the next steps."""
        for group in self.param_groups:
            group["lr"] = lr

    def step(self, skip: Tensor | None = None) -> None:
        """Update parameters.

        skip: a float32 scalar on their device; if it is 1, nothing changes. An optimizer of a
        feature may read it on the host.
        """
        for optimizer in self.optimizers:
            optimizer.step(skip)

    def zero_grad(self) -> None:
        """Free the gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the live state of a parameter, by its names in the optimizer's file."""
        return self.optimizer_of[parameter].state_of(parameter)

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the live state as {"FQN.exp_avg": ..., "FQN.exp_avg_sq": ..., "FQN.step": ...}.

        State that the first step would create is created here, so that a checkpoint can be loaded
        into it. Another rank may have some of it.
        """
        return {
            f"{fqn}.{name}": tensor
            for fqn, parameter in self.parameters.items()
            for name, tensor in self.state_of(parameter).items()
        }

    def settings(self) -> dict[str, Any]:
        """Return the settings of each parameter's group: {"FQN.lr": ..., "FQN.betas": ..., ...}."""
        fqns = {parameter: fqn for fqn, parameter in self.parameters.items()}
        return {
            f"{fqns[parameter]}.{key}": value
            for group in self.param_groups
            for parameter in group["params"]
            for key, value in group.items()
            if key != "params"
        }


def _optimizer_of(optimizers: Sequence[PartOptimizer]) -> dict[nn.Parameter, PartOptimizer]:
    """Return the optimizer of each parameter that one of them has."""
    return {
        parameter: optimizer
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def build_optimizer(config: Config, parameters: Mapping[str, nn.Parameter]) -> Optimizers:
    """Return the optimizers that features have for some parameters, and an elementwise one for the
    others: that of the recipe, or AdamW.

    parameters: by FQN. Norm weights do not decay.
    """
    of_features = [
        optimizer
        for feature in features_of(config)
        for optimizer in feature.optimizers(config, parameters)
    ]
    theirs = _optimizer_of(of_features)
    decayed: list[nn.Parameter] = []
    not_decayed: list[nn.Parameter] = []
    for parameter in parameters.values():
        if parameter not in theirs:
            (decayed if parameter.dim() > 1 else not_decayed).append(parameter)
    settings = config.optimizer
    groups = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": not_decayed, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    elementwise: Elementwise
    is_plain = settings.name != "AdamW" or settings.state_dtype != "float32"
    if not (is_plain and OPTIMIZERS[settings.name].is_elementwise):
        elementwise = AdamW(groups, settings)  # whose updates of all parameters are one kernel
    else:
        module = importlib.import_module(f"titan_lite.optim.{settings.name.lower()}")
        elementwise = OneAtATime(groups, settings, module.update)
    return Optimizers(parameters, [elementwise, *of_features])
