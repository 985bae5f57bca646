"""Overlap: collectives start earlier and are waited for later, so that computation runs while they do.

    before   w1 = wait(all_gather(s1)); y = f(x, w1); w2 = wait(all_gather(s2)); z = f(y, w2)
    after    a1 = all_gather(s1); a2 = all_gather(s2); w1 = wait(a1); y = f(x, w1); w2 = wait(a2); z = f(y, w2)

A parameter bucket's all-gather starts before the wait of the one in use, and a reduction is waited for when the next one starts
(SimpleFSDP, arXiv 2411.00284, section 4.2). So at most two buckets of whole weights, and one of gradients beside the one being
computed, are alive at once. The order is made from the graph alone, so every rank makes the same.
"""

import itertools

from torch.fx import Graph, Node

from titan_lite.compiler.collectives import collectives, is_all_gather, parameter_of, preparation


def overlap(graph: Graph) -> int:
    """Move the parameters' collectives and their waits, in place; returns how many moved."""
    moved = start_gathers_early(graph) + wait_for_reductions_late(graph)
    graph.lint()
    return moved


def start_gathers_early(graph: Graph) -> int:
    """Each all-gather, and what leads to it from graph inputs, goes before the wait of the one before it."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    gathers = [node for node in graph.nodes if is_all_gather(node) and parameter_of(node) is not None]
    moved = 0
    for current, following in itertools.pairwise(gathers):
        leading = preparation(following)
        wait = _wait_of(current)
        if leading is None or order[wait] > order[following]:
            continue
        for node in sorted((*leading, following), key=lambda node: order[node]):
            if order[node] > order[wait]:
                wait.prepend(node)
        moved += 1
    return moved


def wait_for_reductions_late(graph: Graph) -> int:
    """The wait of each reduction, and what comes of it, goes before the next reduction of its kind, the last one's to the end."""
    moved = 0
    for target in (collectives.reduce_scatter_tensor.default, collectives.all_reduce.default):
        order = {node: place for place, node in enumerate(graph.nodes)}
        reductions = [node for node in graph.nodes if node.target is target and parameter_of(node) is not None]
        output = next(iter(reversed(graph.nodes)))
        for current, following in zip(reductions, [*reductions[1:], output], strict=False):
            late = [node for node in _descendants(_wait_of(current)) if order[node] < order[following]]
            if following in late or not late:
                continue
            for node in sorted(late, key=lambda node: order[node]):
                following.prepend(node)
            moved += 1
    return moved


def _wait_of(collective: Node) -> Node:
    (wait,) = (user for user in collective.users if user.target is collectives.wait_tensor.default)
    return wait


def _descendants(start: Node) -> list[Node]:
    """start and all that is computed from it, but for the graph's output."""
    found, open_nodes = {start}, [start]
    while open_nodes:
        for user in open_nodes.pop().users:
            if user.op != "output" and user not in found:
                found.add(user)
                open_nodes.append(user)
    return list(found)
