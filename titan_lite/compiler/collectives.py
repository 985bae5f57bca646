"""Questions about an FX graph's collectives."""

import torch
from torch.fx import Graph, Node

collectives = torch.ops._c10d_functional


def is_all_gather(node: Node) -> bool:
    return node.target is collectives.all_gather_into_tensor.default


def parameter_all_gathers(graph: Graph) -> list[Node]:
    """The all-gathers by which SimpleFSDP reads parameters: what they gather is a graph input, cast and padded at most."""
    return [node for node in graph.nodes if is_all_gather(node) and _from_inputs_alone(node.all_input_nodes[0])]


def _from_inputs_alone(node: Node) -> bool:
    seen: set[Node] = set()
    open_nodes = [node]
    while open_nodes:
        node = open_nodes.pop()
        if len(seen) > 16:  # casting and padding a shard takes a handful of nodes; anything longer is computation
            return False
        if node not in seen and node.op != "placeholder":
            seen.add(node)
            open_nodes += node.all_input_nodes
    return True
