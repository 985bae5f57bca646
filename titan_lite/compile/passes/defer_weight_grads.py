"""Hide the collectives of activations: while one is in flight, compute products that no such
collective waits for.

    before   dw = x.T @ dy; a = reduce_scatter(dy @ w); dx = wait(a)
    after    a = reduce_scatter(dy @ w); dw = x.T @ dy; dx = wait(a)

In backward, tensor and context parallelism communicate on the path from block to block, and a
gradient of a weight is not on that path. (Zero bubble pipelines, arXiv 2401.10241, fill the waits
between stages by the same division.) Numbers do not change. In forward every product is on the
path, so nothing moves.
"""

from collections import deque
from collections.abc import Sequence

from torch.fx import Graph, Node

from titan_lite.cost.collectives import activation_collectives, descendants, group_of, wait_of
from titan_lite.cost.machine import Machine
from titan_lite.cost.op_cost import MATMULS, node_seconds
from titan_lite.cost.timeline import simulate

Numbered = list[tuple[int, int]]  # numbers of nodes of one kind each, counted in graph order
# products that may be deferred, the last ones: a deferred product keeps its factors alive. A block
# has 7 weights.
RECENT = 8


def choose_products(
    graph: Graph, machine: Machine | None = None, *, fused: bool = True
) -> Numbered:
    """Return (number of a product, number of the collective to hide).

    All ranks must use those of one. Places of nodes are no such numbers: a rank with fewer rows
    pads them.

    A collective gets the shortest product that is as long as itself; if there is none, the longest
    one, and others for the rest. Without a machine it gets the last product.
    """

    def seconds(node: Node) -> float:
        return node_seconds(node, machine, fused) if machine else 1.0

    activations = activation_collectives(graph)
    starts = {wait_of(node): node for node in activations}
    path = _ancestors(activations)
    numbers = {
        node: number for each in (_products(graph), activations) for number, node in enumerate(each)
    }
    ready: deque[Node] = deque(maxlen=RECENT)
    chosen = []
    for node in graph.nodes:
        if node.target in MATMULS and node not in path:
            ready.appendleft(node)
        elif node in starts:
            left = seconds(starts[node])
            while ready and left > 0:
                product = min(
                    ready, key=lambda each: (seconds(each) < left, abs(seconds(each) - left))
                )
                chosen.append((numbers[product], numbers[starts[node]]))
                ready.remove(product)
                left -= seconds(product)
    return chosen


def choose_order(graph: Graph, machine: Machine | None, *, fused: bool = True) -> Numbered:
    """Return pairs (number of a collective, number of a later one of its group that is waited for
    earlier and queues behind it).

    The first one should start behind the other. Empty if the graph would not be faster, as
    estimated.
    """
    if machine is None:
        return []
    found, chosen, before = (
        activation_collectives(graph),
        dict[int, int](),
        simulate(graph, machine, fused=fused),
    )
    spans = [span for span in before.spans if span.group and span.lane == "compute"]
    for number, (node, span) in enumerate(zip(found, spans, strict=True)):
        busy = span.start + span.seconds
        for other, later in enumerate(found[number + 1 :], number + 1):
            if group_of(later) == group_of(node):
                if spans[other].start > busy:
                    break
                busy = spans[other].start + spans[other].seconds
                if wait_of(later) < wait_of(node):
                    chosen[number] = other
    pairs, places = [*chosen.items()], [found[number].prev for number in chosen]
    start_behind(graph, pairs)
    after = simulate(graph, machine, fused=fused)
    for number, place in zip(chosen, places, strict=True):
        place.append(found[number])
    return pairs if after.seconds < before.seconds else []


def start_behind(graph: Graph, chosen: Numbered) -> None:
    """Start collectives behind others, in place."""
    found = activation_collectives(graph)
    for number, other in reversed(chosen):  # so that those behind the same one keep their order
        found[other].append(found[number])
    graph.lint()


def defer_weight_grads(graph: Graph, chosen: Numbered) -> int:
    """Move the chosen products, with what depends on them, in place. Return how many moved."""
    products, activations = _products(graph), activation_collectives(graph)
    for product, collective in chosen:
        wait = wait_of(activations[collective])
        for each in sorted(later for later in descendants(products[product]) if later < wait):
            wait.prepend(each)
    graph.lint()
    return len(chosen)


def _products(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.target in MATMULS]


def _ancestors(nodes: Sequence[Node]) -> set[Node]:
    """Return `nodes` and all nodes that they depend on."""
    found, open_nodes = set(nodes), list(nodes)
    while open_nodes:
        for source in open_nodes.pop().all_input_nodes:
            if source not in found:
                found.add(source)
                open_nodes.append(source)
    return found
