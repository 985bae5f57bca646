"""Pin the order of collectives, waits, products and attention in Inductor's code to the graph's.

    config_patches = {"_pre_fusion_custom_pass": PinnedOrder(), "reorder_for_locality": False}

    graph     a1 = all_gather(s1); t = 2 * s2; a2 = all_gather(t)
              w1 = wait(a1); y = x @ w1; z = relu(w1 + s2)
    unpinned  a1 = all_gather(s1)
              w1 = wait(a1); y = x @ w1; (t, z) = kernel(s2, w1); a2 = all_gather(t)

Inductor fuses pointwise operators and reductions into kernels, and a kernel runs after the waits
for all of its inputs. A collective that the passes start before a product may then start after it,
and overlap less computation than the compile report says. Before fusion, this pass adds a
dependency from each operator that Inductor calls (a collective, a wait, a product, attention) to
the one before it. Fusions that need another order are then impossible. The dependencies are those
that Inductor itself adds between collectives: they order nodes, but keep no buffer alive.

torch's control_dependencies.preserve_node_ordering does the same to FX nodes, each in a subgraph of
its own. It names a dependency by the buffer of the node's result: that of a wait is the
collective's, so nothing is ordered behind a wait, and torch 2.11 ignores a node with several
results, such as attention.
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
        earlier = next(iter(before.get_buffer_names()))
        later = next(iter(node.get_buffer_names()))
        node.add_fake_dep(WeakDep(earlier, mutating_buf=later, is_fake=True))
    V.graph.scheduler.compute_ancestors()  # fusion reads these
    return len(pinned)


def is_pinned(node: BaseSchedulerNode) -> bool:
    """Return whether `node` is a call: collective, wait, matrix product, attention.

    One of the several results of a call is none.
    """
    return (node.is_extern() or node.is_template()) and not isinstance(node.node, ir.MultiOutput)


def record_order(graph: Graph) -> None:
    """Record the order of `graph` for `restore_order`, in meta["position"] of its nodes."""
    for position, node in enumerate(graph.nodes):
        node.meta["position"] = position


def restore_order(graph: Graph) -> None:
    """Restore the recorded order. A new node goes behind its inputs.

    When Inductor fuses a collective and a product, it inserts the result where the collective
    started, and moves the inputs of the product before it. Waits then precede collectives that had
    started before them.
    """
    first = next(iter(graph.nodes))
    order = _in_recorded_order(graph)
    first.prepend(order[0])
    for before, node in itertools.pairwise(order):
        before.append(node)
    graph.lint()


def _in_recorded_order(graph: Graph) -> list[Node]:
    """Return the nodes in the recorded order, each behind its inputs (Kahn's algorithm)."""
    keys: dict[Node, tuple[float, int]] = {}  # (recorded position, position now)
    for number, node in enumerate(graph.nodes):
        behind_inputs = max((keys[source][0] for source in node.all_input_nodes), default=-1.0)
        position = node.meta.get("position", behind_inputs)
        keys[node] = (-1.0 if node.op == "placeholder" else position, number)

    inputs_left = {node: len(node.all_input_nodes) for node in graph.nodes}
    ready = [(*keys[node], node) for node, count in inputs_left.items() if count == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        *_, node = heapq.heappop(ready)
        order.append(node)
        for user in node.users:
            inputs_left[user] -= 1
            if inputs_left[user] == 0:
                heapq.heappush(ready, (*keys[user], user))
    return order


# Inductor caches code that a scheduler pass has changed only if the pass is of this class, which
# torch 2.11 does not have.
_SchedulerPass: Any = getattr(custom_graph_pass, "CustomSchedulerPass", CustomGraphPass)


class PinnedOrder(_SchedulerPass):
    """Run pin_order as a pass of Inductor's scheduler, with a key for its cache."""

    def __call__(self, nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
        pin_order(nodes)
        return nodes

    def uuid(self) -> bytes:
        return get_hash_for_files((__file__,))
