"""Questions about an FX graph's collectives."""

import torch
from torch.fx import Graph, Node

collectives = torch.ops._c10d_functional
aten = torch.ops.aten
# What is done to shards before they are gathered, in the words of the graph: casting, padding, putting them into a bucket.
PREPARATION = frozenset(
    {
        aten._to_copy.default,
        torch.ops.prims.convert_element_type.default,
        aten.cat.default,
        aten.new_zeros.default,
        aten.full.default,
        aten.constant_pad_nd.default,
        aten.view.default,
        aten.reshape.default,
        aten.alias.default,
        aten.detach.default,
    }
)
KINDS = {
    collectives.all_gather_into_tensor.default: "all_gather",
    collectives.reduce_scatter_tensor.default: "reduce_scatter",
    collectives.all_reduce.default: "all_reduce",
}


def is_all_gather(node: Node) -> bool:
    return node.target is collectives.all_gather_into_tensor.default


def parameter_of(node: Node) -> str | None:
    """The FQN of the parameter that a collective of SimpleFSDP is for; None for any other node."""
    return node.meta.get("custom", {}).get("fqn") if node.target in KINDS else None


def group_of(node: Node) -> str:
    """Name of the process group of one of KINDS."""
    return str(node.args[-1])


def group_size(node: Node) -> int:
    """Ranks of an all-gather or a reduce-scatter."""
    size = node.args[1] if is_all_gather(node) else node.args[2]
    assert isinstance(size, int)
    return size


def parameter_all_gathers(graph: Graph) -> dict[Node, list[Node]]:
    """The all-gathers by which SimpleFSDP reads parameters, each with the nodes that prepare its shard, a graph input."""
    found = {node: preparation(node) for node in graph.nodes if is_all_gather(node)}
    return {gather: nodes for gather, nodes in found.items() if nodes is not None}


def preparation(gather: Node) -> list[Node] | None:
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
