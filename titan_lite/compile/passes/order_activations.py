"""Start the collectives of activations in the order of their waits.

    before   a = reduce_scatter(x); b = all_gather(y); use(wait(b)); use(wait(a))
    after    b = all_gather(y); a = reduce_scatter(x); use(wait(b)); use(wait(a))

In the first order, b queues behind a, and its wait takes as long as both.
"""

from collections.abc import Sequence

from torch.fx import Graph, Node

from titan_lite.compile.rank_agreement import Pairs, first_ranks_choice
from titan_lite.compile.settings import PassSettings
from titan_lite.cost.machine import Machine
from titan_lite.cost.timeline import Span, simulate
from titan_lite.graph import activation_collectives, group_of, wait_of


def order_activation_collectives(graph: Graph, settings: PassSettings) -> int:
    """Order collectives of activations in place, if this is faster. Return how many moved."""
    if not activation_collectives(graph):
        return 0
    own = choose_order(graph, settings.machine, fused=settings.fused)
    chosen = first_ranks_choice(own, settings.ranks)
    start_behind(graph, chosen)
    return len(chosen)


def choose_order(
    graph: Graph, machine: Machine | None, *, fused: bool = True
) -> list[tuple[int, int]]:
    """Return pairs of collectives of activations: the first should start behind the second.

    The second is a later one of the same group that is waited for earlier, and that would queue
    behind the first. Empty if the graph would not be faster, as estimated.
    """
    if machine is None:
        return []
    activations = activation_collectives(graph)
    before = simulate(graph, machine, fused=fused)
    spans = [span for span in before.spans if span.group and span.lane == "compute"]
    chosen = _overtaking(activations, spans)

    # Try it, and move the nodes back.
    predecessors = [activations[number].prev for number, _ in chosen]
    start_behind(graph, chosen)
    after = simulate(graph, machine, fused=fused)
    for (number, _), predecessor in zip(chosen, predecessors, strict=True):
        predecessor.append(activations[number])
    return chosen if after.seconds < before.seconds else []


def _overtaking(activations: Sequence[Node], spans: Sequence[Span]) -> list[tuple[int, int]]:
    """Return the pairs of `choose_order`. spans: of the collectives, in the same order."""
    overtaken_by: dict[int, int] = {}
    for number, (node, span) in enumerate(zip(activations, spans, strict=True)):
        queue_end = span.start + span.seconds
        for later in range(number + 1, len(activations)):
            if group_of(activations[later]) != group_of(node):
                continue
            if spans[later].start > queue_end:
                break
            queue_end = spans[later].start + spans[later].seconds
            if wait_of(activations[later]) < wait_of(node):
                overtaken_by[number] = later
    return list(overtaken_by.items())


def start_behind(graph: Graph, chosen: Pairs) -> None:
    """Start the first collective of each pair behind the second, in place."""
    activations = activation_collectives(graph)
    for number, later in reversed(chosen):  # those behind the same one keep their order
        activations[later].append(activations[number])
    graph.lint()
