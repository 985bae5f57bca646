"""Build the optimizer of a recipe, and name its state by FQN.

named = dict(model.named_parameters())
optimizer = build_optimizer(config.optimizer, named)                          # fused: one kernel
optimizer = build_optimizer(config.optimizer, named, compile=torch.compile)   # compiled
optimizer_state(optimizer, named)       # {"layers.0.attention.wq.weight.exp_avg": DTensor, ...}
optimizer_settings(optimizer, named)    # {"layers.0.attention.wq.weight.lr": 3e-4, ...}
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from titan_lite.config import Optimizer
from titan_lite.optim.adamw import AdamW
from titan_lite.optim.matrices import Matrices
from titan_lite.optim.muon import Muon
from titan_lite.optim.shampoo import Shampoo
from titan_lite.optim.state import is_matrix

OF_MATRICES = {"Muon": Muon, "Shampoo": Shampoo}  # by optimizer.name


def build_optimizer(
    config: Optimizer,
    parameters: Mapping[str, nn.Parameter],
    *,
    compile: Callable[[Callable], Callable] | None = None,
) -> AdamW | Matrices:
    """Return AdamW, fused (one kernel for all parameters) or with an update compiled by `compile`;
    its state is the same. Or return an optimizer of matrices, which is not compiled, with such an
    AdamW for embedding, output and norms.

    parameters: by FQN. Norm weights do not decay.
    """
    matrices = {
        fqn: parameter
        for fqn, parameter in parameters.items()
        if config.name in OF_MATRICES and is_matrix(fqn)
    }
    by_decay: dict[float, list[nn.Parameter]] = {config.weight_decay: [], 0.0: []}
    for parameter in (parameter for fqn, parameter in parameters.items() if fqn not in matrices):
        by_decay[config.weight_decay if parameter.dim() > 1 else 0.0].append(parameter)
    groups: list[dict] = [
        {"params": found, "weight_decay": decay} for decay, found in by_decay.items() if found
    ]
    betas = (config.beta1, config.beta2)
    adamw = AdamW(groups, compile, lr=config.lr, betas=betas, eps=config.eps, fused=True)
    return OF_MATRICES[config.name](matrices, adamw, config) if matrices else adamw


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def optimizer_state(
    optimizer: AdamW | Matrices, parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """Return the state as {"FQN.exp_avg": ..., "FQN.exp_avg_sq": ..., "FQN.step": ...}, the live
    tensors. The state of a matrix of Muon or Shampoo has the names in their files; some of it only
    its owner has.

    State that the first step would create is created here, so that a checkpoint can be loaded into
    it.
    """
    states = ((fqn, optimizer.state_of(parameter)) for fqn, parameter in parameters.items())
    return {f"{fqn}.{name}": value for fqn, state in states for name, value in state.items()}


def optimizer_settings(
    optimizer: AdamW | Matrices, parameters: Mapping[str, nn.Parameter]
) -> dict[str, Any]:
    """Return the settings of each parameter's group as {"FQN.lr": ..., "FQN.betas": ..., ...}."""
    fqns = {parameter: fqn for fqn, parameter in parameters.items()}
    return {
        f"{fqns[parameter]}.{key}": value
        for group in optimizer.param_groups
        for parameter in group["params"]
        for key, value in group.items()
        if key != "params"
    }
