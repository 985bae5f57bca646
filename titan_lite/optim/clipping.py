"""Clip gradients by their global norm.

norm = clip_grad_norm_(model.parameters(), max_norm=1.0)
"""

import functools
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_lite.dtensor import local


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Clip gradients to a global L2 norm of `max_norm`; return the norm before, a scalar that is
    equal on all ranks.

    A gradient that k ranks have copies of counts 1/k on each, so that one sum over all ranks is
    correct on every layout, also with pipeline stages. After a non-finite norm gradients are not
    finite: the caller must handle it.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    shards = [local(gradient) for gradient in gradients]
    # In float64: on a CPU, torch 2.13 sums float32 sequentially, with an error of 1e-4 for half a
    # million elements.
    norms = torch._foreach_norm(shards, dtype=torch.float64)
    copies = _on_device(tuple(_ranks_with(gradient) for gradient in gradients), norms[0].device)
    square = (torch.stack(norms).square() / copies).sum()
    if dist.is_initialized():
        dist.all_reduce(square)
    norm = square.sqrt().float()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(shards, factor)
    return norm


@functools.cache
def _on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Return `numbers` as a tensor.

    Cached, because a copy to a GPU waits for the work queued there.
    """
    return torch.tensor(numbers, dtype=torch.float64, device=device)


def _ranks_with(gradient: Tensor) -> int:
    """Return the number of ranks that have the same elements: the size of the mesh divided by the
    number of shards.
    """
    if not isinstance(gradient, DTensor):
        return dist.get_world_size() if dist.is_initialized() else 1
    mesh = gradient.device_mesh
    shards = 1
    for axis, placement in enumerate(gradient.placements):
        if not placement.is_replicate():  # is_shard() is False for _StridedShard
            shards *= mesh.size(axis)
    return mesh.size() // shards
