"""Find the part of a sharded tensor that a rank holds."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part, differentiably; of a plain tensor, all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
