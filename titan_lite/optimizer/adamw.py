"""AdamW over sharded parameters: torch's fused kernel, or an update of our own that rounds stochastically.

optimizer = AdamW(named, groups, torch.float32, seed=0, compile=None, lr=3e-4, fused=True)
optimizer.step(skip)                    # skip: a scalar on the device; if it is 1, nothing changes
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.optim.adamw import adamw

from titan_lite.optimizer.rounding import (
    PIECE,
    TENSORS,
    at_step,
    keys_of,
    round_stochastically,
    row_numbers,
)
from titan_lite.sharding import local

Draw = tuple[Tensor, Tensor]  # for random bits: numbers of the rows, keys of TENSORS


class AdamW(torch.optim.AdamW):
    """AdamW on local shards, without DTensor's overhead for each operator. The state is named as that of torch.optim.AdamW.

    If all is float32, the update is torch's fused kernel. That kernel rounds to the nearest, so parameters or moments in bfloat16
    have `_update` instead, which rounds them stochastically (rounding.py).
    compile: compiles `_update`, for any dtype, because torch 2.13 does not trace the fused kernel.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        groups: list[dict],
        dtype: torch.dtype,
        seed: int,
        compile: Callable[[Callable], Callable] | None,
        **settings: Any,
    ):
        super().__init__(groups, **settings)
        self.dtype = dtype
        self.compiled = compile and compile(_update)
        self.keys = dict(zip(parameters.values(), keys_of(seed, parameters), strict=True))
        self.places: dict[nn.Parameter, Draw] = {}  # on their device, for every step

    def state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the live state of a parameter: of zeros before its first step."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            own = parameter.detach()
            for name in TENSORS[1:]:
                state[name] = torch.zeros_like(own, dtype=self.dtype)
        return state

    @torch.no_grad()
    def step(self, skip: Tensor | None = None) -> None:  # type: ignore[override]
        """Update parameters. skip: a float32 scalar on their device, not read on the host; if it is 1, nothing changes."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            states = [self.state_of(parameter) for parameter in parameters]
            steps = [state["step"] for state in states]
            own, gradients = (
                [*map(local, parameters)],
                [_waited(local(parameter.grad)) for parameter in parameters],
            )
            first, second = ([local(state[name]) for state in states] for name in TENSORS[1:])
            if self.compiled is None and torch.float32 == own[0].dtype == self.dtype:
                _fused(own, gradients, first, second, steps, group, skip)
                continue
            skipped = torch.zeros_like(steps[0]) if skip is None else skip
            torch._foreach_add_(steps, 1 - skipped)
            draws = (
                self.draws(parameters, steps[0])
                if torch.bfloat16 in (own[0].dtype, self.dtype)
                else []
            )
            factors = _factors(steps[0], skipped, group)
            update = self.compiled or _update_in_pieces
            update(own, gradients, first, second, draws, **factors)

    def draws(self, parameters: list[nn.Parameter], step: Tensor) -> list[Draw]:
        for parameter in parameters:
            if (
                parameter not in self.places
            ):  # copied to the device once: a copy waits for the work queued there
                self.places[parameter] = (
                    row_numbers(parameter).to(step.device),
                    self.keys[parameter].to(step.device),
                )
        rows, keys = zip(*map(self.places.__getitem__, parameters), strict=True)
        return [*zip(rows, at_step(torch.stack(keys), step), strict=True)]


def _waited(gradient: Tensor) -> Tensor:
    """Return the tensor itself of one that is being reduced (distributed/eager.py), which a compiler cannot trace."""
    return gradient.wait() if isinstance(gradient, AsyncCollectiveTensor) else gradient


def _fused(
    own: list[Tensor],
    gradients: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    steps: list[Tensor],
    group: Mapping[str, Any],
    skip: Tensor | None,
) -> None:
    """Do one step by torch's fused kernel, which rounds to the nearest."""
    settings: dict[str, Any] = {
        name: group[name] for name in ("lr", "weight_decay", "eps", "amsgrad", "maximize")
    }
    settings |= dict(
        beta1=group["betas"][0], beta2=group["betas"][1], max_exp_avg_sqs=[], fused=True
    )
    adamw(own, gradients, first, second, state_steps=steps, found_inf=skip, **settings)


def _factors(step: Tensor, skip: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the factors of a step for all parameters, computed in float64 as in the fused kernel.

    Those that change are tensors, since the graph would have numbers as constants.
    """
    (beta1, beta2), step = (
        group["betas"],
        step.double() + skip,
    )  # nonzero even if the first step is skipped
    decay, step_size = (
        torch.full_like(step, 1 - group["lr"] * group["weight_decay"]),
        group["lr"] / (1 - beta1**step),
    )
    tensors = dict(
        decay=decay.float(),
        step_size=step_size.float(),
        correction=(1 - beta2**step).sqrt().float(),
    )
    return dict(**tensors, skip=skip.bool(), beta1=beta1, beta2=beta2, eps=group["eps"])


def _update_in_pieces(
    own: list[Tensor],
    gradients: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    draws: list[Draw],
    **factors: Any,
) -> None:
    """Do `_update` with PIECE elements at once, so that its temporaries are small."""
    for *tensors, (rows, key) in zip(own, gradients, first, second, draws, strict=True):
        length = max(1, PIECE[rows.device.type] // max(1, math.prod(tensors[0].shape[1:])))
        for a, b, c, d, own_rows in zip(
            *(tensor.split(length) for tensor in (*tensors, rows)), strict=True
        ):
            _update([a], [b], [c], [d], [(own_rows, key)], **factors)


def _update(
    parameters: list[Tensor],
    gradients: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    draws: list[Draw],
    *,
    decay: Tensor,
    step_size: Tensor,
    correction: Tensor,
    skip: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """Do one step of AdamW (arXiv 1711.05101, algorithm 2) in place, unless `skip`. Computes in float32 for any dtype.

    draws: of each parameter, if anything is in bfloat16.
    """
    lists = (parameters, gradients, exp_avgs, exp_avg_sqs)
    before, gradients, first, second = ([tensor.float() for tensor in tensors] for tensors in lists)
    means = torch._foreach_lerp(first, gradients, 1 - beta1)
    squares = torch._foreach_addcmul(
        torch._foreach_mul(second, beta2), gradients, gradients, 1 - beta2
    )
    denominators = torch._foreach_add(
        torch._foreach_div(torch._foreach_sqrt(squares), correction), eps
    )
    steps = torch._foreach_div(torch._foreach_mul(means, step_size), denominators)
    after = torch._foreach_sub(torch._foreach_mul(before, decay), steps)
    changes = (
        (parameters, before, after),
        (exp_avgs, first, means),
        (exp_avg_sqs, second, squares),
    )
    for place, (tensors, old, new) in enumerate(changes):
        exact = [torch.where(skip, *pair) for pair in zip(old, new, strict=True)]
        if (
            tensors[0].dtype == torch.bfloat16
        ):  # a value that bfloat16 has, as of a skipped step, stays
            pairs = zip(exact, draws, strict=True)
            exact = [round_stochastically(value, rows, key[place]) for value, (rows, key) in pairs]
        torch._foreach_copy_(tensors, exact)
