"""Work around a fault of gloo's coalesced all-gather, for CPU tensors.

    gather_without_coalescing()       # once, before any collective; for this process

torch (2.11 and 2.13) runs a functional all-gather on gloo as a *coalesced* one. A worker thread
that ends an operation stores its name without a lock. Names longer than 15 characters are on the
heap, the coalesced all-gather's among them. Two workers that end together free the same name:
overlapping steps corrupt the heap within a minute. `all_gather_into_tensor_out` has a short name
and is otherwise the same.
"""

import functools

import torch
from torch import Tensor

_library = torch.library.Library("_c10d_functional", "IMPL")  # must outlive its registrations


@functools.cache
def gather_without_coalescing() -> None:
    """Replace the kernel of functional all-gathers of CPU tensors. Graphs do not change."""
    _library.impl("all_gather_into_tensor", _all_gather_into_tensor, "CPU")


def _all_gather_into_tensor(input: Tensor, group_size: int, group_name: str) -> Tensor:
    out = input.new_empty((input.shape[0] * group_size, *input.shape[1:]))
    return torch.ops._c10d_functional.all_gather_into_tensor_out(
        input, group_size, group_name, out=out
    )
