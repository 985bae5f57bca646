"""Hide the collectives of activations: compute gradients of weights while one is in flight.

    before   dw = x.T @ dy; a = reduce_scatter(dy @ w); dx = wait(a)
    after    a = reduce_scatter(dy @ w); dw = x.T @ dy; dx = wait(a)

In backward, tensor and context parallelism communicate on the path from block to block, and a
gradient of a weight is not on that path: no such collective waits for it. (Zero bubble pipelines,
arXiv 2401.10241, fill the waits between stages by the same division.) Numbers do not change. In
forward every matmul is on the path, so nothing moves.

The costs of tensor-parallel ranks may differ, so the first rank chooses (rank_agreement.py).
"""

from collections import deque
from collections.abc import Callable, Iterable

from torch.fx import Graph, Node

from titan_lite.compile.rank_agreement import Pairs, first_ranks_choice
from titan_lite.compile.settings import PassSettings
from titan_lite.cost.machine import Machine
from titan_lite.cost.op_cost import node_seconds
from titan_lite.graph import (
    MATMULS,
    activation_collectives,
    ancestors,
    descendants,
    wait_of,
)

# Matmuls that may be deferred, the last ones: a deferred matmul keeps its factors alive. A block
# has 7 weights.
MAX_DEFERRED = 8


def defer_weight_grads(graph: Graph, settings: PassSettings) -> int:
    """Defer matmuls behind the start of collectives of activations, in place. Return how many."""
    if not activation_collectives(graph):
        return 0
    own = choose_matmuls(graph, settings.machine, fused=settings.fused)
    chosen = first_ranks_choice(own, settings.ranks)
    defer_matmuls(graph, chosen)
    return len(chosen)


def choose_matmuls(
    graph: Graph, machine: Machine | None = None, *, fused: bool = True
) -> list[tuple[int, int]]:
    """Return (number of a matmul, number of the collective of activations to hide).

    A collective gets the shortest matmul that is as long as itself; if there is none, the longest
    one, and others for the rest. Without a machine it gets the last matmul.
    """

    def seconds(node: Node) -> float:
        return node_seconds(node, machine, fused) if machine else 1.0

    activations = activation_collectives(graph)
    started_by = {wait_of(node): node for node in activations}
    path = ancestors(activations)
    matmul_number = {node: number for number, node in enumerate(_matmuls(graph))}
    collective_number = {node: number for number, node in enumerate(activations)}
    ready: deque[Node] = deque(maxlen=MAX_DEFERRED)  # the latest first
    chosen = []
    for node in graph.nodes:
        if node.target in MATMULS and node not in path:
            ready.appendleft(node)
        elif node in started_by:
            collective = started_by[node]
            exposed = seconds(collective)
            while ready and exposed > 0:
                matmul = _best_fit(ready, seconds, exposed)
                chosen.append((matmul_number[matmul], collective_number[collective]))
                ready.remove(matmul)
                exposed -= seconds(matmul)
    return chosen


def _best_fit(matmuls: Iterable[Node], seconds: Callable[[Node], float], wanted: float) -> Node:
    """Return the shortest matmul that takes `wanted` seconds or more, or else the longest."""
    return min(matmuls, key=lambda node: (seconds(node) < wanted, abs(seconds(node) - wanted)))


def defer_matmuls(graph: Graph, chosen: Pairs) -> None:
    """Move the chosen matmuls, with what depends on them, before the waits they fill."""
    matmuls = _matmuls(graph)
    activations = activation_collectives(graph)
    for matmul, collective in chosen:
        wait = wait_of(activations[collective])
        for node in sorted(node for node in descendants(matmuls[matmul]) if node < wait):
            wait.prepend(node)
    graph.lint()


def _matmuls(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.target in MATMULS]
