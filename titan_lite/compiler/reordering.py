"""Overlap: collectives start earlier and are waited for later, so that computation runs while they do.

    before   w1 = wait(all_gather(s1)); y = f(x, w1); w2 = wait(all_gather(s2)); z = f(y, w2)
    after    a1 = all_gather(s1); a2 = all_gather(s2); w1 = wait(a1); y = f(x, w1); w2 = wait(a2); z = f(y, w2)

A parameter bucket's all-gather starts before the wait of the one in use, and a reduction is waited for when the next one starts
(SimpleFSDP, arXiv 2411.00284, section 4.2), so that two buckets of whole weights, and one of gradients beside the one being
computed, are alive at once. A machine that prices nodes refines both: a gather that this leaves too little time starts earlier,
where that raises no peak of memory, and a reduction is waited for once it should be done. The order is made from the graph and
the prices alone, so every rank makes the same.
"""

import bisect
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from torch.fx import Graph, Node

from titan_lite.compiler.collectives import (
    collective_bytes,
    collectives,
    descendants,
    is_all_gather,
    kind_of,
    move_before,
    parameter_all_gathers,
    parameter_collectives,
    parameters_of,
    preparation,
    results_of,
    start_of,
    wait_of,
    waits_of,
)
from titan_lite.compiler.hardware import Machine
from titan_lite.compiler.timeline import computed_before, peak_bytes, shards_of


def overlap(graph: Graph, machine: Machine | None = None, *, fused: bool = True) -> int:
    """Move the parameters' collectives and their waits, in place; returns how many moved. fused: as in `Machine.cost`."""
    moved = start_gathers_early(graph, machine, fused=fused) + wait_for_reductions_late(graph, machine, fused=fused)
    graph.lint()
    return moved


def start_gathers_early(graph: Graph, machine: Machine | None = None, *, fused: bool = True) -> int:
    """Each all-gather, and what leads to it from graph inputs, goes before the wait of the one before it.

    With a machine: or as much earlier as it takes to be done when it is waited for, as estimated.
    """
    gathers = [node for node in parameter_all_gathers(graph) if parameters_of(node)]
    in_time = {} if machine is None else _places_in_time(graph, gathers, machine, fused)  # before anything moves
    moved = {following for current, following in itertools.pairwise(gathers) if move_gather_before(following, wait_of(current))}
    without = shards_of(graph)
    most = peak_bytes(graph, without) if in_time else 0
    last: Node | None = None  # no gather overtakes another: what is read first travels first
    for gather, place in in_time.items():
        if last is not None and last >= place:
            place = last.next
        if move_gather_before(gather, place, lambda: peak_bytes(graph, without) <= most):
            moved.add(gather)
        last = max(gather, *results_of(gather)) if results_of(gather) else gather
    if machine is not None and gathers:
        _prepare_meanwhile(gathers, machine, fused)
    return len(moved)


def _prepare_meanwhile(gathers: Sequence[Node], machine: Machine, fused: bool) -> None:
    """While the first gather travels, with nothing to compute yet, shards of the next ones are cast and put into buckets."""
    graph, wait = gathers[0].graph, wait_of(gathers[0])
    between = [node for node in graph.nodes if gathers[0] < node < wait]
    idle = machine.cost(gathers[0]) - sum(machine.cost(node, fused) for node in between if not parameters_of(node))
    most = peak_bytes(graph)
    for gather in gathers[1:]:
        leading = sorted(node for node in preparation(gather) or () if node > wait)
        idle -= sum(machine.cost(node, fused) for node in leading)
        if idle < 0:
            return
        if leading and not move_before(wait, leading, lambda: peak_bytes(graph) <= most):
            return


def move_gather_before(gather: Node, place: Node, keep: Callable[[], bool] = lambda: True) -> bool:
    """With what leads to it, and its results; whether it stood behind that place and, there, `keep` is true."""
    leading = preparation(gather) or []
    while place in leading:
        place = place.next
    return gather > place and move_before(place, (*leading, gather, *results_of(gather)), keep)


def _places_in_time(graph: Graph, gathers: Sequence[Node], machine: Machine, fused: bool) -> dict[Node, Node]:
    """The node before which each gather must start to be done in time, in order.

    From the last one to the first, each ends when it is needed or when the next one starts, and does not queue behind a reduction
    that would hold it up.
    """
    before = computed_before(graph, machine, fused)
    reductions = [(before[node], machine.cost(node), node) for node in parameter_collectives(graph) if not is_all_gather(node)]
    computing = [node for node in graph.nodes if node.op != "placeholder"]
    starts, result, following = [before[node] for node in computing], {}, float("inf")
    for gather in reversed(gathers):
        end = min(before[wait_of(gather)], following)
        start = end - machine.cost(gather)
        held_up = [reduction for reduction in reductions if reduction[0] <= start < reduction[0] + reduction[1]]
        place = computing[max(0, bisect.bisect_right(starts, start) - 1)]
        if held_up:
            start, _, place = held_up[0]
        following = start
        result[gather] = place
    return dict(reversed(result.items()))


def wait_for_reductions_late(graph: Graph, machine: Machine | None = None, *, fused: bool = True) -> int:
    """The wait of each reduction, and what comes of it, goes before the next reduction of its kind, the last one's to the end.

    With a machine: before the first one by which it is done, as estimated, while no more is on its way than two of the largest.
    But not where results are reduced again: those of norm weights over ranks of tensor parallelism, whose prices may differ.
    """
    reducing = [node for node in parameter_collectives(graph) if not is_all_gather(node)]
    if any(parameters_of(later) for node in reducing for later in descendants(node) if later is not node):
        machine = None
    moved = 0
    for kind in ("reduce_scatter", "all_reduce"):
        reductions = [node for node in reducing if kind_of(node) == kind]
        for current, following in _waiting_places(graph, reductions, machine, fused):
            late = sorted(node for node in descendants(*waits_of(current)) if node < following)
            if late and following not in descendants(current):
                for node in late:
                    following.prepend(node)
                moved += 1
    return moved


def _waiting_places(
    graph: Graph, reductions: Sequence[Node], machine: Machine | None, fused: bool
) -> Iterator[tuple[Node, Node]]:
    """Each reduction and the node before which it is waited for, in an order in which waits may be moved."""
    output = next(iter(reversed(graph.nodes)))
    if machine is None or not reductions:
        yield from zip(reductions, [*reductions[1:], output], strict=False)
        return
    mine, most = set(reductions), 2 * max(map(collective_bytes, reductions))
    computed, stalled, lane = computed_before(graph, machine, fused), 0.0, 0.0
    arrival: dict[Node, float] = {}
    travelling: deque[Node] = deque()
    for node in list(graph.nodes):
        now = computed[node] + stalled
        if node in mine:
            while travelling and (
                arrival[travelling[0]] <= now or sum(map(collective_bytes, travelling)) + collective_bytes(node) > most
            ):
                stalled += max(0.0, arrival[travelling[0]] - now)
                now = computed[node] + stalled
                yield travelling.popleft(), node
            travelling.append(node)
        if parameters_of(node):
            lane = arrival[node] = max(now, lane) + machine.cost(node)
        elif node.target is collectives.wait_tensor.default and start_of(node) in arrival and start_of(node) not in mine:
            stalled += max(0.0, arrival[start_of(node)] - now)
    for reduction in travelling:
        yield reduction, output
