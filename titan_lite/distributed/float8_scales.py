"""Scales of a stage's weights for tensorwise float8 products (models/float8.py).

    scales = Float8Scales(["layers.0.attention.wq.weight"])
    scales.allocate(device)
    scales.refresh(parameters)          # after each optimizer step, and after loading
    scales.get("layers.0.attention.wq.weight")

Each scale is that of the full weight, on every rank. They are one tensor, an input of graphs that
is changed in place. They are not saved, as they follow from the weights.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_lite.dtensor import local
from titan_lite.models.float8 import scale_of


class Float8Scales:
    """The scales of the weights `fqns`; 1 before the first `refresh`."""

    def __init__(self, fqns: Sequence[str]):
        self.indices = {fqn: index for index, fqn in enumerate(fqns)}  # in `values`
        self.values = torch.ones(len(fqns))  # float32

    def allocate(self, device: torch.device) -> None:
        self.values = torch.ones(len(self.indices), device=device)

    def get(self, fqn: str) -> Tensor | None:
        """Return the scale of a weight, a view of `values`; None for other parameters."""
        return self.values[self.indices[fqn]] if fqn in self.indices else None

    @torch.no_grad()
    def refresh(self, parameters: Mapping[str, Tensor]) -> None:
        """Set the scales from shards: one all-reduce over each axis that shards parameters.

        It reduces the largest magnitudes of all weights. parameters: DTensors by FQN, at least
        those with a scale. Call it on all ranks of a stage.
        """
        if not self.indices:
            return
        amaxes = [self._amax(parameters[fqn]) for fqn in self.indices]
        largest = torch.stack(amaxes).float()
        first = parameters[next(iter(self.indices))]
        assert isinstance(first, DTensor)
        mesh = first.device_mesh
        for axis in ("dp_shard", "tp"):
            if mesh[axis].size() > 1:
                dist.all_reduce(largest, dist.ReduceOp.MAX, mesh.get_group(axis))
        self.values.copy_(scale_of(largest))

    def _amax(self, parameter: Tensor) -> Tensor:
        """Return the largest magnitude in this rank's shard, which may be empty or on the host."""
        shard = local(parameter).to(self.values.device, non_blocking=True)
        return shard.abs().amax() if shard.numel() else shard.new_zeros(())
