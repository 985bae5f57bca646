"""Questions about an FX graph's collectives."""

import torch
from torch.fx import Graph, Node

collectives = torch.ops._c10d_functional
aten = torch.ops.aten
# What SimpleFSDP does to a shard before gathering it, in the words of the graph: casting and padding.
PREPARATION = frozenset(
    {
        aten._to_copy.default,
        torch.ops.prims.convert_element_type.default,
        aten.cat.default,
        aten.new_zeros.default,
        aten.full.default,
        aten.constant_pad_nd.default,
        aten.view.default,
        aten.alias.default,
        aten.detach.default,
    }
)


def is_all_gather(node: Node) -> bool:
    return node.target is collectives.all_gather_into_tensor.default


def parameter_all_gathers(graph: Graph) -> dict[Node, list[Node]]:
    """The all-gathers by which SimpleFSDP reads parameters, each with the nodes that prepare its shard, a graph input."""
    found = {node: _preparation(node) for node in graph.nodes if is_all_gather(node)}
    return {gather: nodes for gather, nodes in found.items() if nodes is not None}


def _preparation(gather: Node) -> list[Node] | None:
    """The nodes between graph inputs and `gather`; None where they compute anything, so that it gathers no parameter."""
    found: list[Node] = []
    open_nodes = list(gather.all_input_nodes)
    while open_nodes:
        node = open_nodes.pop()
        if node.op == "placeholder" or node in found:
            continue
        if node.target not in PREPARATION:
            return None
        found.append(node)
        open_nodes += node.all_input_nodes
    return found
