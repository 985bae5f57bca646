"""Make the DeviceMesh of a recipe's parallel degrees, and sum over its axes.

    degrees = resolve_degrees(config.parallelism, world_size=8)     # layout.py
    mesh = build_mesh(degrees, device_type="cuda")
    mesh["dp_shard"].size()                                        # 4

All axes always exist, also those of size 1. The first axis is the outermost, with the slowest
links.
"""

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titan_lite.collectives import Axis
from titan_lite.distributed.gloo import gather_without_coalescing
from titan_lite.distributed.layout import AXES

PARAMETER_AXES = ("dp_replicate", "dp_shard", "tp")
EXPERT_AXES = ("dp_replicate", "dp_shard", "ep")


def build_mesh(degrees: dict[str, int], device_type: str) -> DeviceMesh:
    """Return the mesh of AXES. Needs a process group. device_type: "cuda" or "cpu"."""
    if device_type == "cpu":
        gather_without_coalescing()
    return init_device_mesh(device_type, tuple(degrees[axis] for axis in AXES), mesh_dim_names=AXES)


def axis_of(mesh: DeviceMesh) -> Axis:
    """Return the Axis of a mesh with one axis."""
    return Axis(mesh.get_group().group_name, mesh.size(), mesh.get_local_rank())


def parameter_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that this rank's parameters are placed on: PARAMETER_AXES, with cp folded
    into dp_shard.

    Ranks of cp see other tokens of the same sequences, so parameters can be sharded and gradients
    summed over them as well. Call it once, on all ranks: it may create process groups.
    """
    if mesh["cp"].size() == 1:
        return mesh[PARAMETER_AXES]
    ranks = mesh.mesh.flatten(AXES.index("dp_shard"), AXES.index("cp"))
    folded = DeviceMesh(mesh.device_type, ranks, mesh_dim_names=("pp", *PARAMETER_AXES))
    return folded[PARAMETER_AXES]


def expert_mesh(mesh: DeviceMesh, of_parameters: DeviceMesh, degree: int) -> DeviceMesh:
    """Return the mesh that matrices of experts are placed on: EXPERT_AXES, or `of_parameters`, the
    result of `parameter_mesh`, if it has the same ranks.

    Tensor-parallel ranks have other tokens between blocks, so all ranks of a pipeline stage's
    replica share the experts: cp and tp are folded into dp_shard, of which `degree` neighbours are
    ep. The reduce-scatter over dp_shard is also the sum over tp, for which a norm needs an
    all-reduce. Call it once, on all ranks, as `parameter_mesh`.
    """
    if mesh["tp"].size() == degree == 1:
        return of_parameters
    ranks = mesh.mesh.flatten(AXES.index("dp_shard")).unflatten(-1, (-1, degree))
    folded = DeviceMesh(mesh.device_type, ranks, mesh_dim_names=("pp", *EXPERT_AXES))
    return folded[EXPERT_AXES]


def data_rank(mesh: DeviceMesh) -> tuple[int, int]:
    """Return (data-parallel rank, data-parallel degree).

    Ranks of dp_replicate and dp_shard have different sequences. The ranks of one data-parallel rank
    (pp, cp, tp) read the same ones, each with a loader of its own.
    """
    replicate = mesh["dp_replicate"]
    shard = mesh["dp_shard"]
    rank = replicate.get_local_rank() * shard.size() + shard.get_local_rank()
    return rank, replicate.size() * shard.size()


def sum_over_tokens(tensor: Tensor, mesh: DeviceMesh) -> None:
    """Sum in place over ranks with different tokens.

    Ranks that share tokens (tp, pp) must have the same tensor.
    """
    _sum(tensor, mesh, ("dp_replicate", "dp_shard", "cp"))


def sum_over_positions(tensor: Tensor, mesh: DeviceMesh) -> None:
    """Sum in place over ranks with different tokens between blocks: as `sum_over_tokens`, and over
    tp, whose ranks share the tokens of a sequence there.
    """
    _sum(tensor, mesh, ("dp_replicate", "dp_shard", "cp", "tp"))


def sum_of_losses(tensor: Tensor, mesh: DeviceMesh) -> None:
    """Sum in place as `sum_over_tokens`, and over pp.

    The tensor is zero on ranks without the last pipeline stage.
    """
    _sum(tensor, mesh, ("pp", "dp_replicate", "dp_shard", "cp"))


def sum_of_flags(tensor: Tensor, mesh: DeviceMesh) -> None:
    """Sum in place over tp, after `sum_of_losses`.

    The result is then nonzero on all ranks if it was on any.
    """
    _sum(tensor, mesh, ("tp",))


def _sum(tensor: Tensor, mesh: DeviceMesh, axes: tuple[str, ...]) -> None:
    for axis in axes:
        if mesh[axis].size() > 1:
            dist.all_reduce(tensor, group=mesh.get_group(axis))
