"""Simulate a graph on a machine: when each node computes, when each collective runs, and how long
computation waits.

    timeline = simulate(graph, machine)
    timeline.exposed, timeline.peak_bytes          # seconds in which nothing computes; bytes without parameters

Computation runs node by node in graph order. A collective starts at its node, once the previous one
of the same process group is done, and its wait blocks computation. Groups run in parallel, as on
NCCL's streams, and so do collectives of activations. For the passes on parameters, the waits for
collectives of tensor and context parallelism count as computation (SimpleFSDP, arXiv
2411.00284, section 4.2). Computation beside a collective has the multiprocessors that are left (`Machine.beside_collectives`).
Without compiled kernels a host lane issues the operators one by one: a node does not start before
it is issued.
"""

import dataclasses
import operator
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from torch.fx import Graph, Node

from titan_lite.cost.collectives import (
    KINDS,
    collectives,
    descendants,
    group_of,
    is_all_gather,
    kind_of,
    nbytes_of,
    parameter_collectives,
    parameters_of,
    preparation,
    start_of,
    waits_of,
)
from titan_lite.cost.machine import Machine, is_free, is_fused_away


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

    fused: as in `Machine.cost`, and one launch for the graph; bound: the graph's `lower_bound`.
    """
    now = compute = exposed = issued = idle = 0.0
    beside, host = machine.beside_collectives(), 0.0 if fused else machine.host * 1e-6
    lanes: dict[
        tuple[str, str], float
    ] = {}  # end of the last collective by group, of parameters or of activations
    spans: list[Span] = []
    started: dict[
        Node, tuple[int, float]
    ] = {}  # collective -> index of its span, seconds computed before it
    for node in graph.nodes:
        seconds = machine.cost(node, fused)
        issued += host if node.op == "call_function" else 0.0
        if seconds and issued > now:
            idle, now = idle + issued - now, issued
        if node.target in KINDS:
            group, lane = group_of(node), "communication" if parameters_of(node) else "compute"
            start = max(now, lanes.get((group, lane), 0.0))
            lanes[group, lane] = start + seconds
            started[node] = (len(spans), compute)
            spans.append(Span(lane, label(node), start, seconds, group=group))
        elif node.target is collectives.wait_tensor.default and start_of(node) in started:
            number, before = started.pop(start_of(node))
            span = spans[number]
            held_up = max(0.0, span.start + span.seconds - now)
            spans[number] = dataclasses.replace(span, exposed=held_up, under=compute - before)
            now += held_up
            if span.lane == "compute":
                compute += held_up
            else:
                exposed += held_up
        elif seconds:
            left = max(lanes.values(), default=0.0) - now  # of collectives that run meanwhile
            if left > 0 and beside is not machine:
                slowed = beside.cost(node, fused)
                under = min(left, slowed)
                seconds = under + (1 - under / slowed) * seconds
            spans.append(Span("compute", node.name, now, seconds))
            now, compute = now + seconds, compute + seconds
    communication = sum(span.seconds for span in spans if span.lane == "communication")
    bound = min(bound, exposed)  # the two sums may differ in the last digit
    return Timeline(
        name, tuple(spans), now, compute, communication, exposed, bound, peak_bytes(graph), idle
    )


def computed_before(graph: Graph, machine: Machine, fused: bool) -> dict[Node, float]:
    """Return the seconds of computation before each node.

    Work on shards does not count, since the last ranks have fewer rows, and passes must decide the
    same on all ranks.
    """
    shard_work, costs = shards_of(graph), costs_of(graph, machine, fused)
    seconds, result = 0.0, {}
    for node in graph.nodes:
        result[node] = seconds
        if not parameters_of(node) and node not in shard_work:
            seconds += costs[node]
    return result


def costs_of(graph: Graph, machine: Machine, fused: bool) -> dict[Node, float]:
    """Return the seconds of each node.

    Of a collective of activations, those that computation before its wait does not hide.
    """
    costs, shard_work = {node: machine.cost(node, fused) for node in graph.nodes}, shards_of(graph)
    started: dict[Node, float] = {}  # collective of activations -> seconds computed before it
    computed = 0.0
    for node in graph.nodes:
        if node.target in KINDS and not parameters_of(node):
            started[node] = computed
        elif node.target is collectives.wait_tensor.default and start_of(node) in started:
            begin = started.pop(start_of(node))
            costs[start_of(node)] = max(0.0, costs[start_of(node)] - (computed - begin))
        elif not parameters_of(node) and node not in shard_work:
            computed += costs[node]
    return costs


def shards_of(graph: Graph) -> set[Node]:
    """Return the nodes that prepare shards for all-gathers, and those that process reduced
    gradients.
    """
    mine = parameter_collectives(graph)
    before = {
        node for gather in mine if is_all_gather(gather) for node in preparation(gather) or ()
    }
    return before | (descendants(*(node for node in mine if not is_all_gather(node))) - set(mine))


def label(node: Node) -> str:
    """Return a name such as "all_gather layers.0.attention.wq.weight and 8 more"."""
    fqns = parameters_of(node)
    if not fqns:
        return node.name
    return f"{kind_of(node)} {fqns[0]}" + (f" and {len(fqns) - 1} more" if len(fqns) > 1 else "")


def lower_bound(graph: Graph, machine: Machine, *, fused: bool = True) -> float:
    """Return the least seconds that computation waits, for any order of the parameters' collectives
    and work on shards.

    All other computation keeps its order. A collective's head is the least time from the start of
    the graph to the collective, its tail the least time from the collective to the end. Collectives
    of one group run one after another, so any set of them takes at least its smallest head, plus
    its sum, plus its smallest tail. The graph takes at least the largest of these; the part of it
    that is not computation is exposed.
    """
    mine, movable = set(parameter_collectives(graph)), shards_of(graph)
    seconds = costs_of(graph, machine, fused)

    def earliest(
        nodes: Iterable[Node], before: Callable[[Node], Iterable[Node]]
    ) -> dict[Node, float]:
        """Return the least time before each node, in the direction of `before`."""
        found: dict[Node, float] = {}
        done = 0.0  # end of the last node that keeps its order
        for node in nodes:
            found[node] = max((found[each] + seconds[each] for each in before(node)), default=0.0)
            if seconds[node] and node not in mine and node not in movable:
                found[node] = max(found[node], done)
                done = found[node] + seconds[node]
        return found

    heads = earliest(graph.nodes, lambda node: node.all_input_nodes)
    tails = earliest(reversed(graph.nodes), lambda node: node.users)
    longest = 0.0
    for group in {group_of(node) for node in mine}:
        queue = sorted(
            (node for node in mine if group_of(node) == group), key=lambda node: -tails[node]
        )
        for head in {heads[node] for node in queue}:
            total = 0.0
            for node in queue:
                if heads[node] >= head:
                    total += seconds[node]
                    longest = max(longest, head + total + tails[node])
    return max(0.0, longest - sum(seconds[node] for node in graph.nodes if node not in mine))


def peak_bytes(graph: Graph, without: Collection[Node] = ()) -> int:
    """Return the peak of live bytes: of tensors that the graph makes, and of saved activations that
    it receives and frees.

    Parameters (placeholders named primals) and the nodes in `without` do not count. A view shares
    the storage of its base.
    """
    uncounted = {
        node for node in graph.nodes if node.op == "placeholder" and node.name.startswith("primals")
    } | {*without}
    sizes, ends = dict[Node, int](), dict[int, int]()
    for node, place in last_uses(graph).items():
        sizes[node] = 0 if node in uncounted else own_bytes(node)
        ends[place] = ends.get(place, 0) + sizes[node]
    alive = most = sum(size for node, size in sizes.items() if node.op == "placeholder")
    for place, node in enumerate(graph.nodes):
        alive += sizes.get(node, 0) if node.op != "placeholder" else 0
        most = max(most, alive)
        alive -= ends.get(place, 0)
    return most


def last_uses(
    graph: Graph, fused: bool = False, keeps_inputs: bool = False, sends: bool = False
) -> dict[Node, int]:
    """Return for each node that allocates, or is an input, the place of the last node that needs
    its storage.

    A view shares the storage of its base. fused: leave out results that are fused away
    (`is_fused_away`), and keep their inputs until the last kernel that recomputes them.
    keeps_inputs: the caller keeps the graph's inputs until its end. sends: a collective keeps its
    inputs until it is waited for.
    """
    order = {node: place for place, node in enumerate(graph.nodes)}
    storage = storages(graph)
    virtual = {node for node in graph.nodes if fused and is_fused_away(node)}
    last_use = {storage[node]: order[storage[node]] for node in graph.nodes}
    for node in reversed(graph.nodes):
        place = last_use[node] if node in virtual else order[node]
        if sends and node.target in KINDS:
            place = max((order[wait] for wait in waits_of(node)), default=place)
        for source in (node, *node.all_input_nodes):
            last_use[storage[source]] = max(last_use[storage[source]], place)
    if keeps_inputs:
        last_use |= {node: len(order) - 1 for node in graph.nodes if node.op == "placeholder"}
    return {node: place for node, place in last_use.items() if node not in virtual}


def storages(graph: Graph) -> dict[Node, Node]:
    """Return the node that allocated the storage of each node."""
    storage: dict[Node, Node] = {}
    for node in graph.nodes:
        source = node.kwargs.get("out") or next(iter(node.all_input_nodes), None)
        # One of several results of an operator is not a view.
        part = node.target is operator.getitem and not getattr(
            node.all_input_nodes[0].target, "is_view", False
        )
        storage[node] = node
        views = is_free(node) or "out" in node.kwargs
        if node.op != "call_function" or part or not views or not nbytes_of(node):
            continue
        if isinstance(source, Node):
            storage[node] = storage[source]
    return storage


def own_bytes(node: Node) -> int:
    """Return the bytes that a node allocates. Of several tensors, each counts at its `getitem`."""
    return 0 if isinstance(node.meta.get("val"), list | tuple) else nbytes_of(node)
