"""Build the optimizer of a recipe.

optimizer = build_optimizer(config.optimizer, model.parameters)
optimizer.set_lr(3e-4)
optimizer.step(skip)            # skip: a scalar on the device; if it is 1, nothing changes
optimizer.zero_grad()
optimizer.state_tensors()       # {"layers.0.attention.wq.weight.exp_avg": DTensor, ...}
"""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from titan_lite.config import Optimizer
from titan_lite.models.fqns import is_of_experts
from titan_lite.optim.adamw import AdamW
from titan_lite.optim.elementwise import Elementwise, OneAtATime
from titan_lite.optim.matrices import MatrixOptimizer
from titan_lite.optim.muon import Muon, MuonOfExperts
from titan_lite.optim.shampoo import Shampoo
from titan_lite.optim.state import is_matrix

# by optimizer.name; all others are elementwise
MATRIX_OPTIMIZERS: dict[str, type[MatrixOptimizer]] = {"Muon": Muon, "Shampoo": Shampoo}


class NamedOptimizer:
    """Optimizers, of which each updates some of the parameters; state is named by FQN.

    parameters: by FQN.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizers: Sequence[Elementwise | MatrixOptimizer],
    ):
        self.parameters = dict(parameters)
        self.optimizers = list(optimizers)
        self.optimizer_of: dict[nn.Parameter, Elementwise | MatrixOptimizer] = {
            parameter: optimizer
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }

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

        skip: a float32 scalar on their device; if it is 1, nothing changes. Only Shampoo reads it
        on the host.
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
        into it. Of a matrix of Muon or Shampoo, some of it only its owner has.
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


def build_optimizer(config: Optimizer, parameters: Mapping[str, nn.Parameter]) -> NamedOptimizer:
    """Return an elementwise optimizer, or one of the matrices within blocks, one of those of
    experts, and AdamW for the others.

    parameters: by FQN. Norm weights do not decay.
    """
    matrix_optimizer_class = MATRIX_OPTIMIZERS.get(config.name)
    matrices: dict[str, nn.Parameter] = {}
    of_experts: dict[str, nn.Parameter] = {}
    if matrix_optimizer_class is not None:
        for fqn, weight in parameters.items():
            if is_matrix(fqn):
                (of_experts if is_of_experts(weight.shape) else matrices)[fqn] = weight

    decayed: list[nn.Parameter] = []
    not_decayed: list[nn.Parameter] = []
    for fqn, parameter in parameters.items():
        if fqn not in matrices and fqn not in of_experts:
            (decayed if parameter.dim() > 1 else not_decayed).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": not_decayed, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    elementwise: Elementwise
    if config.name == "AdamW" or matrix_optimizer_class is not None:
        elementwise = AdamW(groups, config)  # whose updates of all parameters are one kernel
    else:
        module = importlib.import_module(f"titan_lite.optim.{config.name.lower()}")
        elementwise = OneAtATime(groups, config, module.update)
    optimizers: list[Elementwise | MatrixOptimizer] = [elementwise]
    if matrix_optimizer_class is not None and matrices:
        optimizers.append(matrix_optimizer_class(matrices, config))
    if of_experts:
        assert matrix_optimizer_class is Muon, "features/moe/rules.py"
        optimizers.append(MuonOfExperts(of_experts, config))
    return NamedOptimizer(parameters, optimizers)
