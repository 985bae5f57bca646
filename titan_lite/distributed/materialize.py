"""Allocate a rank's shards of a model that was built on the meta device."""

from typing import Any

import torch
from torch import nn

from titan_lite.distributed.prefetch import Eager
from titan_lite.distributed.simple_fsdp import as_shard_of, model_of
from titan_lite.dtensor import local


def materialize(root: nn.Module, device: torch.device) -> None:
    """Allocate shards and buffers, uninitialised. Tied weights stay tied, unlike in `to_empty`."""
    model = model_of(root)
    filled: dict[Any, nn.Parameter] = {}
    for meta in model.plans:
        shard = as_shard_of(meta, torch.empty_like(local(meta), device=device))
        filled[meta] = nn.Parameter(shard, requires_grad=meta.requires_grad)
    model.plans = {filled[meta]: plan for meta, plan in model.plans.items()}
    model.eager = Eager(model.plans, model.scales)
    model.scales.allocate(device)
    for module in root.modules():
        for name, parameter in module._parameters.items():
            module._parameters[name] = filled.get(parameter)
        for name, buffer in module._buffers.items():
            module._buffers[name] = (
                None if buffer is None else torch.empty_like(buffer, device=device)
            )
