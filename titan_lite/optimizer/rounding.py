"""Stochastic rounding of float32 to bfloat16, with random bits that do not depend on the layout.

    rows = row_numbers(parameter)                            # (rows,): the number of each own row's first element in the whole
    keys = at_step(keys_of(seed, ["wq.weight"]), step)       # (1, 3, 2): two words for each tensor of TENSORS
    stored = round_stochastically(exact, rows, keys[0, 1])

A number between two neighbours in bfloat16 becomes the upper one with the probability that leaves its mean unchanged. Rounded to
the nearest, a parameter loses every update below 1/512 of it (arXiv 2010.06192), and a slow moment stands still.

The bits are a hash of (seed, step, FQN, tensor, number of the element in the unsharded parameter). So ranks with copies round
alike, every layout rounds alike, and a resumed run needs no state of a generator. The hash is 32-bit integer arithmetic, which
has the same result on every device.
"""

import hashlib
import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

TENSORS = ("parameter", "exp_avg", "exp_avg_sq")  # that are rounded, each with bits of its own
PIECE = {
    "cpu": 2**16,
    "cuda": 2**22,
}  # elements that are updated at once, if the update is neither fused nor compiled
LOW = 0xFFFF  # the bits of a float32 that bfloat16 does not have


def _fold(word: Tensor, shift: int) -> Tensor:
    """Return word ^ (word >> shift), the shift being logical."""
    return (word >> shift).bitwise_and_(2 ** (32 - shift) - 1).bitwise_xor_(word)


def _mix(word: Tensor) -> Tensor:
    """Hash int32 words one to one: xor-shift and multiply, modulo 2^32, with constants of low bias (skeeto/hash-prospector)."""
    word = _fold(word, 16).mul_(0x21F0AAAD)
    word = _fold(word, 15).mul_(0x735A2D97)
    return _fold(word, 15)


def keys_of(seed: int, fqns: Iterable[str]) -> Tensor:
    """Return the keys of these parameters, int32 of shape (parameters, TENSORS, 2)."""
    digests = [
        [hashlib.sha256(f"{seed} {fqn} {name}".encode()).digest() for name in TENSORS]
        for fqn in fqns
    ]
    words = [
        [[int.from_bytes(each[at : at + 4], "big", signed=True) for at in (0, 4)] for each in row]
        for row in digests
    ]
    return torch.tensor(words, dtype=torch.int32)


def at_step(keys: Tensor, step: Tensor) -> Tensor:
    """Return the keys for one step, a scalar on their device."""
    return _mix(keys ^ _mix(step.int()))


def row_numbers(parameter: Tensor) -> Tensor:
    """Return the number of the first element of each of this rank's rows in the unsharded parameter, modulo 2^32, int32."""
    start, rows = [0] * parameter.dim(), parameter.shape[0]
    if isinstance(parameter, DTensor):
        rows = parameter.to_local().shape[0]
        offsets = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )[1]
        start = [int(offset) for offset in offsets]
    first = (start[0] + torch.arange(rows)) * math.prod(parameter.shape[1:]) + sum(start[1:])
    return first.int().to(parameter.device)


def round_stochastically(exact: Tensor, rows: Tensor, key: Tensor) -> Tensor:
    """Return float32 values that bfloat16 has exactly. exact: (rows,) or (rows, columns), float32; key: two words."""
    numbers = rows
    if exact.dim() > 1:
        numbers = rows[:, None] + torch.arange(
            exact.shape[1], dtype=torch.int32, device=exact.device
        )
    random = _mix(_mix(numbers ^ key[0]).add_(key[1])).bitwise_and_(LOW)
    rounded = random.add_(exact.view(torch.int32)).bitwise_and_(~LOW).view(torch.float32)
    return torch.where(exact.isfinite(), rounded, exact)
