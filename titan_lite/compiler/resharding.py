"""Reshard after forward, as a pass on the joint graph: gathered weights are recomputed in backward and not saved.

    before   forward: w = wait(all_gather(shard)); y = x @ w.T; saves w      backward: dx = dy @ w
    after    forward: w = wait(all_gather(shard)); y = x @ w.T; saves shard  backward: w = wait(all_gather(shard)); dx = dy @ w

Without it, the min-cut partitioner keeps every gathered weight, since it takes collectives for expensive. It reads tags:
SimpleFSDP paper (arXiv 2411.00284), section on memory.
"""

import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from titan_lite.compiler.collectives import collectives, parameter_all_gathers

# The partitioner compares this number between regions of activation checkpointing; ours lies after all of them.
REGION = 1_000_000
aten = torch.ops.aten
VIEWS = frozenset(
    {
        aten.slice.Tensor,
        aten.view.default,
        aten.t.default,
        aten.permute.default,
        aten.transpose.int,
        aten.alias.default,
        aten.detach.default,
        collectives.wait_tensor.default,
    }
)


def recompute_parameter_all_gathers(graph: Graph) -> int:
    """Tag every parameter's all-gather, its wait and its views, so that the partitioner recomputes them; returns how many."""
    gathers = parameter_all_gathers(graph)
    for gather in gathers:
        tagged: list[Node] = [gather]
        while tagged:
            node = tagged.pop()
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta["ac_graph_id"] = REGION
            tagged += [user for user in node.users if user.target in VIEWS]
        for source in _casts_and_padding(gather):
            source.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            source.meta["ac_graph_id"] = REGION
    return len(gathers)


def _casts_and_padding(gather: Node) -> list[Node]:
    """What lies between the sharded parameter and its all-gather."""
    found: list[Node] = []
    open_nodes = list(gather.all_input_nodes)
    while open_nodes:
        node = open_nodes.pop()
        if node.op != "placeholder" and node not in found:
            found.append(node)
            open_nodes += node.all_input_nodes
    return found
