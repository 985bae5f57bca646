"""Overlap collectives with computation: start them earlier, and wait for them later.

    before   w1 = wait(all_gather(s1)); y = f(x, w1); w2 = wait(all_gather(s2)); z = f(y, w2)
    after    a1 = all_gather(s1); a2 = all_gather(s2); w1 = wait(a1); y = f(x, w1); w2 = wait(a2); z = f(y, w2)

The all-gather of a bucket starts before the wait for the bucket in use. The wait for a reduction
comes before the next one starts (SimpleFSDP, arXiv 2411.00284, section 4.2). Two buckets of
unsharded weights are then alive at once, and one bucket of gradients beside the one being computed.
The costs of a machine refine both rules: an all-gather with too little time starts earlier, if this
does not raise peak memory, and a reduction is waited for once it should be done. The order depends
on the graph and the costs alone, so it is the same on every rank.
"""

import bisect
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from torch.fx import Graph, Node

from titan_lite.cost.collectives import (
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
    start_of,
    wait_of,
    waits_of,
)
from titan_lite.cost.machine import Machine
from titan_lite.cost.op_cost import node_seconds
from titan_lite.cost.timeline import computed_before, peak_bytes, shards_of


def overlap(graph: Graph, machine: Machine | None = None, *, fused: bool = True) -> int:
    """Move the parameters' collectives and their waits, in place. Return how many moved.

    fused: as in `Machine.cost`.
    """
    moved = start_gathers_early(graph, machine, fused=fused) + wait_for_reductions_late(
        graph, machine, fused=fused
    )
    graph.lint()
    return moved


def start_gathers_early(graph: Graph, machine: Machine | None = None, *, fused: bool = True) -> int:
    """Move each all-gather, with its preparation, before the wait for the previous one.

    Return how many moved.

    With a machine, start it earlier if it would otherwise be late, as estimated.
    """
    gathers = [node for node in parameter_all_gathers(graph) if parameters_of(node)]
    targets = (
        {} if machine is None else _latest_starts(graph, gathers, machine, fused)
    )  # before anything moves
    moved = {
        following
        for current, following in itertools.pairwise(gathers)
        if move_gather_before(following, wait_of(current))
    }
    without = shards_of(graph)
    limit = peak_bytes(graph, without) if targets else 0
    last: Node | None = None  # all-gathers keep their order: what is read first is gathered first
    for gather, place in targets.items():
        if last is not None and place <= last < gather:
            place = last.next
        if move_gather_before(gather, place, lambda: peak_bytes(graph, without) <= limit):
            moved.add(gather)
        last = gather
    if machine is not None and gathers:
        _prepare_during_first(gathers, machine, fused)
    return len(moved)


def _prepare_during_first(gathers: Sequence[Node], machine: Machine, fused: bool) -> None:
    """Cast and bucket the shards of later all-gathers during the first one, when there is nothing
    else to compute.
    """
    graph = gathers[0].graph
    wait = wait_of(gathers[0])
    between = [node for node in graph.nodes if gathers[0] < node < wait]
    idle = node_seconds(gathers[0], machine) - sum(
        node_seconds(node, machine, fused) for node in between if not parameters_of(node)
    )
    limit = peak_bytes(graph)
    for gather in gathers[1:]:
        leading = sorted(node for node in preparation(gather) or () if node > wait)
        idle -= sum(node_seconds(node, machine, fused) for node in leading)
        if idle < 0:
            return
        if leading and not move_before(wait, leading, lambda: peak_bytes(graph) <= limit):
            return


def move_gather_before(gather: Node, place: Node, keep: Callable[[], bool] = lambda: True) -> bool:
    """Move an all-gather, with its preparation, before `place`.

    keep and result: as in `move_before`.
    """
    leading = preparation(gather) or []
    while place in leading:
        place = place.next
    return gather > place and move_before(place, (*leading, gather), keep)


def _latest_starts(
    graph: Graph, gathers: Sequence[Node], machine: Machine, fused: bool
) -> dict[Node, Node]:
    """Return the node before which each all-gather must start to be done in time, in graph order.

    From last to first, each all-gather ends when it is needed or when the next one starts. If a
    reduction would delay it, it starts before the reduction.
    """
    before = computed_before(graph, machine, fused)
    reductions = [
        (before[node], node_seconds(node, machine), node)
        for node in parameter_collectives(graph)
        if not is_all_gather(node)
    ]
    computing = [node for node in graph.nodes if node.op != "placeholder"]
    starts, result, following = (
        [before[node] for node in computing],
        dict[Node, Node](),
        float("inf"),
    )
    for gather in reversed(gathers):
        end = min(before[wait_of(gather)], following)
        start = end - node_seconds(gather, machine)
        delaying = [
            reduction
            for reduction in reductions
            if reduction[0] <= start < reduction[0] + reduction[1]
        ]
        place = computing[max(0, bisect.bisect_right(starts, start) - 1)]
        if delaying:
            start, _, place = delaying[0]
        following = start
        result[gather] = place
    return dict(reversed(result.items()))


def wait_for_reductions_late(
    graph: Graph, machine: Machine | None = None, *, fused: bool = True
) -> int:
    """Move the wait for each reduction, with its users, to the next reduction of its kind, or to
    the end. Return how many moved.

    With a machine, wait once the reduction should be done, or before more than twice the bytes of
    the largest are in flight. This is off if results are reduced again (norm weights over
    tensor-parallel ranks), since the costs of these ranks may differ.
    """
    reducing = [node for node in parameter_collectives(graph) if not is_all_gather(node)]
    if any(
        parameters_of(later)
        for node in reducing
        for later in descendants(node)
        if later is not node
    ):
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
    """Yield each reduction and the node before which to wait for it, in an order that keeps moves
    valid.
    """
    output = next(iter(reversed(graph.nodes)))
    if machine is None or not reductions:
        yield from zip(reductions, [*reductions[1:], output], strict=False)
        return
    mine, limit = set(reductions), 2 * max(map(collective_bytes, reductions))
    computed, stalled, busy_until = computed_before(graph, machine, fused), 0.0, 0.0
    arrival: dict[Node, float] = {}
    in_flight: deque[Node] = deque()
    for node in list(graph.nodes):
        now = computed[node] + stalled
        if node in mine:
            while in_flight and (
                arrival[in_flight[0]] <= now
                or sum(map(collective_bytes, in_flight)) + collective_bytes(node) > limit
            ):
                stalled += max(0.0, arrival[in_flight[0]] - now)
                now = computed[node] + stalled
                yield in_flight.popleft(), node
            in_flight.append(node)
        if parameters_of(node):
            busy_until = arrival[node] = max(now, busy_until) + node_seconds(node, machine)
        elif (
            node.target is collectives.wait_tensor.default
            and start_of(node) in arrival
            and start_of(node) not in mine
        ):
            stalled += max(0.0, arrival[start_of(node)] - now)
    for reduction in in_flight:
        yield reduction, output
