"""Overlap the collectives of parameters with computation: start earlier, and wait later.

    before   w1 = wait(all_gather(s1)); y = f(x, w1)
             w2 = wait(all_gather(s2)); z = f(y, w2)
    after    a1 = all_gather(s1); a2 = all_gather(s2)
             w1 = wait(a1); y = f(x, w1); w2 = wait(a2); z = f(y, w2)

The all-gather of a bucket starts before the wait for the bucket in use. The wait for a reduction
comes before the next one starts (SimpleFSDP, arXiv 2411.00284, section 4.2). Two buckets of
unsharded weights are then alive at once, and one bucket of gradients beside the one being computed.
The costs of a machine refine both rules: an all-gather with too little time starts earlier, if this
does not raise peak memory, and a reduction is waited for once it should be done. Costs may differ
by rank (a rank of context parallelism attends to fewer keys): the first rank decides in which order
collectives start.

fused, here: as in `node_seconds`.
"""

import bisect
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from torch.fx import Graph, Node

from titan_lite.collectives import collectives
from titan_lite.compile.graph import move_before
from titan_lite.compile.rank_agreement import first_ranks_choice
from titan_lite.compile.settings import PassSettings
from titan_lite.cost.machine import Machine
from titan_lite.cost.op_cost import node_seconds
from titan_lite.cost.timeline import computed_before, peak_bytes
from titan_lite.graph import (
    KINDS,
    collective_bytes,
    descendants,
    is_all_gather,
    kind_of,
    parameter_all_gathers,
    parameter_collectives,
    parameters_of,
    preparation,
    shards_of,
    start_of,
    wait_of,
    waits_of,
)


def overlap_collectives(graph: Graph, settings: PassSettings) -> int:
    """Move the parameters' collectives and their waits, in place. Return the number of moves."""
    nodes = list(graph.nodes)
    started = _collectives(graph)
    moves = start_gathers_early(graph, settings.machine, fused=settings.fused)
    number = {node: index for index, node in enumerate(started)}
    own = [number[node] for node in _collectives(graph)]
    chosen = first_ranks_choice(own, settings.ranks)
    # Of another number nothing can be taken: `check_same_order` says who differs.
    if chosen != own and len(chosen) == len(own):
        for node in nodes[:-1]:  # back to where they were
            nodes[-1].prepend(node)
        moves = start_gathers_in_order(graph, [started[index] for index in chosen])
    moves += wait_for_reductions_late(graph, settings.machine, fused=settings.fused)
    graph.lint()
    return moves


def _collectives(graph: Graph) -> list[Node]:
    """Return all collectives in the order in which they start."""
    return [node for node in graph.nodes if node.target in KINDS]


# All-gathers


def _gathers_of_parameters(graph: Graph) -> list[Node]:
    return [node for node in parameter_all_gathers(graph) if parameters_of(node)]


def start_gathers_early(graph: Graph, machine: Machine | None = None, *, fused: bool = True) -> int:
    """Move each all-gather, with its preparation, before the wait for the previous one.

    Return how many moved. With a machine, start it earlier if it would otherwise be late, as
    estimated.
    """
    gathers = _gathers_of_parameters(graph)
    latest_starts: dict[Node, Node] = {}
    if machine is not None:  # before anything moves
        latest_starts = _latest_starts(graph, gathers, machine, fused)

    moved = set()
    for current, following in itertools.pairwise(gathers):
        if move_gather_before(following, wait_of(current)):
            moved.add(following)
    moved |= _start_in_time(graph, latest_starts)
    if machine is not None and gathers:
        _prepare_during_first(gathers, machine, fused)
    return len(moved)


def start_gathers_in_order(graph: Graph, order: Sequence[Node]) -> int:
    """Move all-gathers as without a machine; then each one before the collective that is behind it
    in `order`.

    order: all collectives, as the first rank starts them. Return the number of moves.
    """
    moves = start_gathers_early(graph)
    gathers = _gathers_of_parameters(graph)
    for node, following in reversed(list(itertools.pairwise(order))):
        if node in gathers:
            moves += move_gather_before(node, following)
    return moves


def move_gather_before(
    gather: Node, target: Node, accepted: Callable[[], bool] | None = None
) -> bool:
    """Move an all-gather, with its preparation, before `target`.

    accepted and result: as in `move_before`.
    """
    leading = preparation(gather) or []
    while target in leading:
        target = target.next
    return gather > target and move_before(target, (*leading, gather), accepted)


def _latest_starts(
    graph: Graph, gathers: Sequence[Node], machine: Machine, fused: bool
) -> dict[Node, Node]:
    """Return the node before which each all-gather must start to be done in time, in graph order.

    From last to first, each all-gather ends when it is needed or when the next one starts. If a
    reduction would delay it, it starts before the reduction.
    """
    before = computed_before(graph, machine, fused)
    reduction_seconds = {
        node: node_seconds(node, machine)
        for node in parameter_collectives(graph)
        if not is_all_gather(node)
    }
    computing = [node for node in graph.nodes if node.op != "placeholder"]
    starts = [before[node] for node in computing]
    targets: dict[Node, Node] = {}
    next_start = float("inf")
    for gather in reversed(gathers):
        end = min(before[wait_of(gather)], next_start)
        start = end - node_seconds(gather, machine)
        target = computing[max(0, bisect.bisect_right(starts, start) - 1)]
        for reduction, seconds in reduction_seconds.items():
            if before[reduction] <= start < before[reduction] + seconds:
                start = before[reduction]
                target = reduction
                break
        next_start = start
        targets[gather] = target
    return dict(reversed(targets.items()))


def _start_in_time(graph: Graph, latest_starts: dict[Node, Node]) -> set[Node]:
    """Move each all-gather before its target in `latest_starts`, unless this raises peak memory.

    Return those that moved. All-gathers keep their order: what is read first is gathered first.
    """
    if not latest_starts:
        return set()
    shard_work = shards_of(graph)
    limit = peak_bytes(graph, shard_work)
    moved = set()
    previous: Node | None = None
    for gather, target in latest_starts.items():
        if previous is not None and target <= previous < gather:
            target = previous.next
        if move_gather_before(gather, target, lambda: peak_bytes(graph, shard_work) <= limit):
            moved.add(gather)
        previous = gather
    return moved


def _prepare_during_first(gathers: Sequence[Node], machine: Machine, fused: bool) -> None:
    """Cast and bucket the shards of later all-gathers during the first one.

    There is nothing else to compute. Stop where this would raise peak memory or take longer.
    """
    graph = gathers[0].graph
    wait = wait_of(gathers[0])
    meanwhile = [node for node in graph.nodes if gathers[0] < node < wait]
    idle = node_seconds(gathers[0], machine) - sum(
        node_seconds(node, machine, fused) for node in meanwhile if not parameters_of(node)
    )
    limit = peak_bytes(graph)
    for gather in gathers[1:]:
        leading = sorted(node for node in preparation(gather) or () if node > wait)
        idle -= sum(node_seconds(node, machine, fused) for node in leading)
        if idle < 0:
            return
        if leading and not move_before(wait, leading, lambda: peak_bytes(graph) <= limit):
            return


# Reductions


def wait_for_reductions_late(
    graph: Graph, machine: Machine | None = None, *, fused: bool = True
) -> int:
    """Move the wait for each reduction to the next reduction of its kind, or to the end.

    Its users move along. Return how many moved.

    With a machine, wait once the reduction should be done, or before more than twice the bytes of
    the largest are in flight. This is off if results are reduced again (norm weights over
    tensor-parallel ranks), since the costs of these ranks may differ.
    """
    all_reductions = [node for node in parameter_collectives(graph) if not is_all_gather(node)]
    if any(_is_reduced_again(node) for node in all_reductions):
        machine = None
    moved = 0
    for kind in ("reduce_scatter", "all_reduce"):
        reductions = [node for node in all_reductions if kind_of(node) == kind]
        if machine is None or not reductions:
            targets = _before_the_next(graph, reductions)
        else:
            targets = _when_done(graph, reductions, machine, fused)
        for reduction, target in targets:
            late = sorted(node for node in descendants(*waits_of(reduction)) if node < target)
            if late and target not in descendants(reduction):
                for node in late:
                    target.prepend(node)
                moved += 1
    return moved


def _is_reduced_again(reduction: Node) -> bool:
    return any(parameters_of(node) for node in descendants(reduction) if node is not reduction)


def _before_the_next(graph: Graph, reductions: Sequence[Node]) -> Iterator[tuple[Node, Node]]:
    """Yield each reduction and the next one, before which to wait for it."""
    output = next(iter(reversed(graph.nodes)))
    yield from itertools.pairwise([*reductions, output])


def _when_done(
    graph: Graph, reductions: Sequence[Node], machine: Machine, fused: bool
) -> Iterator[tuple[Node, Node]]:
    """Yield each reduction and the one before which to wait for it.

    This is the first that starts when it should be done, or when too many bytes are in flight.
    The order of the pairs keeps moves valid.
    """
    own = set(reductions)
    limit = 2 * max(map(collective_bytes, reductions))
    computed = computed_before(graph, machine, fused)
    waited = 0.0  # seconds in which computation waited so far
    busy_until = 0.0  # when the collectives started so far are done
    done: dict[Node, float] = {}  # when each collective of parameters is done
    in_flight: deque[Node] = deque()
    for node in list(graph.nodes):
        now = computed[node] + waited
        if node in own:
            while in_flight:
                oldest = in_flight[0]
                nbytes = sum(map(collective_bytes, in_flight)) + collective_bytes(node)
                if done[oldest] > now and nbytes <= limit:
                    break
                waited += max(0.0, done[oldest] - now)
                now = computed[node] + waited
                yield in_flight.popleft(), node
            in_flight.append(node)
        if parameters_of(node):
            busy_until = max(now, busy_until) + node_seconds(node, machine)
            done[node] = busy_until
        elif node.target is collectives.wait_tensor.default:
            start = start_of(node)
            if start in done and start not in own:
                waited += max(0.0, done[start] - now)
    output = next(iter(reversed(graph.nodes)))
    for reduction in in_flight:
        yield reduction, output
