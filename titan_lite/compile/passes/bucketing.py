"""Merge the collectives of several parameters into buckets, in a forward or backward graph.

    bucket_by_block(graph, settings)                 # a pass
    merge_buckets(graph, by_block(graph))            # what it does, in place

    before   w1 = wait(all_gather(s1)); y = x @ w1
             w2 = wait(all_gather(s2)); z = y @ w2
    after    b = wait(all_gather(cat(s1, s2))); w1 = b[:, :n1]; w2 = b[:, n1:]
             y = x @ w1; z = y @ w2

Every collective has a latency, and a block of Llama has nine parameters (SimpleFSDP, arXiv
2411.00284, section 4.1). Results stay bitwise equal: an all-gather only moves values, and a
reduction adds the same values for each element.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence

import torch
from torch.fx import Graph, Node

from titan_lite.collectives import collectives
from titan_lite.compile.graph import add_call, move_before
from titan_lite.compile.settings import PassSettings
from titan_lite.graph import (
    aten,
    descendants,
    group_of,
    group_size,
    is_all_gather,
    kind_of,
    parameter_collectives,
    parameters_of,
    preparation,
)
from titan_lite.models.fqns import block_of, last_block

Buckets = Mapping[Node, Hashable]  # the bucket of each collective of parameters


def bucket_by_block(graph: Graph, settings: PassSettings) -> int:
    """Give each transformer block a bucket. Return the number of collectives saved."""
    if not parameter_collectives(graph):
        return 0
    return merge_buckets(graph, by_block(graph))


def by_block(graph: Graph) -> Buckets:
    """Return one bucket per block.

    The last norm is in the last block; embedding and output have buckets of their own. Tied weights
    have two gradients, reduced in separate buckets.
    """
    last = last_block(fqn for node in parameter_collectives(graph) for fqn in parameters_of(node))
    occurrences: Counter[tuple] = Counter()
    buckets: dict[Node, Hashable] = {}
    for node in parameter_collectives(graph):
        key = (node.target, group_of(node), parameters_of(node))
        buckets[node] = (block_of(parameters_of(node)[0], last), occurrences[key])
        occurrences[key] += 1
    return buckets


def merge_buckets(graph: Graph, buckets: Buckets) -> int:
    """Merge the collectives of each bucket, in place. Return the number of collectives saved.

    Those of a bucket are merged that have the same kind, group, dtype and reduction.
    """
    members: dict[tuple, list[Node]] = defaultdict(list)
    for node, bucket in buckets.items():
        reduction = None if is_all_gather(node) else node.args[1]
        members[bucket, node.target, group_of(node), node.meta["val"].dtype, reduction].append(node)
    for nodes in members.values():
        if len(nodes) > 1:
            in_order = sorted(nodes)  # merging other buckets may have moved them
            if is_all_gather(nodes[0]):
                _merge_all_gathers(graph, in_order)
            else:
                _merge_reductions(graph, in_order)
            for node in nodes:
                graph.erase_node(node)
    graph.eliminate_dead_code()
    graph.lint()
    return len(buckets) - len(members)


def _merge_all_gathers(graph: Graph, nodes: list[Node]) -> None:
    """Insert the bucket's all-gather where the first one is, behind what prepares all shards."""
    ranks = group_size(nodes[0])
    shards = [node.all_input_nodes[0] for node in nodes]
    first = nodes[0]
    move_before(first, {prepares for node in nodes for prepares in preparation(node) or ()})
    with graph.inserting_before(first):
        bucket = add_call(graph, aten.cat.default, [_flat(graph, shard) for shard in shards])
        bucket.meta["copies"] = True
        gathered = add_call(graph, first.target, bucket, *first.args[1:])
        gathered.meta["bucket"] = _fqns(nodes)
        waited = add_call(graph, collectives.wait_tensor.default, gathered)
        by_rank = add_call(graph, aten.view.default, waited, [ranks, -1])
        start = 0
        for node, shard in zip(nodes, shards, strict=True):
            end = start + shard.meta["val"].numel()
            columns = add_call(graph, aten.slice.Tensor, by_rank, 1, start, end)
            weight = add_call(
                graph, aten.clone.default, columns, memory_format=torch.contiguous_format
            )
            weight.meta["copies"] = True
            result = add_call(graph, aten.view.default, weight, list(node.meta["val"].shape))
            _replace_wait(node, result)
            start = end


def _merge_reductions(graph: Graph, nodes: list[Node]) -> None:
    """Insert the bucket's reduction where the last one is.

    Its results are views of the bucket, and their users move behind it.
    """
    last = nodes[-1]
    gradients = [node.all_input_nodes[0] for node in nodes]
    with graph.inserting_before(last):
        if kind_of(last) == "all_reduce":
            parts = [_flat(graph, gradient) for gradient in gradients]
            bucket = add_call(graph, aten.cat.default, parts)
        else:  # a reduce-scatter: a row for each rank
            ranks = group_size(last)
            parts = [
                add_call(graph, aten.reshape.default, gradient, [ranks, -1])
                for gradient in gradients
            ]
            bucket = add_call(graph, aten.cat.default, parts, 1)
        bucket.meta["copies"] = True
        reduced = add_call(graph, last.target, bucket, *last.args[1:])
        reduced.meta["bucket"] = _fqns(nodes)
        flat = _flat(graph, add_call(graph, collectives.wait_tensor.default, reduced))
        start = 0
        for node in nodes:
            end = start + node.meta["val"].numel()
            part = add_call(graph, aten.slice.Tensor, flat, 0, start, end)
            result = add_call(graph, aten.view.default, part, list(node.meta["val"].shape))
            _move_users_behind(node, last)
            _replace_wait(node, result)
            start = end


def _fqns(nodes: Sequence[Node]) -> list[str]:
    """Return the parameters of the collectives that a bucket replaces (see `parameters_of`)."""
    return [fqn for node in nodes for fqn in parameters_of(node)]


def _move_users_behind(node: Node, last: Node) -> None:
    """Move what depends on the result of `node` and precedes `last` behind `last`."""
    (wait,) = node.users
    for user in sorted((user for user in descendants(wait) if user < last), reverse=True):
        last.append(user)


def _replace_wait(node: Node, result: Node) -> None:
    """Replace the wait for `node` by `result`. Keep `node`: others are inserted before it."""
    (wait,) = node.users
    wait.replace_all_uses_with(result)
    wait.graph.erase_node(wait)


def _flat(graph: Graph, node: Node) -> Node:
    return add_call(graph, aten.reshape.default, node, [math.prod(node.meta["val"].shape)])
