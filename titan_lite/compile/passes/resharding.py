"""Reshard after forward, in the joint graph: backward gathers weights again.

    before   forward     w = wait(all_gather(shard)); y = x @ w.T; saves w
             backward    dx = dy @ w
    after    forward     w = wait(all_gather(shard)); y = x @ w.T; saves shard
             backward    w = wait(all_gather(shard)); dx = dy @ w

This runs on the joint graph of forward and backward, before the partitioner cuts it in two; the
passes of graph_passes.py run on each part. The min-cut partitioner keeps every gathered weight by
default, because it takes collectives for expensive. Tags overrule it (SimpleFSDP, arXiv 2411.00284,
section on memory). The weights that forward uses last are kept, as in eager mode, since backward
needs them first. What activation checkpointing recomputes reads the weights that are kept.
"""

from collections.abc import Collection, Sequence

from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from titan_lite.collectives import collectives
from titan_lite.compile.graph import placeholders
from titan_lite.graph import aten, parameter_all_gathers, parameters_of, wait_of

# The partitioner compares this id between regions of activation checkpointing; it must be above
# their ids.
REGION = 1_000_000
VIEWS = frozenset(
    {
        aten.slice.Tensor,
        aten.view.default,
        aten.view.dtype,
        aten.t.default,
        aten.permute.default,
        aten.transpose.int,
        aten.alias.default,
        aten.detach.default,
        collectives.wait_tensor.default,
    }
)


def reshard_after_forward(graph: Graph, keep_gathered: Collection[str] | None) -> None:
    """Tag what backward gathers or waits for again, in a joint graph.

    keep_gathered: FQNs of parameters to leave gathered until backward, or None for all.
    """
    recompute_waits_for_inputs(graph)
    recompute_parameter_all_gathers(graph, keep_gathered)


def recompute_parameter_all_gathers(
    graph: Graph, keep_gathered: Collection[str] | None = ()
) -> int:
    """Tag every parameter's all-gather, so that the partitioner recomputes it.

    Tag its preparation, its wait and its views as well.

    keep_gathered: FQNs of parameters to leave gathered, or None for all. Returns the number of
    tagged all-gathers.
    """
    tagged = 0
    for gather, preparation in parameter_all_gathers(graph).items():
        if keep_gathered is None or not set(keep_gathered).isdisjoint(parameters_of(gather)):
            _keep_for_recomputation(gather)
        else:
            _recompute([gather], preparation)
            tagged += 1
    return tagged


def _keep_for_recomputation(gather: Node) -> None:
    """Let forward save a gathered weight within a region of activation checkpointing, which would
    gather it again.
    """
    wait = wait_of(gather)
    if wait.meta.get("recompute") is not None:
        wait.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def recompute_waits_for_inputs(graph: Graph) -> int:
    """Tag the waits for inputs of the graph in the same way, and return their number.

    They are those of distributed/step_gather.py. A wait returns its input, which the compiler does
    not know: it would use the memory of a saved result again in backward.
    """
    waits = [
        user
        for placeholder in placeholders(graph)
        for user in placeholder.users
        if user.target is collectives.wait_tensor.default
    ]
    _recompute(waits)
    return len(waits)


def _recompute(nodes: Sequence[Node], preparation: Sequence[Node] = ()) -> None:
    """Tag `nodes`, what prepares them, and the views of their results."""
    open_nodes = [*nodes, *preparation]
    while open_nodes:
        node = open_nodes.pop()
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        node.meta["ac_graph_id"] = REGION
        if node not in preparation:
            open_nodes += [user for user in node.users if user.target in VIEWS]
