"""This rank's part of a DTensor; sharding.py says which part that is."""

import copy

from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, differentiably; of a plain tensor, all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gradient_shard(parameter: Tensor) -> Tensor:
    """Return this rank's shard of the gradient of a parameter, to be read or changed in place.

    It waits for a gradient that is still being reduced (distributed/gradient_reducer.py).
    """
    assert parameter.grad is not None
    shard = local(parameter.grad)
    return shard.wait() if isinstance(shard, AsyncCollectiveTensor) else shard


def as_shard_of(parameter: Tensor, shard: Tensor) -> DTensor:
    """Return `shard`, this rank's part, as a DTensor with the placements of `parameter`.

    DTensor.from_local takes five times as long.
    """
    assert isinstance(parameter, DTensor)
    return DTensor(shard, copy.copy(parameter._spec), requires_grad=False)


def shard_of(parameter: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return this rank's shard, a view of the parameter, and its offset in the full parameter.

    Call it under no_grad.
    """
    assert isinstance(parameter, DTensor)
    _, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return local(parameter), tuple(int(start) for start in offset)
