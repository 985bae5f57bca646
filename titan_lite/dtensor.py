"""This rank's part of a DTensor; sharding.py says which part that is."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, differentiably; of a plain tensor, all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
