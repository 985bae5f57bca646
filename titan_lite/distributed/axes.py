"""Name the mesh axis of a collective from the ranks of its group.

timeline = by_axis(timeline, axes_of(mesh))     # groups of collectives become "dp_shard", "tp"
AXIS_NAMES["tp"]                                # "tensor parallelism"
"""

import dataclasses
from collections.abc import Mapping

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group

from titan_lite.cost.timeline import Span, Timeline
from titan_lite.distributed.layout import AXES

Axes = Mapping[tuple[int, ...], str]  # ranks of a group -> its axis
AXIS_NAMES = {  # for people
    "pp": "pipeline",
    "dp_replicate": "data-parallel copies",
    "dp_shard": "FSDP",
    "cp": "context parallelism",
    "tp": "tensor parallelism",
}


def axes_of(mesh: DeviceMesh) -> dict[tuple[int, ...], str]:
    """Return the axis of each of this rank's groups.

    The groups that shard parameters over dp_shard and cp, and experts over tp too, are dp_shard.
    """
    groups = {
        tuple(dist.get_process_group_ranks(mesh.get_group(axis))): axis
        for axis in AXES
        if mesh[axis].size() > 1
    }
    pp, dp_replicate, _, _, tp = mesh.get_coordinate()  # type: ignore[misc]
    of_copy = mesh.mesh[pp, dp_replicate]
    sharding = {
        tuple(ranks.flatten().tolist()): "dp_shard"
        for ranks in (of_copy[:, :, tp], of_copy)
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


def by_axis(timeline: Timeline, axes: Axes) -> Timeline:
    """Return the timeline with the groups of its collectives named by axis."""

    def with_axis(span: Span) -> Span:
        if not span.group:
            return span
        of_parameters = span.lane == "communication"
        axis = axis_along(ranks_in(span.group), axes, of_parameters)
        return dataclasses.replace(span, group=axis)

    return dataclasses.replace(timeline, spans=tuple(map(with_axis, timeline.spans)))
