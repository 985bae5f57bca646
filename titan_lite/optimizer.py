"""AdamW over sharded parameters, clipping by the global norm, and the optimizer's state by FQN.

optimizer = build_optimizer(config.optimizer, model.parameters())                          # fused: one kernel
optimizer = build_optimizer(config.optimizer, model.parameters(), compile=torch.compile)   # or what a compiler makes of it
norm = clip_grad_norm_(model.parameters(), max_norm=1.0)
optimizer_state(optimizer, dict(model.named_parameters()))       # {"layers.0.attention.wq.weight.exp_avg": DTensor, ...}
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_lite.config import Optimizer


def build_optimizer(
    config: Optimizer, parameters: Iterable[nn.Parameter], *, compile: Callable[[Callable], Callable] | None = None
) -> torch.optim.AdamW:
    """AdamW, fused: one kernel for all parameters; with `compile`, an update that this has compiled, of the same state.

    Norm weights do not decay.
    """
    by_decay: dict[float, list[nn.Parameter]] = {config.weight_decay: [], 0.0: []}
    for parameter in parameters:
        by_decay[config.weight_decay if parameter.dim() > 1 else 0.0].append(parameter)
    groups: list[dict] = [{"params": found, "weight_decay": decay} for decay, found in by_decay.items() if found]
    settings: dict[str, Any] = dict(lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)
    return torch.optim.AdamW(groups, **settings) if compile is None else _CompiledAdamW(compile, groups, **settings)


class _CompiledAdamW(torch.optim.AdamW):
    """AdamW as a graph over local shards, of kernels that the compiler makes, since torch does not trace its fused one (2.13).

    The state is the fused one's, made by torch.
    """

    def __init__(self, compile: Callable[[Callable], Callable], groups: list[dict], **settings: Any):
        super().__init__(groups, **settings)
        self.update = compile(_update)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lists: list[list[Tensor]] = [[], [], [], []]  # parameters, gradients, exp_avgs, exp_avg_sqs
            steps: list[Tensor] = []
            self._init_group(group, lists[0], lists[1], lists[2], lists[3], [], steps)
            if not steps:
                continue
            torch._foreach_add_(steps, 1)
            # Once for all parameters, in float64 as in the fused kernel; tensors, since a number would be part of the graph.
            step, lr, (beta1, beta2) = steps[0].double(), group["lr"], group["betas"]
            decay = torch.full_like(step, 1 - lr * group["weight_decay"])
            step_size = lr / (1 - beta1**step)
            correction = (1 - beta2**step).sqrt()
            shards = [[tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors] for tensors in lists]
            self.update(*shards, decay.float(), step_size.float(), correction.float(), beta1=beta1, beta2=beta2, eps=group["eps"])


def _update(
    parameters: list[Tensor],
    gradients: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    decay: Tensor,
    step_size: Tensor,
    correction: Tensor,
    *,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """One step of AdamW (arXiv 1711.05101, algorithm 2) in place; computed in float32, whatever the dtypes are."""
    lists = (parameters, gradients, exp_avgs, exp_avg_sqs)
    before, gradients, first, second = ([tensor.float() for tensor in tensors] for tensors in lists)
    means = torch._foreach_lerp(first, gradients, 1 - beta1)
    squares = torch._foreach_addcmul(torch._foreach_mul(second, beta2), gradients, gradients, 1 - beta2)
    denominators = torch._foreach_add(torch._foreach_div(torch._foreach_sqrt(squares), correction), eps)
    steps = torch._foreach_div(torch._foreach_mul(means, step_size), denominators)
    torch._foreach_copy_(parameters, torch._foreach_sub(torch._foreach_mul(before, decay), steps))
    torch._foreach_copy_(exp_avgs, means)
    torch._foreach_copy_(exp_avg_sqs, squares)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale all gradients down to the global L2 norm `max_norm`; returns the norm before, a scalar, the same on every rank.

    A gradient that k ranks hold alike counts 1/k on each, so one sum over all ranks is right on every layout, those of pipeline
    stages with other parameters included. A non-finite norm leaves the gradients non-finite: the caller decides.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    shards = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    # In float64: torch 2.13 sums float32 one after another on a CPU, and is off by 1e-4 for half a million numbers.
    norms = torch._foreach_norm(shards, dtype=torch.float64)
    square = torch.stack([norm.square() / _copies(gradient) for norm, gradient in zip(norms, gradients, strict=True)]).sum()
    if dist.is_initialized():
        dist.all_reduce(square)
    norm = square.sqrt().float()
    torch._foreach_mul_(shards, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def _copies(gradient: Tensor) -> int:
    """On how many ranks the same numbers are: all on its mesh that do not hold another shard of it."""
    if not isinstance(gradient, DTensor):
        return dist.get_world_size() if dist.is_initialized() else 1
    mesh, shards = gradient.device_mesh, 1
    for axis, placement in enumerate(gradient.placements):
        shards *= 1 if placement.is_replicate() else mesh.size(axis)  # a _StridedShard says it is no shard
    return mesh.size() // shards


def optimizer_state(optimizer: torch.optim.AdamW, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Everything AdamW remembers as {"FQN.exp_avg": ..., "FQN.exp_avg_sq": ..., "FQN.step": ...}, the live tensors.

    State that the first step would make is made here, so that a checkpoint can be loaded into it.
    """
    result = {}
    for fqn, parameter in parameters.items():
        state = optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state |= {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        result.update({f"{fqn}.{name}": value for name, value in state.items()})
    return result
