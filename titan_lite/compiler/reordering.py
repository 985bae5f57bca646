"""Overlap: collectives start earlier and are waited for later, so that computation runs while they do.

    before   w1 = wait(all_gather(s1)); y = f(x, w1); w2 = wait(all_gather(s2)); z = f(y, w2)
    after    a1 = all_gather(s1); a2 = all_gather(s2); w1 = wait(a1); y = f(x, w1); w2 = wait(a2); z = f(y, w2)

A parameter bucket's all-gather starts before the wait of the one in use, and a reduction is waited for when the next one starts
(SimpleFSDP, arXiv 2411.00284, section 4.2). So at most two buckets of whole weights, and one of gradients beside the one being
computed, are alive at once. The order is made from the graph alone, so every rank makes the same.
"""

import itertools
from collections import deque
from collections.abc import Iterator, Sequence

from torch.fx import Graph, Node

from titan_lite.compiler.collectives import collective_bytes, collectives, is_all_gather, parameters_of, preparation, wait_of
from titan_lite.compiler.hardware import Machine


def overlap(graph: Graph, machine: Machine | None = None, *, fused: bool = True) -> int:
    """Move the parameters' collectives and their waits, in place; returns how many moved."""
    moved = start_gathers_early(graph) + wait_for_reductions_late(graph, machine, fused=fused)
    graph.lint()
    return moved


def start_gathers_early(graph: Graph) -> int:
    """Each all-gather, and what leads to it from graph inputs, goes before the wait of the one before it."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    gathers = [node for node in graph.nodes if is_all_gather(node) and parameters_of(node)]
    moved = 0
    for current, following in itertools.pairwise(gathers):
        leading = preparation(following)
        wait = wait_of(current)
        if leading is None or order[wait] > order[following]:
            continue
        for node in sorted((*leading, following), key=lambda node: order[node]):
            if order[node] > order[wait]:
                wait.prepend(node)
        moved += 1
    return moved


def wait_for_reductions_late(graph: Graph, machine: Machine | None = None, *, fused: bool = True) -> int:
    """The wait of each reduction, and what comes of it, goes before the next reduction of its kind, the last one's to the end.

    With a machine: before the first one by which it is done, as estimated, while no more is on its way than two of the largest.
    """
    moved = 0
    for target in (collectives.reduce_scatter_tensor.default, collectives.all_reduce.default):
        order = {node: place for place, node in enumerate(graph.nodes)}
        reductions = [node for node in graph.nodes if node.target is target and parameters_of(node)]
        for current, following in _waiting_places(graph, reductions, machine, fused):
            late = [node for node in _descendants(wait_of(current)) if order[node] < order[following]]
            if following in late or not late:
                continue
            for node in sorted(late, key=lambda node: order[node]):
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
    most = 2 * max(map(collective_bytes, reductions))
    now = lane = 0.0
    arrival: dict[Node, float] = {}
    travelling: deque[Node] = deque()
    for node in list(graph.nodes):
        if node in reductions:
            while travelling and (
                arrival[travelling[0]] <= now or sum(map(collective_bytes, travelling)) + collective_bytes(node) > most
            ):
                now = max(now, arrival[travelling[0]])
                yield travelling.popleft(), node
            travelling.append(node)
        if parameters_of(node):
            lane = arrival[node] = max(now, lane) + machine.cost(node)
        elif node.target is collectives.wait_tensor.default and node.args[0] in arrival and node.args[0] not in reductions:
            now = max(now, arrival[node.args[0]])
        else:
            now += machine.cost(node, fused)
    for reduction in travelling:
        yield reduction, output


def _descendants(start: Node) -> list[Node]:
    """start and all that is computed from it, but for the graph's output."""
    found, open_nodes = {start}, [start]
    while open_nodes:
        for user in open_nodes.pop().users:
            if user.op != "output" and user not in found:
                found.add(user)
                open_nodes.append(user)
    return list(found)
