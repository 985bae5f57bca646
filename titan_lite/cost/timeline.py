"""Simulate a graph on a machine: when nodes compute, when collectives run, what waits how long.

    timeline = simulate(graph, machine)
    timeline.exposed            # seconds in which computation waits for parameters' collectives
    timeline.peak_bytes         # without parameters

Computation runs node by node in graph order. A collective starts at its node, once the previous one
of the same process group is done, and its wait blocks computation. Groups run in parallel, as on
NCCL's streams, and so do collectives of activations. For the passes on parameters, the waits for
collectives of tensor and context parallelism count as computation (SimpleFSDP, arXiv 2411.00284,
section 4.2). Computation beside a collective has the multiprocessors that are left
(`Machine.beside_collective`). Without compiled kernels the host issues the operators one by one: a
node does not start before it is issued.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from torch.fx import Graph, Node

from titan_lite.collectives import collectives
from titan_lite.cost.machine import MICROSECOND, Machine
from titan_lite.cost.op_cost import node_seconds
from titan_lite.graph import (
    KINDS,
    group_of,
    kind_of,
    named_axis,
    nbytes_of,
    parameter_collectives,
    parameters_of,
    shards_of,
    start_of,
    storages,
)
from titan_lite.text import first_names


@dataclass(frozen=True)
class Span:
    """A node that computes, or a collective of parameters."""

    lane: str  # "compute" or "communication"
    name: str
    start: float  # seconds from the start of the graph
    seconds: float
    exposed: float = 0.0  # seconds in which the wait for this collective blocks computation
    under: float = 0.0  # seconds of computation between the collective and its wait
    group: str = ""  # process group of a collective, also of one whose wait counts as computation
    axis: str = ""  # of the mesh, if the model's code names it (distributed/expert_parallel.py)


@dataclass(frozen=True)
class Timeline:
    """A simulated graph."""

    graph: str  # name
    spans: tuple[Span, ...]
    seconds: float
    compute: float  # seconds, like the next three
    communication: float
    exposed: float
    bound: float  # least `exposed` for any order of the parameters' collectives
    peak_bytes: int  # of tensors that the graph allocates, or receives and frees
    idle: float = 0.0  # seconds in which the device waits for the host

    @property
    def waited(self) -> float:
        """Return the seconds in which nothing computes: `exposed`, and waits that count as
        computation.
        """
        return self.exposed + sum(span.exposed for span in self.spans if span.lane == "compute")

    def collectives(self) -> list[Span]:
        """Return the spans of communication in graph order."""
        return [span for span in self.spans if span.lane == "communication"]


def simulate(
    graph: Graph, machine: Machine, *, name: str = "", fused: bool = True, bound: float = 0.0
) -> Timeline:
    """Simulate `graph`.

    fused: as in `node_seconds`, and one launch for the graph; bound: the graph's `lower_bound`.
    """
    simulation = _Simulation(machine, fused)
    for node in graph.nodes:
        simulation.run(node)
    spans = tuple(simulation.spans)
    return Timeline(
        graph=name,
        spans=spans,
        seconds=simulation.now,
        compute=simulation.compute,
        communication=sum(span.seconds for span in spans if span.lane == "communication"),
        exposed=simulation.exposed,
        bound=min(bound, simulation.exposed),  # the two sums may differ in the last digit
        peak_bytes=peak_bytes(graph),
        idle=simulation.idle,
    )


class _Simulation:
    """The clocks of a device, its host and its links while a graph runs. All in seconds."""

    def __init__(self, machine: Machine, fused: bool):
        self.machine = machine
        self.beside_collective = machine.beside_collective()
        self.fused = fused
        self.host_seconds = 0.0 if fused else machine.host * MICROSECOND  # for an operator
        self.now = 0.0  # of the device
        self.issued = 0.0  # by the host
        self.compute = 0.0
        self.exposed = 0.0
        self.idle = 0.0  # the device waits for the host
        self.spans: list[Span] = []
        # End of the last collective by (group, lane).
        self.busy_until: dict[tuple[str, str], float] = {}
        # Collective -> (index of its span, seconds computed before it).
        self.in_flight: dict[Node, tuple[int, float]] = {}

    def run(self, node: Node) -> None:
        """Advance the clocks by a node."""
        seconds = node_seconds(node, self.machine, self.fused)
        if node.op == "call_function":
            self.issued += self.host_seconds
        if seconds and self.issued > self.now:
            self.idle = self.idle + self.issued - self.now
            self.now = self.issued
        if node.target in KINDS:
            self.start_collective(node, seconds)
        elif node.target is collectives.wait_tensor.default and start_of(node) in self.in_flight:
            self.wait(start_of(node))
        elif seconds:
            self.run_computation(node, seconds)

    def start_collective(self, node: Node, seconds: float) -> None:
        """Start a collective once the one before it in its group is done."""
        group = group_of(node)
        lane = "communication" if parameters_of(node) else "compute"
        start = max(self.now, self.busy_until.get((group, lane), 0.0))
        self.busy_until[group, lane] = start + seconds
        self.in_flight[node] = (len(self.spans), self.compute)
        span = Span(lane, label(node), start, seconds, group=group, axis=named_axis(node))
        self.spans.append(span)

    def wait(self, collective: Node) -> None:
        """Block computation until a collective is done."""
        index, computed_before = self.in_flight.pop(collective)
        span = self.spans[index]
        exposed = max(0.0, span.start + span.seconds - self.now)
        self.spans[index] = dataclasses.replace(
            span, exposed=exposed, under=self.compute - computed_before
        )
        self.now += exposed
        if span.lane == "compute":
            self.compute += exposed
        else:
            self.exposed += exposed

    def run_computation(self, node: Node, seconds: float) -> None:
        """Compute, with fewer multiprocessors as long as a collective runs."""
        communicating = max(self.busy_until.values(), default=0.0) - self.now
        if communicating > 0 and self.beside_collective is not self.machine:
            slowed = node_seconds(node, self.beside_collective, self.fused)
            under = min(communicating, slowed)
            seconds = under + (1 - under / slowed) * seconds
        self.spans.append(Span("compute", node.name, self.now, seconds))
        self.now += seconds
        self.compute += seconds


def computed_before(graph: Graph, machine: Machine, fused: bool) -> dict[Node, float]:
    """Return the seconds of computation before each node.

    Work on shards does not count: ranks have different numbers of rows.
    """
    shard_work = shards_of(graph)
    costs = costs_of(graph, machine, fused)
    computed = 0.0
    before: dict[Node, float] = {}
    for node in graph.nodes:
        before[node] = computed
        if not parameters_of(node) and node not in shard_work:
            computed += costs[node]
    return before


def costs_of(graph: Graph, machine: Machine, fused: bool) -> dict[Node, float]:
    """Return the seconds of each node.

    Of a collective of activations, those that computation before its wait does not hide.
    """
    costs = {node: node_seconds(node, machine, fused) for node in graph.nodes}
    shard_work = shards_of(graph)
    started: dict[Node, float] = {}  # collective of activations -> seconds computed before it
    computed = 0.0
    for node in graph.nodes:
        if node.target in KINDS and not parameters_of(node):
            started[node] = computed
        elif node.target is collectives.wait_tensor.default and start_of(node) in started:
            collective = start_of(node)
            hidden = computed - started.pop(collective)
            costs[collective] = max(0.0, costs[collective] - hidden)
        elif not parameters_of(node) and node not in shard_work:
            computed += costs[node]
    return costs


def label(node: Node) -> str:
    """Return a name such as "all_gather layers.0.attention.wq.weight and 8 more"."""
    fqns = parameters_of(node)
    if not fqns:
        return node.name
    return f"{kind_of(node)} {first_names(fqns, 1)}"


def lower_bound(graph: Graph, machine: Machine, *, fused: bool = True) -> float:
    """Return the least seconds that computation waits, for any order of the parameters' collectives
    and work on shards.

    All other computation keeps its order. A collective's head is the least time from the start of
    the graph to the collective, its tail the least time from the collective to the end. Collectives
    of one group run one after another, so any set of them takes at least its smallest head, plus
    its sum, plus its smallest tail. The graph takes at least the largest of these; the part of it
    that is not computation is exposed.
    """
    of_parameters = set(parameter_collectives(graph))
    ordered = set(graph.nodes) - of_parameters - shards_of(graph)
    costs = costs_of(graph, machine, fused)
    heads = _least_times(graph.nodes, lambda node: node.all_input_nodes, costs, ordered)
    tails = _least_times(reversed(graph.nodes), lambda node: node.users, costs, ordered)
    longest = 0.0
    for group in {group_of(node) for node in of_parameters}:
        queue = sorted(
            (node for node in of_parameters if group_of(node) == group),
            key=lambda node: -tails[node],
        )
        for least_head in {heads[node] for node in queue}:
            total = 0.0
            for node in queue:
                if heads[node] >= least_head:
                    total += costs[node]
                    longest = max(longest, least_head + total + tails[node])
    computation = sum(costs[node] for node in graph.nodes if node not in of_parameters)
    return max(0.0, longest - computation)


def _least_times(
    nodes: Iterable[Node],
    dependencies: Callable[[Node], Iterable[Node]],
    costs: Mapping[Node, float],
    ordered: Collection[Node],
) -> dict[Node, float]:
    """Return the least seconds before each node. ordered: the nodes that keep their order."""
    before: dict[Node, float] = {}
    end = 0.0  # of the last node that keeps its order
    for node in nodes:
        before[node] = max(
            (before[other] + costs[other] for other in dependencies(node)), default=0.0
        )
        if costs[node] and node in ordered:
            before[node] = max(before[node], end)
            end = before[node] + costs[node]
    return before


def peak_bytes(graph: Graph, without: Collection[Node] = ()) -> int:
    """Return the peak of live bytes: of tensors that the graph makes, and of saved activations that
    it receives and frees.

    The model's parameters, buffers and arguments (meta["is_model_input"]), which others keep, and
    the nodes in `without` do not count. A view shares the storage of its base.
    """
    kept = {node for node in graph.nodes if node.meta.get("is_model_input")}
    uncounted = kept.union(without)
    sizes: dict[Node, int] = {}
    freed_after: dict[int, int] = {}  # bytes, by position of a node in the graph
    for node, position in _last_uses(graph).items():
        sizes[node] = 0 if node in uncounted else own_bytes(node)
        freed_after[position] = freed_after.get(position, 0) + sizes[node]
    live = sum(size for node, size in sizes.items() if node.op == "placeholder")
    peak = live
    for position, node in enumerate(graph.nodes):
        if node.op != "placeholder":
            live += sizes.get(node, 0)
        peak = max(peak, live)
        live -= freed_after.get(position, 0)
    return peak


def _last_uses(graph: Graph) -> dict[Node, int]:
    """Return for each node that allocates, or is an input, the position of the last node that needs
    its storage. A view shares the storage of its base.
    """
    storage = storages(graph)
    last_use: dict[Node, int] = {}
    for position, node in enumerate(graph.nodes):
        for source in (node, *node.all_input_nodes):
            last_use[storage[source]] = position
    return last_use


def own_bytes(node: Node) -> int:
    """Return the bytes that a node allocates. Of several tensors, each counts at its `getitem`."""
    return 0 if isinstance(node.meta.get("val"), list | tuple) else nbytes_of(node)
