"""Price graphs, and the collectives of parameters: seconds, bytes and FLOPs by kind and mesh axis.

costs = graph_costs(graph, machine, fused=True, axes=axes)
costs.compute, costs.exposed["tp"], costs.sent["tp"]        # seconds, seconds, bytes
once_per_step_costs(specs, machine, axes, hidden_under={})  # of parameters gathered once a step
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch.fx import Graph

from titan_lite.cost.costs import Costs, on_line
from titan_lite.cost.machine import Machine
from titan_lite.cost.op_cost import flops_of
from titan_lite.cost.timeline import simulate
from titan_lite.distributed.axes import Axes, axis_along, ranks_in
from titan_lite.distributed.buckets import Bucket, Specs, gather_buckets, reduce_buckets
from titan_lite.graph import KINDS, collective_bytes, kind_of, named_axis, parameters_of, ranks_of
from titan_lite.models.fqns import block_of, last_block

# The graphs of a stage, in the order they run. The backward of a microbatch is one graph, or two
# halves where the pipeline schedule runs these apart (features/split_backward/).
GRAPHS = (
    "forward",
    "backward",
    "backward_input",
    "backward_weight",
)
# By the kind of a pipeline's action: forward, backward, and backward of inputs or of weights.
GRAPHS_OF_ACTION = {
    "F": ("forward",),
    "B": ("backward",),
    "I": ("backward_input",),
    "W": ("backward_weight",),
}
# By the kind of a microbatch's backward, B or I: all graphs of the microbatch.
GRAPHS_OF_BACKWARD = {
    "B": (*GRAPHS_OF_ACTION["F"], *GRAPHS_OF_ACTION["B"]),
    "I": (*GRAPHS_OF_ACTION["F"], *GRAPHS_OF_ACTION["I"], *GRAPHS_OF_ACTION["W"]),
}


@dataclass
class StageCosts:
    """The costs of a pipeline stage on one machine."""

    graphs: dict[str, Costs]  # of a microbatch, by GRAPHS; those that a stage like it runs
    # Once in a step: "gather" of weights before all microbatches; "reduce" of gradients after them,
    # and what features do "after_backward".
    once: dict[str, Costs]
    shard_elements: float  # of this rank's parameters
    full_elements: float  # of its parameters when they are gathered
    hidden_bytes: float  # that a microbatch sends to the next stage

    def of_action(self, kind: str) -> Costs:
        """Return the costs of a pipeline's action: F, B, I or W."""
        total = Costs()
        for name in GRAPHS_OF_ACTION[kind]:
            if name in self.graphs:
                total.add(self.graphs[name])
        return total

    def add_step_to(self, total: Costs, actions: Mapping[str, int]) -> None:
        """Add the costs of all graphs of a step. actions: their number in it, by kind."""
        for kind, count in actions.items():
            total.add(self.of_action(kind), count)
        once = Costs()
        for costs in self.once.values():
            once.add(costs)
        total.add(once)

    def extrapolated(self, other: "StageCosts", share: float) -> "StageCosts":
        """Return the costs on the line from these (share 0) through the other's (share 1)."""
        return StageCosts(
            graphs={
                name: costs.extrapolated(other.graphs[name], share)
                for name, costs in self.graphs.items()
            },
            once={
                name: costs.extrapolated(other.once[name], share)
                for name, costs in self.once.items()
            },
            shard_elements=on_line(self.shard_elements, other.shard_elements, share),
            full_elements=on_line(self.full_elements, other.full_elements, share),
            hidden_bytes=on_line(self.hidden_bytes, other.hidden_bytes, share),
        )


def graph_costs(graph: Graph, machine: Machine, fused: bool, axes: Axes) -> Costs:
    """Return the costs of a graph. fused: as in `node_seconds`."""
    costs = Costs()
    timeline = simulate(graph, machine, fused=fused)
    for span in timeline.spans:
        if span.lane == "compute" and not span.group:
            costs.compute += span.seconds
    if timeline.idle:
        costs.exposed["host"] = timeline.idle
    collective_spans = iter([span for span in timeline.spans if span.group])
    for node in graph.nodes:
        if node.target not in KINDS:
            matmul, attention = flops_of(node)
            costs.matmul_flops += matmul
            costs.attention_flops += attention
            continue
        span = next(collective_spans)
        ranks = tuple(ranks_of(node))
        if len(ranks) > 1:
            costs.add_collective(
                named_axis(node) or axis_along(ranks, axes, bool(parameters_of(node))),
                kind_of(node),
                collective_bytes(node),
                ranks,
                machine,
                exposed=span.seconds if machine.is_cpu else span.exposed,
            )
    return costs


class _Collective(NamedTuple):
    kind: str
    nbytes: float
    group: str


class _BucketTraffic(NamedTuple):
    """Bytes that the parameters of a bucket send and copy."""

    block: str
    nbytes: int  # of the full weights or gradients
    collectives: list[_Collective]


def once_per_step_costs(
    specs: Specs, machine: Machine, axes: Axes, hidden_under: Mapping[str, float]
) -> dict[str, Costs]:
    """Return the costs of "gather" and "reduce", for parameters that are gathered once a step.

    hidden_under: the seconds of `forward` and `backward` that they overlap with: the collectives of
    a block with the computation of the block before it, a share by its parameters, which is slower
    meanwhile. Else empty: two buckets are in flight at once, so the copies of one overlap the
    communication of the other: the longer of both counts.
    """
    last = last_block(spec.fqn for spec in specs.values())
    gathers = [_traffic(bucket, "all_gather", last) for bucket in gather_buckets(specs)]
    reductions = [_traffic(bucket, "reduce_scatter", last) for bucket in reduce_buckets(specs)]
    shares = shares_of_blocks(specs)
    shares_before = dict(zip(shares, [0.0, *shares.values()], strict=False))

    def seconds_before(phase: str) -> dict[str, float] | None:
        """Return the seconds in which the block before each one computes."""
        if not hidden_under:
            return None
        return {block: hidden_under[phase] * share for block, share in shares_before.items()}

    return {
        "gather": _costs_of_buckets(gathers, machine, axes, seconds_before("forward")),
        "reduce": _costs_of_buckets(reductions, machine, axes, seconds_before("backward")),
    }


def _traffic(bucket: Bucket, kind: str, last: str) -> _BucketTraffic:
    """Return what a bucket sends. kind: of the collective over shards."""
    flat = bucket.as_one
    is_gathered = kind == "all_gather"
    dtype = flat.gather_dtype if is_gathered else flat.reduce_dtype
    nbytes = flat.rows * dtype.itemsize
    collectives = []
    if flat.axis.degree > 1:
        collectives.append(_Collective(kind, float(nbytes), flat.axis.group))
    for group in () if is_gathered else flat.sum_groups:
        collectives.append(_Collective("all_reduce", nbytes / flat.axis.degree, group))
    return _BucketTraffic(block_of(bucket.specs[0].fqn, last), nbytes, collectives)


def _costs_of_buckets(
    buckets: Iterable[_BucketTraffic],
    machine: Machine,
    axes: Axes,
    seconds_before: dict[str, float] | None,
) -> Costs:
    """Return the costs of collectives and copies. seconds_before: by block, left to hide under."""
    left = seconds_before or {}
    costs = Costs()
    copied = 0.0  # bytes
    hidden = 0.0  # seconds
    for bucket in buckets:
        for kind, nbytes, group in bucket.collectives:
            ranks = ranks_in(group)
            seconds = machine.collective(kind, nbytes, ranks)
            available = left.get(bucket.block, 0.0)
            exposed = max(0.0, seconds - available)
            left[bucket.block] = max(0.0, available - seconds)
            axis = axis_along(ranks, axes, of_parameters=True)
            costs.add_collective(axis, kind, nbytes, ranks, machine, exposed)
            hidden += seconds - exposed
        copied += 2 * bucket.nbytes  # read and written, into the bucket or out of it
    travel = sum(costs.exposed.values()) if seconds_before is None else 0.0
    slowed = 1 - machine.beside_collective().memory_efficiency / machine.memory_efficiency
    costs.compute = max(0.0, machine.memory_traffic(copied) - travel) + hidden * slowed
    return costs


def shares_of_blocks(specs: Specs) -> dict[str, float]:
    """Return the share of each block in the computation of a forward or backward, by its
    parameters, in the order of reads.
    """
    last = last_block(spec.fqn for spec in specs.values())
    sizes: dict[str, int] = {}
    for spec in specs.values():
        block = block_of(spec.fqn, last)
        computes = block != "tok_embeddings"
        elements = spec.rows * math.prod(spec.row_shape) if computes else 0
        sizes[block] = sizes.get(block, 0) + elements
    total = sum(sizes.values()) or 1
    return {block: size / total for block, size in sizes.items()}
