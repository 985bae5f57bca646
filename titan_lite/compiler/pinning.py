"""Pinning: the order of collectives, waits, matrix products and attention is that of the graph in Inductor's code, too.

    config_patches = {"_pre_fusion_custom_pass": PinnedOrder(), "reorder_for_locality": False}

    graph     a1 = all_gather(s1); a2 = all_gather(2 * s2); w1 = wait(a1); y = x @ w1; z = relu(w1 + s2); ...
    unpinned  a1 = all_gather(s1); w1 = wait(a1); y = x @ w1; (2 * s2, z) = kernel(s2, w1); a2 = all_gather(...); ...

Inductor fuses pointwise operators and reductions into kernels, and a kernel runs after the waits of all that its members read. So
a collective that the passes start before a product may start behind it, and hide under less than the receipt says. This pass adds
a dependency from each operator that Inductor calls (a collective, a wait, a product, attention) to the one before it, before
anything is fused; what would need another order is then not fused. The dependencies are those that Inductor itself puts between
collectives: they order, and keep no buffer alive.
"""

import heapq
import itertools
from collections.abc import Sequence
from typing import Any

from torch._inductor import custom_graph_pass, ir
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.dependencies import WeakDep
from torch._inductor.scheduler import BaseSchedulerNode
from torch._inductor.virtualized import V
from torch.fx import Graph, Node


def pin_order(nodes: Sequence[BaseSchedulerNode]) -> int:
    """Make Inductor keep the order of the operators among `nodes` that it calls and does not write. Returns how many they are."""
    pinned = [node for node in nodes if is_pinned(node)]
    for before, node in itertools.pairwise(pinned):
        done, own = (next(iter(each.get_buffer_names())) for each in (before, node))
        node.add_fake_dep(WeakDep(done, mutating_buf=own, is_fake=True))
    V.graph.scheduler.compute_ancestors()  # by which fusion knows what must not be fused
    return len(pinned)


def note_places(graph: Graph) -> None:
    """Remember the order of `graph`, for `restore_places`."""
    for place, node in enumerate(graph.nodes):
        node.meta["place"] = place


def restore_places(graph: Graph) -> None:
    """Put the nodes back in the order that was noted; a new node goes behind all that it reads.

    Where Inductor puts a collective and a product into one operator, it puts that where the collective started, and what the
    product reads before it: waits come before collectives that started ahead of them.
    """
    places: dict[Node, tuple[float, int]] = {}
    for number, node in enumerate(graph.nodes):
        after = max((places[each][0] for each in node.all_input_nodes), default=-1.0)
        places[node] = -1.0 if node.op == "placeholder" else node.meta.get("place", after), number
    missing = {node: len(node.all_input_nodes) for node in graph.nodes}
    ready = [(*places[node], node) for node, count in missing.items() if not count]
    heapq.heapify(ready)
    first, placed = next(iter(graph.nodes)), []
    while ready:
        *_, node = heapq.heappop(ready)
        placed.append(node)
        for user in node.users:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, (*places[user], user))
    first.prepend(placed[0])
    for before, node in itertools.pairwise(placed):
        before.append(node)
    graph.lint()


def is_pinned(node: BaseSchedulerNode) -> bool:
    """True for collectives, waits, matrix products, attention and the like; not for one of several results of these."""
    return (node.is_extern() or node.is_template()) and not isinstance(node.node, ir.MultiOutput)


# Inductor caches what a pass of its scheduler has changed if the pass is of this class, which torch 2.11 does not have.
_SchedulerPass: Any = getattr(custom_graph_pass, "CustomSchedulerPass", CustomGraphPass)


class PinnedOrder(_SchedulerPass):
    """pin_order as Inductor wants it: with what its cache knows of it."""

    def __call__(self, nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
        pin_order(nodes)
        return nodes

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))
