"""Tensors in the memory of the host of a device, from and to which the device copies while it computes."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def zeros_on_host(like: Tensor, dtype: torch.dtype, pinned: bool) -> Tensor:
    """Return zeros in host memory with the shape of this rank's part of `like`; a DTensor of its placements if it is one."""
    if not isinstance(like, DTensor):
        return torch.zeros(like.shape, dtype=dtype, pin_memory=pinned)
    spec = like._spec
    assert spec.tensor_meta is not None
    # Not DTensor.from_local, which would move it to the mesh's device.
    spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=dtype))
    return DTensor(
        torch.zeros(like.to_local().shape, dtype=dtype, pin_memory=pinned),
        spec,
        requires_grad=False,
    )


def device_of(tensor: Tensor) -> torch.device:
    """Return the device that a tensor is computed with: that of its mesh, also if the tensor is in host memory."""
    return (
        torch.device(tensor.device_mesh.device_type)
        if isinstance(tensor, DTensor)
        else tensor.device
    )
