"""Muon for the matrices within blocks, AdamW for all other parameters (https://kellerjordan.github.io/posts/muon/).

    optimizer = Muon(matrices, adamw, config)
    optimizer.step(skip)                    # skip: a scalar on the device; if it is 1, nothing changes

A matrix is moved by its momentum, made orthogonal by a Newton-Schulz iteration and scaled to the size of AdamW's steps as in
Moonlight (arXiv 2502.16982, section 2.2), so that one learning rate and one weight decay serve both. The momentum is sharded as
its parameter. The iteration needs the whole matrix, and its owner alone computes it (owners.py). torch.optim.Muon with
adjust_lr_fn = "match_rms_adamw" takes the same steps.
"""

import functools
import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from titan_lite.config import Optimizer
from titan_lite.optimizer.adamw import AdamW, local
from titan_lite.optimizer.owners import Owners
from titan_lite.optimizer.rounding import round_stochastically
from titan_lite.optimizer.state import newton_schulz_flops

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic polynomial: steepest at zero, so small singular values grow fastest
EPS = 1e-7


def orthogonalize(matrix: Tensor, steps: int) -> Tensor:
    """Return nearly U V^T of matrix = U S V^T: after five steps, most singular values are between 0.7 and 1.2."""
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=EPS)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    """Muon and AdamW with one learning rate; the groups of both are in `param_groups`.

    matrices: by FQN. adamw: of the other parameters, with random bits for all. A matrix in bfloat16, or its momentum, is rounded
    stochastically (rounding.py), the momentum with the bits of AdamW's first moment. State is not in host memory (`host`).
    """

    def __init__(self, matrices: Mapping[str, nn.Parameter], adamw: AdamW, config: Optimizer):
        own = dict(momentum=config.momentum, nesterov=config.nesterov, ns_steps=config.ns_steps)
        super().__init__([*matrices.values()], dict(lr=config.lr, weight_decay=config.weight_decay, **own))
        self.matrices = self.param_groups[0]["params"]
        self.param_groups += adamw.param_groups
        self.adamw, self.host, self.dtype = adamw, None, getattr(torch, config.state_dtype)
        costs = [newton_schulz_flops(tuple(matrix.shape)) for matrix in self.matrices]
        self.owners = Owners(self.matrices, costs, getattr(torch, config.ns_dtype))

    def state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the live state of a parameter: of zeros before its first step."""
        if parameter not in self.state and any(parameter is matrix for matrix in self.matrices):
            step = torch.zeros((), dtype=torch.float32, device=parameter.device)
            buffer = torch.zeros_like(parameter.detach(), dtype=self.dtype)
            self.state[parameter] = dict(step=step, momentum_buffer=buffer)
        return self.state[parameter] if parameter in self.state else self.adamw.state_of(parameter)

    @torch.no_grad()
    def step(self, skip: Tensor | None = None) -> None:  # type: ignore[override]
        """Update parameters. skip: a float32 scalar on their device, not read on the host; if it is 1, nothing changes."""
        self.adamw.step(skip)
        group, states = self.param_groups[0], [self.state_of(matrix) for matrix in self.matrices]
        steps = [state["step"] for state in states]
        skipped = torch.zeros_like(steps[0]) if skip is None else skip
        torch._foreach_add_(steps, 1 - skipped)
        rounds = torch.bfloat16 in (self.matrices[0].dtype, self.dtype)
        draws = self.adamw.draws(self.matrices, steps[0]) if rounds else []
        lr, momentum, stays = group["lr"], group["momentum"], skipped.bool()

        def store(tensor: Tensor, before: Tensor, after: Tensor, number: int, place: int) -> None:
            exact = torch.where(stays, before, after)
            if tensor.dtype == torch.bfloat16:
                rows, key = draws[number]
                exact = round_stochastically(exact, rows, key[place])
            tensor.copy_(exact)

        def part_of(number: int) -> Tensor:
            """Return this rank's part of the direction, and move the momentum on."""
            buffer, gradient = local(states[number]["momentum_buffer"]), local(self.matrices[number].grad).float()
            before = buffer.float()
            mean = before.lerp(gradient, 1 - momentum)
            direction = gradient.lerp(mean, momentum) if group["nesterov"] else mean
            store(buffer, before, mean, number, 1)
            return direction.to(self.owners.dtype)

        for number, update in self.owners.updates(part_of, functools.partial(orthogonalize, steps=group["ns_steps"])):
            matrix = self.matrices[number]
            own, scale = local(matrix.detach()), 0.2 * math.sqrt(max(matrix.shape))
            before = own.float()
            after = before.mul(1 - lr * group["weight_decay"]).add_(update, alpha=-lr * scale)
            store(own, before, after, number, 0)
