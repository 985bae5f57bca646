"""A graph on a machine, without running it: when each node computes, when each collective travels, and what is waited for.

    timeline = simulate(graph, machine)
    timeline.exposed, timeline.peak_bytes          # seconds in which nothing computes; bytes beside the parameters

Computation runs node by node in the graph's order; a parameter's collective starts where it stands in it, once the one before
it among the same ranks is done, and the wait for it holds computation up. Each group of ranks has a lane of its own, as NCCL
gives it a stream. What tensor and context parallelism communicate is waited for at once and counts as computation (SimpleFSDP,
arXiv 2411.00284, section 4.2).
"""

import dataclasses
import operator
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from torch.fx import Graph, Node

from titan_lite.compiler.collectives import (
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
)
from titan_lite.compiler.hardware import Machine, is_free, is_fused_away


@dataclass(frozen=True)
class Span:
    """A node that computes, or a collective that travels."""

    lane: str  # "compute" or "communication"
    name: str
    start: float  # seconds, from the graph's beginning
    seconds: float
    exposed: float = 0.0  # of communication: seconds that its wait held computation up
    under: float = 0.0  # and seconds of computation between its start and that wait
    group: str = ""  # the process group of any collective, also one that counts as computation

    @property
    def waited(self) -> float:
        """Seconds in which nothing computes: all of a collective that counts as computation."""
        return self.seconds if self.lane == "compute" and self.group else self.exposed


@dataclass(frozen=True)
class Timeline:
    """One graph, in seconds."""

    graph: str
    spans: tuple[Span, ...]
    seconds: float
    compute: float
    communication: float
    exposed: float
    bound: float  # exposed at least, wherever its collectives of parameters stand
    peak_bytes: int  # most at once of what the graph allocates, or is given to free

    @property
    def waited(self) -> float:
        """Seconds in which nothing computes: exposed, and those of collectives that are waited for at once."""
        return self.exposed + sum(span.waited for span in self.spans if span.lane == "compute")

    def collectives(self) -> list[Span]:
        """Spans of communication, in the graph's order."""
        return [span for span in self.spans if span.lane == "communication"]


def simulate(graph: Graph, machine: Machine, *, name: str = "", fused: bool = True, bound: float = 0.0) -> Timeline:
    """fused: as in `Machine.cost`; bound: `lower_bound` of this graph."""
    now = compute = exposed = 0.0
    lanes: dict[str, float] = {}  # until when each group's links are busy
    spans: list[Span] = []
    started: dict[Node, tuple[int, float]] = {}  # collective: its span, the computation done before it
    for node in graph.nodes:
        seconds = machine.cost(node, fused)
        if parameters_of(node):
            group = group_of(node)
            start = max(now, lanes.get(group, 0.0))
            lanes[group] = start + seconds
            started[node] = (len(spans), compute)
            spans.append(Span("communication", label(node), start, seconds, group=group))
        elif node.target is collectives.wait_tensor.default and start_of(node) in started:
            number, before = started.pop(start_of(node))
            span = spans[number]
            held_up = max(0.0, span.start + span.seconds - now)
            spans[number] = dataclasses.replace(span, exposed=held_up, under=compute - before)
            exposed, now = exposed + held_up, now + held_up
        elif seconds:
            spans.append(Span("compute", node.name, now, seconds, group=group_of(node) if node.target in KINDS else ""))
            now, compute = now + seconds, compute + seconds
    communication = sum(span.seconds for span in spans if span.lane == "communication")
    bound = min(bound, exposed)  # sums in another order: the last digit may differ
    return Timeline(name, tuple(spans), now, compute, communication, exposed, bound, peak_bytes(graph))


def computed_before(graph: Graph, machine: Machine, fused: bool) -> dict[Node, float]:
    """Seconds of computation that stand before each node, by which passes decide.

    Without what is done to shards: the last ranks have fewer rows, and all must decide the same.
    """
    own = shards_of(graph)
    seconds, result = 0.0, {}
    for node in graph.nodes:
        result[node] = seconds
        if not parameters_of(node) and node not in own:
            seconds += machine.cost(node, fused)
    return result


def shards_of(graph: Graph) -> set[Node]:
    """Nodes that prepare shards to be gathered, and nodes that reduced gradients go through."""
    mine = parameter_collectives(graph)
    before = {node for gather in mine if is_all_gather(gather) for node in preparation(gather) or ()}
    return before | (descendants(*(node for node in mine if not is_all_gather(node))) - set(mine))


def label(node: Node) -> str:
    """A collective's purpose, such as "all_gather layers.0.attention.wq.weight and 8 more"."""
    fqns = parameters_of(node)
    return f"{kind_of(node)} {fqns[0]}" + (f" and {len(fqns) - 1} more" if len(fqns) > 1 else "")


def lower_bound(graph: Graph, machine: Machine, *, fused: bool = True) -> float:
    """Seconds that computation waits at least, wherever in this graph the parameters' collectives and work on shards stand.

    All other computation keeps its order. Each collective has a head, the least time from the graph's beginning to its start,
    and a tail, the least time from its end to the end of the graph. Those of one group travel one after another, so a set of them
    takes the smallest head, their sum and the smallest tail. The graph takes the longest of these at least; what of it is not
    computation is exposed.
    """
    mine, movable = set(parameter_collectives(graph)), shards_of(graph)
    seconds = {node: machine.cost(node, fused) for node in graph.nodes}

    def earliest(nodes: Iterable[Node], before: Callable[[Node], Iterable[Node]]) -> dict[Node, float]:
        """The least time that passes before each node, from the side on which `before` is."""
        found: dict[Node, float] = {}
        done = 0.0  # of what keeps its order
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
        lane = sorted((node for node in mine if group_of(node) == group), key=lambda node: -tails[node])
        for head in {heads[node] for node in lane}:
            travels = 0.0
            for node in lane:
                if heads[node] >= head:
                    travels += seconds[node]
                    longest = max(longest, head + travels + tails[node])
    return max(0.0, longest - sum(seconds[node] for node in graph.nodes if node not in mine))


def peak_bytes(graph: Graph, without: Collection[Node] = ()) -> int:
    """The most bytes alive at once of what the graph makes, and of saved activations that it is given and frees.

    Parameters (placeholders called primals) stay where they are and do not count. A view lives in the storage that it is of.
    Nor do the nodes in `without`.
    """
    return max(alive_bytes(graph, without))


def alive_bytes(graph: Graph, without: Collection[Node] = (), fused: bool = False, keeps_inputs: bool = False) -> list[int]:
    """Bytes alive while each node runs, of which `peak_bytes` is the peak.

    fused: what `is_fused_away` is not made, and what it reads lives on until the last kernel that it is in. keeps_inputs: whoever
    calls the graph holds what it is given, until its end.
    """
    order = {node: place for place, node in enumerate(graph.nodes)}
    storage = _storages(graph)
    virtual = {node for node in graph.nodes if fused and is_fused_away(node)}
    last_use = {storage[node]: order[storage[node]] for node in graph.nodes}
    for node in reversed(graph.nodes):
        place = last_use[node] if node in virtual else order[node]
        for source in (node, *node.all_input_nodes):
            last_use[storage[source]] = max(last_use[storage[source]], place)
    if keeps_inputs:
        last_use |= {node: len(order) - 1 for node in graph.nodes if node.op == "placeholder"}
    uncounted = {node for node in graph.nodes if node.op == "placeholder" and node.name.startswith("primals")}
    uncounted |= {*without, *virtual}
    size = {node: 0 if node in uncounted else _own_bytes(node) for node in last_use}
    alive = sum(size[node] for node in size if node.op == "placeholder")
    found = [alive]
    ends: dict[int, int] = {}
    for node, place in last_use.items():
        ends[place] = ends.get(place, 0) + size[node]
    for node in graph.nodes:
        if node.op != "placeholder" and storage[node] is node:
            alive += size[node]
        found.append(alive)
        alive -= ends.get(order[node], 0)
    return found


def saved_bytes(graph: Graph) -> tuple[int, int]:
    """Bytes that a forward graph keeps for backward beside its one result: (of what it makes, of what it is given)."""
    (results,) = next(node for node in graph.nodes if node.op == "output").args
    storage, saved = _storages(graph), [node for node in results[1:] if isinstance(node, Node)]
    made = sum(_own_bytes(node) for node in {storage[node] for node in saved} if node.op != "placeholder")
    return made, sum(_own_bytes(node) for node in set(saved) if node.op == "placeholder")


def _storages(graph: Graph) -> dict[Node, Node]:
    """Each node's, by the node that made it."""
    storage: dict[Node, Node] = {}
    for node in graph.nodes:
        source = node.kwargs.get("out") or next(iter(node.all_input_nodes), None)
        # One of several tensors that an operator has made is no view of another node.
        part = node.target is operator.getitem and not getattr(node.all_input_nodes[0].target, "is_view", False)
        shared = node.op == "call_function" and isinstance(source, Node) and nbytes_of(node) and not part
        storage[node] = storage[source] if shared and (is_free(node) or "out" in node.kwargs) else node  # type: ignore[index]
    return storage


def _own_bytes(node: Node) -> int:
    """Bytes that a node allocates; of several tensors, those that are taken out (`getitem`) count for themselves."""
    return 0 if isinstance(node.meta.get("val"), list | tuple) else nbytes_of(node)
