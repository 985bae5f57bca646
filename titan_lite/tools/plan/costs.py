"""Price graphs, and the collectives of parameters: seconds, bytes and FLOPs by kind and mesh axis.

costs = graph_costs(graph, simulate(graph, machine), machine, axes)
costs.compute, costs.exposed["tp"], costs.sent["tp"]        # seconds, seconds, bytes
once_per_step_costs(specs, machine, axes, hidden_under={})  # of parameters gathered once a step
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch.fx import Graph

from titan_lite.cost.costs import Costs, on_line
from titan_lite.cost.machine import Machine
from titan_lite.cost.op_cost import flops_of
from titan_lite.cost.timeline import Timeline
from titan_lite.distributed.axes import Axes, axis_along, ranks_in
from titan_lite.distributed.buckets import Bucket, Specs, gather_buckets, reduce_buckets
from titan_lite.graph import KINDS, collective_bytes, kind_of, named_axis, parameters_of, ranks_of
from titan_lite.models.fqns import block_of, last_block

# The graphs of a stage, in the order they run. The backward of a microbatch is one graph, or two
# halves where the pipeline schedule runs these apart (features/split_backward/).
GRAPHS = ("forward", "backward", "backward_input", "backward_weight")
# By the kind of a pipeline's action: forward, backward, and backward of inputs or of weights.
GRAPH_OF_ACTION = {
    "F": "forward",
    "B": "backward",
    "I": "backward_input",
    "W": "backward_weight",
}
# By the kind of a microbatch's backward, B or I: all graphs of the microbatch.
GRAPHS_OF_BACKWARD = {
    "B": ("forward", "backward"),
    "I": ("forward", "backward_input", "backward_weight"),
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
        return self.graphs.get(GRAPH_OF_ACTION[kind], Costs())

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


def graph_costs(graph: Graph, timeline: Timeline, machine: Machine, axes: Axes) -> Costs:
    """Return the costs of a graph. timeline: of the graph on `machine`."""
    costs = Costs()
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


def once_per_step_costs(
    specs: Specs, machine: Machine, axes: Axes, hidden_under: Mapping[str, float]
) -> dict[str, Costs]:
    """Return the costs of "gather" and "reduce", for parameters that are gathered once a step.

    hidden_under: the seconds of `forward` and `backward` that they overlap with: the collectives of
    a block with the computation of the block before it, a share by its parameters, which is slower
    meanwhile. Else empty: two buckets are in flight at once, so the copies of one overlap the
    communication of the other: the longer of both counts.
    """
    shares = shares_of_blocks(specs)
    shares_before = dict(zip(shares, [0.0, *shares.values()], strict=False))

    def seconds_before(phase: str) -> dict[str, float] | None:
        """Return the seconds in which the block before each one computes, by block."""
        if not hidden_under:
            return None
        return {block: hidden_under[phase] * share for block, share in shares_before.items()}

    last = last_block(spec.fqn for spec in specs.values())
    return {
        "gather": _costs_of_buckets(
            gather_buckets(specs), "all_gather", last, machine, axes, seconds_before("forward")
        ),
        "reduce": _costs_of_buckets(
            reduce_buckets(specs), "reduce_scatter", last, machine, axes, seconds_before("backward")
        ),
    }


def _costs_of_buckets(
    buckets: Iterable[Bucket],
    kind: str,
    last: str,
    machine: Machine,
    axes: Axes,
    seconds_before: dict[str, float] | None,
) -> Costs:
    """Return the costs of collectives and copies.

    kind: of the collective over shards. last: the last block. seconds_before: by block, left to
    hide under.
    """
    left = seconds_before or {}
    costs = Costs()
    copied = 0.0  # bytes
    hidden = 0.0  # seconds
    for bucket in buckets:
        block = block_of(bucket.specs[0].fqn, last)
        flat = bucket.as_one
        dtype = flat.gather_dtype if kind == "all_gather" else flat.reduce_dtype
        nbytes = flat.rows * dtype.itemsize  # of the full weights or gradients
        sent: list[tuple[str, float, str]] = []
        if flat.axis.degree > 1:
            sent.append((kind, nbytes, flat.axis.group))
        if kind == "reduce_scatter":
            shard_bytes = nbytes / flat.axis.degree
            sent += [("all_reduce", shard_bytes, group) for group in flat.sum_groups]
        for collective, sent_bytes, group in sent:
            ranks = ranks_in(group)
            seconds = machine.collective(collective, sent_bytes, ranks)
            available = left.get(block, 0.0)
            exposed = max(0.0, seconds - available)
            left[block] = max(0.0, available - seconds)
            axis = axis_along(ranks, axes, of_parameters=True)
            costs.add_collective(axis, collective, sent_bytes, ranks, machine, exposed)
            hidden += seconds - exposed
        copied += 2 * nbytes  # read and written, into the bucket or out of it
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
