"""AdamW over sharded parameters: torch's fused kernel, or an update that the compiler fuses.

optimizer = AdamW(groups, lr=3e-4, betas=(0.9, 0.95), eps=1e-8)
optimizer.step(skip)                # skip: a scalar on the device; if it is 1, nothing changes
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from titan_lite.dtensor import gradient_shard, local


class AdamW(torch.optim.AdamW):
    """AdamW on local shards, without DTensor's overhead for each operator.

    The state is named as that of torch.optim.AdamW.

    compile: compiles `_update`, because torch 2.13 does not trace the fused kernel.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        compile: Callable[[Callable], Callable] | None = None,
    ):
        super().__init__(groups, lr=lr, betas=betas, eps=eps, fused=True)
        self.compiled_update = None if compile is None else compile(_update)

    def state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the live state of a parameter: of zeros before its first step."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter.detach())
        return state

    @torch.no_grad()
    def step(self, skip: Tensor | None = None) -> None:  # type: ignore[override]
        """Update parameters.

        skip: a float32 scalar on their device, not read on the host; if it is 1, nothing changes.
        """
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            shards = self._shards_of(parameters)
            if self.compiled_update is None:
                _fused_update(shards, group, skip)
                continue
            skipped = torch.zeros_like(shards.steps[0]) if skip is None else skip
            torch._foreach_add_(shards.steps, 1 - skipped)
            factors = _factors(shards.steps[0], skipped, group)
            self.compiled_update(
                shards.parameters, shards.gradients, shards.exp_avgs, shards.exp_avg_sqs, factors
            )

    def _shards_of(self, parameters: list[nn.Parameter]) -> "_Shards":
        states = [self.state_of(parameter) for parameter in parameters]
        return _Shards(
            parameters=[local(parameter) for parameter in parameters],
            gradients=[gradient_shard(parameter) for parameter in parameters],
            exp_avgs=[local(state["exp_avg"]) for state in states],
            exp_avg_sqs=[local(state["exp_avg_sq"]) for state in states],
            steps=[state["step"] for state in states],
        )


class _Shards(NamedTuple):
    """This rank's shards of the parameters of a group, and of their state."""

    parameters: list[Tensor]
    gradients: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    steps: list[Tensor]  # scalars


def _fused_update(shards: _Shards, group: Mapping[str, Any], skip: Tensor | None) -> None:
    """Do one step with torch's fused kernel, which also counts it."""
    beta1, beta2 = group["betas"]
    adamw(
        shards.parameters,
        shards.gradients,
        shards.exp_avgs,
        shards.exp_avg_sqs,
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
    """The factors of a step for all parameters.

    Those that change are tensors: a graph would have numbers as constants.
    """

    decay: Tensor  # of parameters
    step_size: Tensor
    correction: Tensor  # of the square root of the second moment
    skip: Tensor  # bool
    beta1: float
    beta2: float
    eps: float


def _factors(step: Tensor, skip: Tensor, group: Mapping[str, Any]) -> _Factors:
    """Compute the factors of a step in float64, as the fused kernel does.

    step: its number, without a step that is skipped.
    """
    beta1, beta2 = group["betas"]
    step = step.double() + skip  # nonzero even if the first step is skipped
    return _Factors(
        decay=torch.full_like(step, 1 - group["lr"] * group["weight_decay"]).float(),
        step_size=(group["lr"] / (1 - beta1**step)).float(),
        correction=(1 - beta2**step).sqrt().float(),
        skip=skip.bool(),
        beta1=beta1,
        beta2=beta2,
        eps=group["eps"],
    )


def _update(
    parameters: list[Tensor],
    gradients: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    factors: _Factors,
) -> None:
    """Do one step of AdamW (arXiv 1711.05101, algorithm 2) in place, unless it is skipped.

    All tensors are float32.
    """
    means = torch._foreach_lerp(exp_avgs, gradients, 1 - factors.beta1)
    squares = torch._foreach_mul(exp_avg_sqs, factors.beta2)
    squares = torch._foreach_addcmul(squares, gradients, gradients, 1 - factors.beta2)
    denominators = torch._foreach_div(torch._foreach_sqrt(squares), factors.correction)
    denominators = torch._foreach_add(denominators, factors.eps)
    steps = torch._foreach_div(torch._foreach_mul(means, factors.step_size), denominators)
    updated = torch._foreach_sub(torch._foreach_mul(parameters, factors.decay), steps)
    for old, new in ((parameters, updated), (exp_avgs, means), (exp_avg_sqs, squares)):
        kept = [torch.where(factors.skip, *pair) for pair in zip(old, new, strict=True)]
        torch._foreach_copy_(old, kept)
