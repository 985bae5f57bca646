"""Name the mesh axis of a collective from the ranks of its group.

axes = axes_of(mesh, layout.expert_parallel)
timeline = by_axis(timeline, axes)              # groups of collectives become "dp_shard", "tp"
AXIS_NAMES["tp"]                                # "tensor parallelism"
"""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group

from titan_lite.distributed.layout import AXES

if TYPE_CHECKING:  # an eager run has no timeline
    from titan_lite.cost.timeline import Span, Timeline

Axes = Mapping[tuple[int, ...], str]  # ranks of a group -> its axis
AXIS_NAMES = {  # for people
    "pp": "pipeline",
    "dp_replicate": "data-parallel replicas",
    "dp_shard": "FSDP",
    "cp": "context parallelism",
    "tp": "tensor parallelism",
    "ep": "expert parallelism",
}


def axes_of(mesh: DeviceMesh, expert_parallel: int) -> dict[tuple[int, ...], str]:
    """Return the axis of each of this rank's groups of parameters and of tokens.

    The groups that shard parameters over dp_shard and cp, and experts over tp too, are dp_shard.
    Expert parallelism may have the same ranks, so its collectives name their axis (named_axis in
    graph.py).
    """
    groups = {
        tuple(dist.get_process_group_ranks(mesh.get_group(axis))): axis
        for axis in AXES
        if mesh[axis].size() > 1
    }
    pp, dp_replicate, _, _, tp = mesh.get_coordinate()  # type: ignore[misc]
    of_copy = mesh.mesh[pp, dp_replicate]
    of_experts = of_copy.flatten()
    place = of_experts.tolist().index(mesh.get_rank())
    shards_of_experts = of_experts[place % expert_parallel :: expert_parallel]
    sharding = {
        tuple(ranks.flatten().tolist()): "dp_shard"
        for ranks in (of_copy[:, :, tp], shards_of_experts)
        if ranks.numel() > 1
    }
    return {**sharding, **groups}


def ranks_in(group: str) -> tuple[int, ...]:
    """Return the global ranks of the group with this name."""
    return tuple(dist.get_process_group_ranks(_resolve_process_group(group)))  # type: ignore[arg-type]


def axis_along(ranks: tuple[int, ...], axes: Axes, of_parameters: bool) -> str:
    """Return the axis of a collective, "" for a single rank.

    Parameters that are sharded over cp alone count as dp_shard.
    """
    axis = axes[ranks] if len(ranks) > 1 else ""
    return "dp_shard" if of_parameters and axis == "cp" else axis


def by_axis(timeline: "Timeline", axes: Axes) -> "Timeline":
    """Return the timeline with the groups of its collectives named by axis."""

    def with_axis(span: "Span") -> "Span":
        if not span.group:
            return span
        of_parameters = span.lane == "communication"
        axis = span.axis or axis_along(ranks_in(span.group), axes, of_parameters)
        return dataclasses.replace(span, group=axis)

    return dataclasses.replace(timeline, spans=tuple(map(with_axis, timeline.spans)))
