"""A checksum of this rank's shard of a tensor, by which ranks compare replicas that are not sent.

checksum, is_finite = examine(tensor)
"""

import functools

import torch
from torch import Tensor

from titan_lite.dtensor import local

# Elements whose bits are summed at once: 8 bytes each fit a cache, or need few kernels
CHUNK = {"cpu": 2**16, "cuda": 2**22}
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


def examine(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return (checksum, int64; True if all elements are finite) of this rank's shard, as scalars on
    its mesh's device.

    With less than 2^31 elements of up to 32 bits, the checksum changes if one element changes or if
    two different elements are swapped. Element n is multiplied, modulo 2^64, by a weight whose
    lower half is 2n + 1. This is odd, so a difference below 2^32 does not vanish, nor does it after
    multiplication by the difference of two weights. The upper half spreads the weights, so that
    several changes do not cancel.
    """
    elements = local(tensor).detach().reshape(-1)
    device = elements.device
    checksum = torch.zeros((), dtype=torch.int64, device=device)
    is_finite = torch.ones((), dtype=torch.bool, device=device)
    weights = _weights(device)
    for index, chunk in enumerate(elements.split(len(weights))):
        bits = chunk.view(INTEGERS[chunk.itemsize])
        # the weights of this chunk are those of the first one, and this much more
        offset = 2 * len(weights) * index
        checksum += (bits * weights[: len(bits)]).sum() + offset * bits.sum()
        is_finite &= chunk.isfinite().all()
    return checksum, is_finite


@functools.cache
def _weights(device: torch.device) -> Tensor:
    """Return the factors of the checksum for the first chunk's elements, int64."""
    odd = torch.arange(1, 2 * CHUNK[device.type], 2, device=device)
    return odd + odd * odd * odd * 2**32
