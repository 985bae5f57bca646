"""All-gathers on CPUs that may be in flight together.

    gather_without_coalescing()       # once, before any collective; all of this process's CPU tensors

torch (2.11 and 2.13) makes a functional all-gather on gloo a *coalesced* one. When a worker thread is done with an operation it
stores the operation's name, unlocked; names longer than 15 characters live on the heap, that of the coalesced all-gather does,
and two workers that finish at once free the same one: the heap is corrupt within a minute of overlapping steps. The all-gather
into a given tensor has a short name and is the same otherwise. The coalesced collectives of graphs are one for each tensor here:
gloo's all-gather has that name, and its reduce-scatter writes all results again at every wait for one of them.
"""

import functools

import torch
from torch import Tensor

_library = torch.library.Library("_c10d_functional", "IMPL")  # what it registers lives as long as it does


@functools.cache
def gather_without_coalescing() -> None:
    """Functional all-gathers of CPU tensors go by gloo's plain one from now on; what graphs say does not change."""
    _library.impl("all_gather_into_tensor", _all_gather_into_tensor, "CPU")
    _library.impl("all_gather_into_tensor_coalesced", _all_gather_into_tensor_coalesced, "CPU")
    _library.impl("reduce_scatter_tensor_coalesced", _reduce_scatter_tensor_coalesced, "CPU")


def _all_gather_into_tensor(input: Tensor, group_size: int, group_name: str) -> Tensor:
    out = input.new_empty((input.shape[0] * group_size, *input.shape[1:]))
    return torch.ops._c10d_functional.all_gather_into_tensor_out(input, group_size, group_name, out=out)


def _all_gather_into_tensor_coalesced(inputs: list[Tensor], group_size: int, group_name: str) -> list[Tensor]:
    return [_all_gather_into_tensor(each, group_size, group_name) for each in inputs]


def _reduce_scatter_tensor_coalesced(inputs: list[Tensor], reduce_op: str, group_size: int, group_name: str) -> list[Tensor]:
    return [torch.ops._c10d_functional.reduce_scatter_tensor(each, reduce_op, group_size, group_name) for each in inputs]
