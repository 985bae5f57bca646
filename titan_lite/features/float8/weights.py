"""Weights of tensorwise float8 matmuls, with the scales of their casts.

    apply_scaled_weights(model, all_gather=True)        # in place, before the model is sharded
    module.weight                                       # a Scaled (linear.py)

Each scale is that of the full weight, on every rank. Those of a stage are one tensor. They are not
saved, as they follow from the weights.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_lite.distributed.param_collectives import Transport
from titan_lite.dtensor import local
from titan_lite.features.float8.linear import Float8Linear, Scaled, scale_of, to_bytes


class ScaledWeights(Transport):
    """The Transport of the weights `fqns` of a stage: a module reads a Scaled.

    all_gather: they travel in float8. A scale is 1 before parameters have changed.
    """

    def __init__(self, fqns: Sequence[str], *, all_gather: bool):
        self.dtype = torch.uint8 if all_gather else None
        self.indices = {fqn: index for index, fqn in enumerate(fqns)}  # in `values`
        self.values = torch.ones(len(fqns))  # float32

    def allocate(self, device: torch.device) -> None:
        self.values = torch.ones(len(self.indices), device=device)

    @torch.no_grad()
    def parameters_have_changed(self, parameters: Mapping[str, Tensor]) -> None:
        """Set the scales from shards: one all-reduce over each axis that shards parameters.

        It reduces the largest magnitudes of all weights.
        """
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

    def scales(self, fqn: str) -> tuple[Tensor, ...]:
        """Return the scale of a weight, a view of `values`."""
        return (self.values[self.indices[fqn]],)

    def send(self, shard: Tensor, dtype: torch.dtype, *scales: Tensor) -> Tensor:
        (scale,) = scales
        return to_bytes(shard, scale) if self.dtype else shard.to(dtype)

    def receive(self, weight: Tensor, stand_in: Tensor | None, *scales: Tensor) -> Scaled:
        (scale,) = scales
        return Scaled(weight, scale, stand_in)


def apply_scaled_weights(model: nn.Module, *, all_gather: bool) -> None:
    """Give the float8 layers of `model` the Transport of their weights, in place."""
    layers = {
        fqn: module for fqn, module in model.named_modules() if isinstance(module, Float8Linear)
    }
    transport = ScaledWeights([f"{fqn}.weight" for fqn in layers], all_gather=all_gather)
    for module in layers.values():
        module.transport = transport
