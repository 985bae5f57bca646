"""All-gathers on CPUs that may be in flight together.

    gather_without_coalescing()       # once, before any collective; all of this process's CPU tensors

torch (2.11 and 2.13) makes a functional all-gather on gloo a *coalesced* one. When a worker thread is done with an operation it
stores the operation's name, unlocked; names longer than 15 characters live on the heap, that of the coalesced all-gather does,
and two workers that finish at once free the same one: the heap is corrupt within a minute of overlapping steps. The all-gather
into a given tensor has a short name and is the same otherwise.
"""

import functools

import torch
from torch import Tensor

_library = torch.library.Library("_c10d_functional", "IMPL")  # what it registers lives as long as it does


@functools.cache
def gather_without_coalescing() -> None:
    """Functional all-gathers of CPU tensors go by gloo's plain one from now on; what graphs say does not change."""
    _library.impl("all_gather_into_tensor", _all_gather_into_tensor, "CPU")


def _all_gather_into_tensor(input: Tensor, group_size: int, group_name: str) -> Tensor:
    out = input.new_empty((input.shape[0] * group_size, *input.shape[1:]))
    return torch.ops._c10d_functional.all_gather_into_tensor_out(input, group_size, group_name, out=out)
