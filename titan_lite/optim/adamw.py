"""AdamW (arXiv 1711.05101) over sharded parameters: by torch's fused kernel, or with moments in
bfloat16, which the kernel does not take beside float32 parameters, by plain operations.

optimizer = AdamW(groups, config.optimizer)
optimizer.step(skip)                # skip: a scalar on the device; if it is 1, nothing changes
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from titan_lite.config import Optimizer
from titan_lite.config.optimizers import OPTIMIZERS
from titan_lite.optim.elementwise import Elementwise, Factors, Shards


class AdamW(Elementwise):
    """AdamW on local shards, without DTensor's overhead for each operator.

    State and settings are named as those of torch.optim.AdamW.
    """

    def __init__(self, groups: list[dict[str, Any]], config: Optimizer):
        torchs = torch.optim.AdamW(
            [torch.zeros(1)],  # it refuses to have none
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )
        super().__init__(groups, torchs.defaults, OPTIMIZERS["AdamW"].moments)

    def update_group(self, shards: Shards, group: Mapping[str, Any], skip: Tensor | None) -> None:
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


def update(
    constants: Optimizer,
    factors: Factors,
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the parameter and its moments after a step (optim/elementwise.py)."""
    exp_avg = exp_avg.lerp(gradient, 1 - constants.beta1)
    exp_avg_sq = exp_avg_sq.lerp(gradient.square(), 1 - constants.beta2)
    # moments begin at zero
    bias1 = 1 - constants.beta1**factors.step
    bias2 = 1 - constants.beta2**factors.step
    denominator = (exp_avg_sq / bias2).sqrt() + constants.eps
    updated = parameter * factors.decay - exp_avg / denominator * (factors.lr / bias1)
    return updated, exp_avg, exp_avg_sq
