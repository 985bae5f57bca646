"""A graph, and a rank's parameters, as numbers that add up over graphs and lie on a line over blocks.

figures_of(graph, machine, fused=True, axes=axes_of(mesh))       # {"compute": 0.41, "exposed.tp": 0.08, "bytes.tp": 2.1e9, ...}
bytes_of(graph, fused=True)                                      # {"saved": ..., "peak.start": ..., "peak.end": ...}
held_figures(...), round_figures(...)                            # of parameters, and of their collectives once a step
"""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.fx import Graph

from titan_lite.compiler.collectives import KINDS, collective_bytes, kind_of, parameter_collectives, ranks_of
from titan_lite.compiler.fqns import block_of
from titan_lite.compiler.hardware import Machine, flops_of
from titan_lite.compiler.timeline import Span, Timeline, alive_bytes, saved_bytes, saved_input_bytes, simulate
from titan_lite.distributed.gather import GatherPlan
from titan_lite.distributed.mesh import AXES

Figures = dict[str, float]
Axes = Mapping[tuple[int, ...], str]  # the axis that a group is along, by its ranks


def axes_of(mesh: DeviceMesh) -> dict[tuple[int, ...], str]:
    """The axis that each of rank 0's groups is along, by its ranks; where parameters are sharded over cp as well: dp_shard."""
    ranks = {axis: tuple(dist.get_process_group_ranks(mesh.get_group(axis))) for axis in AXES if mesh[axis].size() > 1}
    if "cp" in ranks:
        shard = AXES.index("dp_shard")
        index: list[Any] = [0] * len(AXES)
        index[shard] = index[shard + 1] = slice(None)
        return {tuple(mesh.mesh[tuple(index)].flatten().tolist()): "dp_shard", **{group: axis for axis, group in ranks.items()}}
    return {group: axis for axis, group in ranks.items()}


def figures_of(graph: Graph, machine: Machine, fused: bool, axes: Axes) -> Figures:
    """A graph in numbers that add up over graphs and lie on a line over blocks.

    compute                      seconds of all but collectives
    communication.A, exposed.A   seconds of the collectives along axis A; of these, in which nothing computes
    bytes.A, across.A            bytes that a rank sends along A, in a ring; of these, to another node, on average over its ranks
    matmul, attention            floating-point operations
    """
    result: Figures = defaultdict(float)
    exposed = dict(zip(parameter_collectives(graph), simulate(graph, machine, fused=fused).collectives(), strict=True))
    for node in graph.nodes:
        seconds = machine.cost(node, fused)
        if node.target in KINDS:
            ranks = tuple(ranks_of(node))
            if len(ranks) > 1:
                # Those of tensor and context parallelism are waited for at once; parameters may be sharded over cp alone.
                held_up = exposed[node].exposed if node in exposed else seconds
                axis = "dp_shard" if node in exposed and axes[ranks] == "cp" else axes[ranks]
                _add_collective(result, axis, kind_of(node), collective_bytes(node), ranks, machine, seconds, held_up)
            continue
        result["compute"] += seconds
        matmul, attention = flops_of(node)
        result["matmul"] += matmul
        result["attention"] += attention
    return dict(result)


def bytes_of(graph: Graph, fused: bool, blocks: int, keeps_inputs: bool = False) -> Figures:
    """More such numbers, of a graph of so many blocks: bytes.

    saved, inputs            what a forward graph keeps for backward, and of what it is given
    peak.start, peak.end     most at once until the second block's attention, and from that of the last but one

    What is alive rises or falls evenly from block to block, so the peak is in the first or the last; each of the two lies on a
    line over blocks, and the larger of two lines does not. keeps_inputs: as in alive_bytes.
    """
    alive = alive_bytes(graph, fused=fused, keeps_inputs=keeps_inputs)[1:]
    attention = [(place, "backward" in str(node.target)) for place, node in enumerate(graph.nodes) if flops_of(node)[1]]
    is_backward = any(backward for _, backward in attention)  # and then forward's are recomputed
    places = [place for place, backward in attention if backward == is_backward]
    first, last = len(alive), 0
    if blocks > 1:
        of_two = 2 * (len(places) // blocks)  # context parallelism has two a block
        first, last = places[of_two - 1] + 1, places[-of_two]
    saved = {"saved": saved_bytes(graph), "inputs": saved_input_bytes(graph)}
    return {**saved, "peak.start": max(alive[:first]), "peak.end": max(alive[last:])}


def by_axis(timeline: Timeline | None, name: str, axes: Axes) -> Timeline:
    """As it is, under that name and with its collectives' groups named by axis."""
    assert timeline is not None
    spans = [dataclasses.replace(span, group=axis_of_group(span, axes)) if span.group else span for span in timeline.spans]
    return dataclasses.replace(timeline, graph=name, spans=tuple(spans))


def axis_of_group(span: Span, axes: Axes) -> str:
    ranks = tuple(dist.get_process_group_ranks(_resolve_process_group(span.group)))  # type: ignore[arg-type]
    axis = axes.get(ranks, "")  # none for a group of one
    return "dp_shard" if span.lane == "communication" and axis == "cp" else axis


def _add_collective(
    result: Figures, axis: str, kind: str, nbytes: float, ranks: Sequence[int], machine: Machine, seconds: float, exposed: float
) -> None:
    nodes = len({rank // machine.ranks_per_node for rank in ranks})
    sent = (2 if kind == "all_reduce" else 1) * nbytes * (len(ranks) - 1) / len(ranks)
    result[f"communication.{axis}"] += seconds
    result[f"exposed.{axis}"] += exposed
    result[f"bytes.{axis}"] += sent
    result[f"across.{axis}"] += sent * nodes / len(ranks) if nodes > 1 else 0.0  # of a ring, one hop a node


def held_figures(plans: Sequence[tuple[GatherPlan, int]], buffers: Sequence[int]) -> Figures:
    """held: numbers in a rank's shards; whole: in its weights when all are gathered; tensors: of parameters; buffers: bytes."""
    return {
        "held": float(sum(held for _, held in plans)),
        "whole": float(sum(_numbers(plan) for plan, _ in plans)),
        "tensors": float(len(plans)),
        "buffers": float(sum(buffers)),
    }


def _numbers(plan: GatherPlan) -> int:
    return plan.rows * torch.Size(plan.row_shape).numel()


def _padded(plan: GatherPlan) -> int:
    """Numbers that its collectives have."""
    return plan.chunk * plan.shard_degree * torch.Size(plan.row_shape).numel()


def round_figures(plans: Sequence[GatherPlan], machine: Machine, axes: Axes) -> Figures:
    """Of the one round of collectives of `gathered_for_step`, by its buckets, as `gather.` and `reduce.` figures.

    Two buckets are under way at once, so what one copies travels beside the other: the longer of both counts.
    """
    found: dict[str, Figures] = {"gather": defaultdict(float), "reduce": defaultdict(float)}

    def communicate(what: str, kind: str, nbytes: float, group: str) -> None:
        ranks = tuple(dist.get_process_group_ranks(_resolve_process_group(group)))  # type: ignore[arg-type]
        seconds = machine.collective(kind, nbytes, ranks)
        axis = "dp_shard" if axes[ranks] == "cp" else axes[ranks]
        _add_collective(found[what], axis, kind, nbytes, ranks, machine, seconds, seconds)

    gathered: dict[Any, list[GatherPlan]] = defaultdict(list)
    reduced: dict[Any, list[GatherPlan]] = defaultdict(list)
    for plan in plans:
        gathered[block_of(plan.fqn), plan.shard_group, plan.param_dtype].append(plan)
        reduced[block_of(plan.fqn), plan.shard_group, plan.sum_groups, plan.reduce_dtype].append(plan)
    copied = {"gather": 0.0, "reduce": 0.0}
    for members in gathered.values():
        first, nbytes = members[0], sum(map(_padded, members)) * members[0].param_dtype.itemsize
        if first.shard_degree > 1:
            communicate("gather", "all_gather", nbytes, first.shard_group)
        copied["gather"] += 2 * nbytes  # out of the bucket
    for members in reduced.values():
        first, nbytes = members[0], sum(map(_padded, members)) * members[0].reduce_dtype.itemsize
        if first.shard_degree > 1:
            communicate("reduce", "reduce_scatter", nbytes, first.shard_group)
        for group in first.sum_groups:
            communicate("reduce", "all_reduce", nbytes / first.shard_degree, group)
        copied["reduce"] += 2 * nbytes  # into the bucket
    for what, figures in found.items():
        travels = sum(value for key, value in figures.items() if key.startswith("exposed."))
        figures["compute"] = max(0.0, machine.memory_traffic(copied[what]) - travels)
    return {f"{what}.{key}": value for what, figures in found.items() for key, value in figures.items()}
