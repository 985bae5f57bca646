"""Run collectives over a process group, given by its name.

    total = all_reduce(x, "sum", group)             # the shape of x, on every rank
    parts = all_gather(x, degree, group)            # (degree n, ...) of (n, ...)
    own = reduce_scatter(parts, degree, group)      # (n, ...)

They wait for their results. Traced, a collective and its wait are two nodes of the graph, which
passes move apart; `collectives` has their operators. titan_lite/graph.py asks a graph about them.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import _are_we_tracing

collectives = torch.ops._c10d_functional
# renamed in torch 2.13
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Axis:
    """The ranks along a mesh axis; by default one rank alone. Plain values, so that tracing sees
    constants.
    """

    group: str = ""  # name of their process group
    degree: int = 1
    rank: int = 0  # this rank's, along the axis
    # of tensor parallelism: of each sequence, between blocks (`all_tokens_on_each_rank`)
    has_all_tokens: bool = False


ALONE = Axis()


def all_reduce(tensor: Tensor, operation: str, group: str) -> Tensor:
    """Return the tensors of all ranks, reduced. operation: "sum" or "max"."""
    return collectives.wait_tensor(collectives.all_reduce(tensor, operation, group))


def all_gather(tensor: Tensor, degree: int, group: str) -> Tensor:
    """Return the tensors of all ranks, concatenated in dimension 0. degree: ranks of the group."""
    return collectives.wait_tensor(collectives.all_gather_into_tensor(tensor, degree, group))


def reduce_scatter(tensor: Tensor, degree: int, group: str) -> Tensor:
    """Return this rank's part of the sum of all ranks' tensors, which is cut in dimension 0."""
    return collectives.wait_tensor(collectives.reduce_scatter_tensor(tensor, "sum", degree, group))


def tracing() -> bool:
    """Return True while this code is traced: of a model, of a function, or by make_fx."""
    return torch.compiler.is_compiling() or _are_we_tracing()
