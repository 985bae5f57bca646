"""Reshard after forward, as a pass on the joint graph: gathered weights are recomputed in backward and not saved.

    before   forward: w = wait(all_gather(shard)); y = x @ w.T; saves w      backward: dx = dy @ w
    after    forward: w = wait(all_gather(shard)); y = x @ w.T; saves shard  backward: w = wait(all_gather(shard)); dx = dy @ w

Without it, the min-cut partitioner keeps every gathered weight, since it takes collectives for expensive. It reads tags:
SimpleFSDP paper (arXiv 2411.00284), section on memory. Some weights are kept all the same, in eager mode as well: those that
forward uses last are what backward needs first.
"""

from collections.abc import Collection

from torch.fx import Graph
from torch.utils.checkpoint import CheckpointPolicy

from titan_lite.compiler.collectives import aten, collectives, parameter_all_gathers, parameters_of

# The partitioner compares this number between regions of activation checkpointing; ours lies after all of them.
REGION = 1_000_000
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


def recompute_parameter_all_gathers(graph: Graph, keep_gathered: Collection[str] = ()) -> int:
    """Tag every parameter's all-gather, what leads to it, its wait and its views, so that the partitioner recomputes them.

    keep_gathered: FQNs of parameters to leave alone. Returns the number of all-gathers that will run again.
    """
    again = 0
    for gather, preparation in parameter_all_gathers(graph).items():
        if not set(keep_gathered).isdisjoint(parameters_of(gather)):
            continue
        again += 1
        tagged = [gather, *preparation]
        for node in tagged:  # which grows
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta["ac_graph_id"] = REGION
            if node not in preparation:
                tagged += [user for user in node.users if user.target in VIEWS]
    return again
