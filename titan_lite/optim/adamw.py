"""AdamW over sharded parameters: torch's fused kernel, or an update that the compiler fuses.

optimizer = AdamW(groups, config.optimizer)
optimizer.step(skip)                # skip: a scalar on the device; if it is 1, nothing changes
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from titan_lite.config import Optimizer
from titan_lite.config.optimizers import OPTIMIZERS
from titan_lite.optim.elementwise import Compiler, Elementwise, Shards


class AdamW(Elementwise):
    """AdamW on local shards, without DTensor's overhead for each operator.

    State and settings are named as those of torch.optim.AdamW.

    compile: compiles `_update`, because torch 2.13 does not trace the fused kernel.
    """

    def __init__(
        self, groups: list[dict[str, Any]], config: Optimizer, compile: Compiler | None = None
    ):
        torchs = torch.optim.AdamW(
            [torch.zeros(1)],  # it refuses to have none
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )
        super().__init__(groups, torchs.defaults, OPTIMIZERS["AdamW"].moments, _update, compile)

    def update_group(self, shards: Shards, group: Mapping[str, Any], skip: Tensor | None) -> None:
        if self.is_compiled:
            super().update_group(shards, group, skip)
        else:
            _fused_update(shards, group, skip)

    def factors(self, step: Tensor, group: Mapping[str, Any]) -> "_Factors":
        """Compute the factors of a step in float64, as the fused kernel does."""
        beta1, beta2 = group["betas"]
        step = step.double()
        return _Factors(
            decay=torch.full_like(step, 1 - group["lr"] * group["weight_decay"]).float(),
            step_size=(group["lr"] / (1 - beta1**step)).float(),
            correction=(1 - beta2**step).sqrt().float(),
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
        )


def _fused_update(shards: Shards, group: Mapping[str, Any], skip: Tensor | None) -> None:
    """Do one step with torch's fused kernel, which also counts it."""
    exp_avgs, exp_avg_sqs = shards.moments
    beta1, beta2 = group["betas"]
    adamw(
        shards.parameters,
        shards.gradients,
        exp_avgs,
        exp_avg_sqs,
        max_exp_avg_sqs=[],
        state_steps=shards.steps,
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=group["amsgrad"],
        maximize=group["maximize"],
        fused=True,
        found_inf=skip,
    )


class _Factors(NamedTuple):
    """The factors of a step for all parameters of a group.

    Those that change are float32 scalars: a graph would have numbers as constants.
    """

    decay: Tensor  # of parameters
    step_size: Tensor
    correction: Tensor  # of the square root of the second moment
    beta1: float
    beta2: float
    eps: float


def _update(
    factors: _Factors,
    skip: Tensor,
    parameters: list[Tensor],
    gradients: list[Tensor],
    moments: list[list[Tensor]],
) -> None:
    """Do one step of AdamW (arXiv 1711.05101, algorithm 2) in place, unless it is skipped.

    All tensors but `skip` are float32.
    """
    exp_avgs, exp_avg_sqs = moments
    means = torch._foreach_lerp(exp_avgs, gradients, 1 - factors.beta1)
    squares = torch._foreach_mul(exp_avg_sqs, factors.beta2)
    squares = torch._foreach_addcmul(squares, gradients, gradients, 1 - factors.beta2)
    denominators = torch._foreach_div(torch._foreach_sqrt(squares), factors.correction)
    denominators = torch._foreach_add(denominators, factors.eps)
    steps = torch._foreach_div(torch._foreach_mul(means, factors.step_size), denominators)
    updated = torch._foreach_sub(torch._foreach_mul(parameters, factors.decay), steps)
    for old, new in ((parameters, updated), (exp_avgs, means), (exp_avg_sqs, squares)):
        kept = [torch.where(skip, *pair) for pair in zip(old, new, strict=True)]
        torch._foreach_copy_(old, kept)
