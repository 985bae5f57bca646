"""Compute the costs of a graph, and of a rank's parameters, as figures that are additive over
graphs and linear in blocks.

figures_of(graph, machine, fused=True, axes=axes_of(mesh))       # {"compute": 0.41, "exposed.tp": 0.08, "bytes.tp": 2.1e9, ...}
round_figures(plans, machine, axes, under={})                    # the parameters' collectives once per step
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch.fx import Graph

from titan_lite.config import Parallelism
from titan_lite.cost.collectives import (
    KINDS,
    collective_bytes,
    kind_of,
    parameters_of,
    ranks_of,
)
from titan_lite.cost.machine import Machine
from titan_lite.cost.op_cost import flops_of
from titan_lite.cost.timeline import simulate
from titan_lite.distributed.axes import Axes, axis_along, ranks_in
from titan_lite.distributed.buckets import Plans, gather_buckets, reduce_buckets
from titan_lite.distributed.powersgd import SHARD_PASSES, factor_sizes
from titan_lite.models.fqns import block_of, last_block

Figures = dict[str, float]


def figures_of(graph: Graph, machine: Machine, fused: bool, axes: Axes) -> Figures:
    """Return the figures of a graph.

    compute                      seconds of all operators except collectives, slower beside those of parameters
    exposed.host                 seconds in which the device waits for the host
    communication.A, exposed.A   seconds of the collectives along axis A; the part of them in which nothing computes; all of them
                                 on a CPU, whose cores the transport takes
    bytes.A, across.A            bytes that a rank sends along A; the part to another node, averaged over its ranks
    matmul, attention            floating-point operations
    """
    result: Figures = defaultdict(float)
    timeline = simulate(graph, machine, fused=fused)
    spans = iter([span for span in timeline.spans if span.group])
    for span in timeline.spans:
        if span.lane == "compute" and not span.group:
            result["compute"] += span.seconds
    if timeline.idle:
        result["exposed.host"] = timeline.idle
    for node in graph.nodes:
        if node.target not in KINDS:
            matmul, attention = flops_of(node)
            result["matmul"] += matmul
            result["attention"] += attention
            continue
        span, ranks = next(spans), tuple(ranks_of(node))
        if len(ranks) > 1:
            exposed = span.seconds if machine.is_cpu else span.exposed
            axis = axis_along(ranks, axes, bool(parameters_of(node)))
            _add_collective(
                result,
                axis,
                kind_of(node),
                collective_bytes(node),
                ranks,
                machine,
                exposed,
            )
    return dict(result)


def _add_collective(
    result: Figures,
    axis: str,
    kind: str,
    nbytes: float,
    ranks: Sequence[int],
    machine: Machine,
    exposed: float | None = None,
) -> None:
    """Add the figures of a collective. exposed: seconds; None for a collective without overlap."""
    seconds = machine.collective(kind, nbytes, ranks)
    nodes = len({rank // machine.ranks_per_node for rank in ranks})
    sent = (2 if kind == "all_reduce" else 1) * nbytes * (len(ranks) - 1) / len(ranks)
    result[f"communication.{axis}"] += seconds
    result[f"exposed.{axis}"] += seconds if exposed is None else exposed
    result[f"bytes.{axis}"] += sent
    result[f"across.{axis}"] += sent * nodes / len(ranks) if nodes > 1 else 0.0  # a hop per node


def round_figures(
    plans: Plans, machine: Machine, axes: Axes, under: Mapping[str, float]
) -> Figures:
    """Return `gather.` and `reduce.` figures for the collectives of `gathered_for_step`, by bucket.

    under: the seconds of `forward` and `backward` that they overlap with: the collectives of a
    block with the computation of the block before it, a share by its parameters, which is slower
    meanwhile. Else empty: two buckets are in flight at once, so the copies of one overlap the
    communication of the other: the longer of both counts.
    """
    result: Figures = {}
    last, shares = last_block(plan.fqn for plan in plans.values()), shares_of_blocks(plans)
    before = dict(zip(shares, [0.0, *shares.values()], strict=False))
    slowed = 1 - machine.beside_collective().memory_efficiency / machine.memory_efficiency
    for what, buckets, kind, phase in (
        ("gather", gather_buckets(plans), "all_gather", "forward"),
        ("reduce", reduce_buckets(plans), "reduce_scatter", "backward"),
    ):
        figures: Figures = defaultdict(float)
        copied = hidden = 0.0
        spare = {block: under.get(phase, 0.0) * share for block, share in before.items()}
        for _, bucket in buckets:
            one, block = bucket.as_one, block_of(bucket.plans[0].fqn, last)
            nbytes = (
                one.rows * (one.gather_dtype if what == "gather" else one.reduce_dtype).itemsize
            )
            sent = [(kind, float(nbytes), one.shard_group)] if one.shard_degree > 1 else []
            if what == "reduce":
                sent += [
                    ("all_reduce", nbytes / one.shard_degree, group) for group in one.sum_groups
                ]
            for each, size, group in sent:
                ranks = ranks_in(group)
                seconds = machine.collective(each, size, ranks)
                exposed, spare[block] = (
                    max(0.0, seconds - spare[block]),
                    max(0.0, spare[block] - seconds),
                )
                _add_collective(
                    figures, axis_along(ranks, axes, True), each, size, ranks, machine, exposed
                )
                hidden += seconds - exposed
            copied += 2 * nbytes  # read and written, into the bucket or out of it
        travels = (
            0.0
            if under
            else sum(value for key, value in figures.items() if key.startswith("exposed."))
        )
        figures["compute"] = max(0.0, machine.memory_traffic(copied) - travels) + hidden * slowed
        result |= {f"{what}.{key}": value for key, value in figures.items()}
    return result


def shares_of_blocks(plans: Plans) -> dict[str, float]:
    """Return the share of each block in the computation of a forward or backward, by its
    parameters, in the order of reads.
    """
    last, sizes = last_block(plan.fqn for plan in plans.values()), dict[str, int]()
    for plan in plans.values():
        block = block_of(plan.fqn, last)
        sizes[block] = sizes.get(block, 0) + (
            plan.rows * math.prod(plan.row_shape) if block != "tok_embeddings" else 0
        )
    return {block: size / (sum(sizes.values()) or 1) for block, size in sizes.items()}


def copies_figures(plans: Plans, machine: Machine, axes: Axes, parallelism: Parallelism) -> Figures:
    """Return `copies.` figures of sums over copies after backward (distributed/powersgd.py), which
    nothing hides: a collective of all P, one of all Q and one of all other gradients, and the
    products, which read and write shards more than they compute.
    """
    figures: Figures = defaultdict(float)
    if parallelism.replicate_compression == "none":
        return figures
    ranks = next(ranks for ranks, axis in axes.items() if axis == "dp_replicate")
    axis = axis_along(ranks, axes, True)
    whole = ps = qs = 0.0  # bytes
    for plan in plans.values():
        numbers = plan.chunk * math.prod(plan.row_shape)
        factors = factor_sizes(plan, parallelism)
        if factors is None:
            whole += numbers * plan.reduce_dtype.itemsize
            continue
        ps += 4 * factors[0]
        qs += 4 * factors[1]
        operations = 8.0 * parallelism.replicate_rank * numbers
        figures["matmul"] += operations
        figures["compute"] += max(
            machine.memory_traffic(4 * SHARD_PASSES * numbers),
            operations / machine.flops(torch.float32),
        )
    for nbytes in (ps, qs, whole):
        if nbytes:
            _add_collective(figures, axis, "all_reduce", nbytes, ranks, machine)
    return {f"copies.{key}": value for key, value in figures.items()}
