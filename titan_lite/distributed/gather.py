"""How a sharded parameter becomes whole, and how a gradient of the whole becomes one of the shard.

    whole = plan.gather(shard)                                      # as nodes of a graph
    whole = plan.start_gather(shard).wait()                         # in eager mode
    rows = plan.finish_reduce(plan.start_reduce(gradient))          # the sum over ranks of this rank's rows; either mode

The collectives of SimpleFSDP (arXiv 2411.00284) are these and no others; simple_fsdp.py says when they run.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

collectives = torch.ops._c10d_functional
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13


class InFlight(NamedTuple):
    """A tensor that may be read once its communication is waited for."""

    tensor: Tensor
    work: dist.Work | None

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.tensor


@dataclass(frozen=True)
class GatherPlan:
    """How one parameter is gathered and its gradient reduced; plain values only, so that tracing sees constants.

    fqn: its name, the first one where weights are tied. rows: length of dimension 0 of the whole; own_rows: of this rank's
    shard, which begins at first_row. A shard has ceil(rows / shard_degree) rows, the last shards fewer or none: these are
    padded for the collectives. sum_groups: the groups whose ranks have the same shard, and gradients of it to add up.
    """

    fqn: str
    rows: int
    own_rows: int
    first_row: int
    shard_degree: int
    shard_group: str
    sum_groups: tuple[str, ...]
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype

    @property
    def chunk(self) -> int:
        """Rows of a padded shard."""
        return -(-self.rows // self.shard_degree)

    def gather(self, shard: Tensor) -> Tensor:
        """This rank's rows -> the whole in param_dtype, as nodes of a graph."""
        shard = shard.to(self.param_dtype)
        if self.shard_degree == 1:
            return shard
        whole = collectives.all_gather_into_tensor(_pad_rows(shard, self.chunk), self.shard_degree, self.shard_group)
        return collectives.wait_tensor(whole)[: self.rows]

    # Out of sight of dispatch modes: selective checkpointing counts operators, and this may be a gather ahead of its read.
    @_disable_current_modes()
    @torch.no_grad()
    def start_gather(self, shard: Tensor) -> InFlight:
        """The same in eager mode, on its way."""
        shard = shard.to(self.param_dtype)
        if self.shard_degree == 1:
            return InFlight(shard, None)
        # Not the functional collective: started ahead of its read on gloo, it corrupted the heap within a minute (torch 2.13).
        shard = _pad_rows(shard, self.chunk)
        whole = shard.new_empty(self.chunk * self.shard_degree, *shard.shape[1:])
        group = _resolve_process_group(self.shard_group)  # type: ignore[arg-type]
        return InFlight(whole[: self.rows], _all_gather(whole, shard, group=group, async_op=True))

    def start_reduce(self, gradient: Tensor) -> Tensor:
        """This rank's gradient of the whole -> the sum over dp_shard of its own rows in reduce_dtype, perhaps still in flight."""
        gradient = gradient.to(self.reduce_dtype)
        if self.shard_degree == 1:
            return gradient
        gradient = _pad_rows(gradient, self.chunk * self.shard_degree).contiguous()
        return collectives.reduce_scatter_tensor(gradient, "sum", self.shard_degree, self.shard_group)

    def finish_reduce(self, gradient: Tensor) -> Tensor:
        if self.shard_degree > 1:
            gradient = collectives.wait_tensor(gradient)[: self.own_rows]
        for group in self.sum_groups:  # after the reduce-scatter: only a shard travels between copies
            gradient = collectives.wait_tensor(collectives.all_reduce(gradient.contiguous(), "sum", group))
        return gradient


def _pad_rows(tensor: Tensor, rows: int) -> Tensor:
    missing = rows - tensor.shape[0]
    return torch.cat((tensor, tensor.new_zeros(missing, *tensor.shape[1:]))) if missing else tensor


def local(parameter: Tensor) -> Tensor:
    """This rank's rows; differentiable."""
    assert isinstance(parameter, DTensor)
    return parameter.to_local()
