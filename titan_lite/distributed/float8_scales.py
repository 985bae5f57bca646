"""Scales of a stage's weights for tensorwise float8 products (models/float8.py): of the whole
weight, on every rank.

    scales = Scales()
    scales.add("layers.0.attention.wq.weight")
    scales.allocate(device)
    scales.refresh(parameters)          # after each optimizer step, and after loading
    scales.of("layers.0.attention.wq.weight")

They are one tensor, an input of graphs that is changed in place. They are not saved, as they follow
from the weights.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_lite.dtensor import local
from titan_lite.models.float8 import scale_of


class Scales:
    def __init__(self) -> None:
        self.places: dict[str, int] = {}  # of FQNs in `values`
        self.values = torch.ones(0)  # float32

    def add(self, fqn: str) -> None:
        self.places[fqn] = len(self.places)

    def allocate(self, device: torch.device) -> None:
        self.values = torch.ones(len(self.places), device=device)

    def of(self, fqn: str) -> Tensor | None:
        """Return the scale of a weight, a view of `values`; None for other parameters."""
        return self.values[self.places[fqn]] if fqn in self.places else None

    @torch.no_grad()
    def refresh(self, parameters: Mapping[str, Tensor]) -> None:
        """Set the scales from shards: one all-reduce of all largest magnitudes over each axis that
        shards parameters.

        parameters: DTensors by FQN, at least those with a scale. Call it on all ranks of a stage.
        """
        if not self.places:
            return
        sharded = [parameters[fqn] for fqn in self.places]
        # One by one, as they may be in host memory.
        shards = (
            local(parameter).to(self.values.device, non_blocking=True) for parameter in sharded
        )
        largest = torch.stack(
            [shard.abs().amax() if shard.numel() else shard.new_zeros(()) for shard in shards]
        ).float()
        assert isinstance(sharded[0], DTensor)
        mesh = sharded[0].device_mesh
        for axis in ("dp_shard", "tp"):
            if mesh[axis].size() > 1:
                dist.all_reduce(largest, dist.ReduceOp.MAX, mesh.get_group(axis))
        self.values.copy_(scale_of(largest))
