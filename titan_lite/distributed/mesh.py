"""Parallel degrees of a recipe -> one DeviceMesh, the only carrier of degrees afterwards.

    degrees = resolve_degrees(config.parallelism, world_size=8)     # degrees.py
    mesh = build_mesh(degrees, device_type="cuda")
    mesh["dp_shard"].size()                                        # 4

All axes always exist, size 1 included, outermost (slowest links) first; so nobody asks whether an axis is there.
"""

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titan_lite.distributed.degrees import AXES
from titan_lite.distributed.gloo import gather_without_coalescing

PARAMETER_AXES = ("dp_replicate", "dp_shard", "tp")


def build_mesh(degrees: dict[str, int], device_type: str) -> DeviceMesh:
    """The mesh of AXES; the process group must be up. device_type: "cuda" or "cpu"."""
    if device_type == "cpu":
        gather_without_coalescing()
    return init_device_mesh(device_type, tuple(degrees[axis] for axis in AXES), mesh_dim_names=AXES)


def parameter_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that this rank's parameters are placed on: PARAMETER_AXES, where dp_shard has the ranks of cp as well.

    Those see other tokens of the same sequences, so they hold other shards of the same parameters, and add up their gradients.
    Call it once: it may make process groups, which all ranks do together.
    """
    if mesh["cp"].size() == 1:
        return mesh[PARAMETER_AXES]
    ranks = mesh.mesh.flatten(AXES.index("dp_shard"), AXES.index("cp"))
    return DeviceMesh(mesh.device_type, ranks, mesh_dim_names=("pp", *PARAMETER_AXES))[PARAMETER_AXES]


def data_rank(mesh: DeviceMesh) -> tuple[int, int]:
    """(place of this rank among those that have different sequences, how many these are)."""
    replicate, shard = mesh["dp_replicate"], mesh["dp_shard"]
    return replicate.get_local_rank() * shard.size() + shard.get_local_rank(), replicate.size() * shard.size()


def sum_over_tokens(tensor: Tensor, mesh: DeviceMesh) -> None:
    """In place, over all ranks with different tokens; those that share theirs have the same tensor, and do not count twice."""
    _sum(tensor, mesh, ("dp_replicate", "dp_shard", "cp"))


def sum_of_losses(tensor: Tensor, mesh: DeviceMesh) -> None:
    """The same for what only the last pipeline stage has, and the others have zeros for."""
    _sum(tensor, mesh, ("pp", "dp_replicate", "dp_shard", "cp"))


def sum_of_flags(tensor: Tensor, mesh: DeviceMesh) -> None:
    """After `sum_of_losses` also over the ranks of tensor parallelism: what any rank has set is set on all."""
    _sum(tensor, mesh, ("tp",))


def _sum(tensor: Tensor, mesh: DeviceMesh, axes: tuple[str, ...]) -> None:
    for axis in axes:
        if mesh[axis].size() > 1:
            dist.all_reduce(tensor, group=mesh.get_group(axis))
