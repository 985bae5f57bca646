"""Work around two faults and a slow collective of gloo, for CPU tensors.

    replace_kernels()       # once, before any collective; for this process

torch (2.11 and 2.13) runs a functional all-gather on gloo as a *coalesced* one. A worker thread that ends an operation stores its
name without a lock. Names longer than 15 characters are on the heap, the coalesced all-gather's among them. Two workers that end
together free the same name: overlapping steps corrupt the heap within a minute. `all_gather_into_tensor_out` has a short name and
is otherwise the same. Coalesced collectives of graphs become one per tensor: gloo's coalesced all-gather has the long name, and
its coalesced reduce-scatter writes all results again at every wait for one of them.

For a reduce-scatter on gloo, torch sums the whole input on every rank, and keeps a part (ProcessGroupGloo.cpp). Here an
all-to-all brings each rank the parts that it sums, in the order of ranks: half as many bytes.
"""

import functools
from datetime import timedelta

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work, _register_work

_library = torch.library.Library("_c10d_functional", "IMPL")  # must outlive its registrations
_sums: set["_Sum"] = set()  # that nothing has waited for: torch's registry of works does not keep objects of Python


@functools.cache
def replace_kernels() -> None:
    """Replace the kernels of functional all-gathers and reduce-scatters of CPU tensors. Graphs do not change."""
    _library.impl("all_gather_into_tensor", _all_gather_into_tensor, "CPU")
    _library.impl("all_gather_into_tensor_coalesced", _all_gather_into_tensor_coalesced, "CPU")
    _library.impl("reduce_scatter_tensor", _reduce_scatter_tensor, "CPU")
    _library.impl("reduce_scatter_tensor_coalesced", _reduce_scatter_tensor_coalesced, "CPU")


def _all_gather_into_tensor(input: Tensor, group_size: int, group_name: str) -> Tensor:
    out = input.new_empty((input.shape[0] * group_size, *input.shape[1:]))
    return torch.ops._c10d_functional.all_gather_into_tensor_out(input, group_size, group_name, out=out)


def _all_gather_into_tensor_coalesced(inputs: list[Tensor], group_size: int, group_name: str) -> list[Tensor]:
    return [_all_gather_into_tensor(each, group_size, group_name) for each in inputs]


class _Sum(Work):
    """The work of a reduce-scatter: wait for the parts of all ranks, and sum them."""

    def __init__(self, parts: Tensor, ranks: int, out: Tensor):
        super().__init__()
        self.parts, self.ranks, self.out = parts, ranks, out

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self in _sums:
            _sums.remove(self)
            parts = torch.ops._c10d_functional.wait_tensor(self.parts)
            torch.sum(parts.view(self.ranks, *self.out.shape), 0, out=self.out)
        return True


def _reduce_scatter_tensor(input: Tensor, reduce_op: str, group_size: int, group_name: str) -> Tensor:
    if reduce_op != "sum":
        raise NotImplementedError(f'reduce_scatter_tensor on gloo: reduce_op = "{reduce_op}" is not there; use "sum"')
    rows = [input.shape[0] // group_size] * group_size
    parts = torch.ops._c10d_functional.all_to_all_single(input.contiguous(), rows, rows, group_name)
    work = _Sum(parts, group_size, input.new_empty(rows[0], *input.shape[1:]))
    _sums.add(work)
    _register_work(work.out, work)
    return work.out


def _reduce_scatter_tensor_coalesced(inputs: list[Tensor], reduce_op: str, group_size: int, group_name: str) -> list[Tensor]:
    return [_reduce_scatter_tensor(each, reduce_op, group_size, group_name) for each in inputs]
