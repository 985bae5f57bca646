"""Eager mode's collectives, as a pass on a graph: gathers start some reads ahead, reductions are waited for some later.

    before   w1 = wait(gather(s1)); y = f(x, w1); w2 = wait(gather(s2)); z = f(y, w2); ...
    after    a1 = gather(s1); a2 = gather(s2); ...; w1 = wait(a1); y = f(x, w1); w2 = wait(a2); ...

As distributed/eager.py does, once it knows the order.
"""

from torch.fx import Graph, Node

from titan_lite.compiler.collectives import is_all_gather, parameter_collectives, preparation, wait_of
from titan_lite.compiler.reordering import move_gather_before
from titan_lite.distributed.eager import Eager


def run_ahead(graph: Graph) -> None:
    mine = parameter_collectives(graph)
    gathers = [node for node in mine if is_all_gather(node) and preparation(node) is not None]
    for place, gather in enumerate(gathers[1:], 1):
        move_gather_before(gather, wait_of(gathers[max(0, place - Eager.IN_FLIGHT)]))
    reductions = [node for node in mine if not is_all_gather(node) and _is_used_later(node)]
    last = next(iter(reversed(graph.nodes)))
    for place, reduction in enumerate(reductions):
        later = reductions[place + Eager.IN_FLIGHT].next if place + Eager.IN_FLIGHT < len(reductions) else last
        later.prepend(wait_of(reduction))
    graph.lint()


def _is_used_later(reduction: Node) -> bool:
    """By the optimizer; what is cast, cut or reduced again is waited for at once."""
    return all(user.op == "output" for user in wait_of(reduction).users)
