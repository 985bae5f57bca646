"""Pin the order of collectives, waits, matrix products and attention in Inductor's code to that of
the graph.

    config_patches = {"_pre_fusion_custom_pass": PinnedOrder(), "reorder_for_locality": False}

    graph     a1 = all_gather(s1); a2 = all_gather(2 * s2); w1 = wait(a1); y = x @ w1; z = relu(w1 + s2); ...
    unpinned  a1 = all_gather(s1); w1 = wait(a1); y = x @ w1; (2 * s2, z) = kernel(s2, w1); a2 = all_gather(...); ...

Inductor fuses pointwise operators and reductions into kernels, and a kernel runs after the waits
for all of its inputs. A collective that the passes start before a product may then start after it,
and overlap less computation than the compile report says. Before fusion, this pass adds a dependency from
each operator that Inductor calls (a collective, a wait, a product, attention) to the one before it.
Fusions that need another order are then impossible. The dependencies are those that Inductor itself
adds between collectives: they order nodes, but keep no buffer alive.

torch's control_dependencies.preserve_node_ordering does the same to FX nodes, each in a subgraph of
its own. It names a dependency by the buffer of the node's result: that of a wait is the
collective's, so nothing is ordered behind a wait, and torch
2.11 ignores a node with several results, such as attention.
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
    """Keep the order of those `nodes` that are extern kernels or templates. Return their number."""
    pinned = [node for node in nodes if is_pinned(node)]
    for before, node in itertools.pairwise(pinned):
        earlier, later = (next(iter(each.get_buffer_names())) for each in (before, node))
        node.add_fake_dep(WeakDep(earlier, mutating_buf=later, is_fake=True))
    V.graph.scheduler.compute_ancestors()  # fusion reads these
    return len(pinned)


def record_order(graph: Graph) -> None:
    """Record the order of `graph` for `restore_order`."""
    for place, node in enumerate(graph.nodes):
        node.meta["place"] = place


def restore_order(graph: Graph) -> None:
    """Restore the recorded order. A new node goes behind its inputs.

    When Inductor fuses a collective and a product, it inserts the result where the collective
    started, and moves the inputs of the product before it. Waits then precede collectives that had
    started before them.
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
    """Return whether `node` is a call (collective, wait, matrix product, attention), and not one of
    its several results.
    """
    return (node.is_extern() or node.is_template()) and not isinstance(node.node, ir.MultiOutput)


# Inductor caches code that a scheduler pass has changed only if the pass is of this class, which
# torch 2.11 does not have.
_SchedulerPass: Any = getattr(custom_graph_pass, "CustomSchedulerPass", CustomGraphPass)


class PinnedOrder(_SchedulerPass):
    """Run pin_order as a pass of Inductor's scheduler, with a key for its cache."""

    def __call__(self, nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
        pin_order(nodes)
        return nodes

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))
