"""Merge the collectives of several parameters into buckets, in a forward or backward graph.

    merge(graph, by_block(graph))            # in place; wrapping.py chooses the buckets

    before   w1 = wait(all_gather(s1)); y = x @ w1; w2 = wait(all_gather(s2)); z = y @ w2
    after    b = wait(all_gather(cat(s1, s2))); w1 = b[:, :n1]; w2 = b[:, n1:]; y = x @ w1; z = y @ w2

Every collective has a latency, and a block of Llama has nine parameters (SimpleFSDP, arXiv
2411.00284, section 4.1). Results stay bitwise equal: an all-gather only moves values, and a
reduction adds the same values for each element.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import detect_fake_mode
from torch.fx import Graph, Node

from titan_lite.cost.collectives import (
    aten,
    collectives,
    descendants,
    group_of,
    group_size,
    is_all_gather,
    kind_of,
    move_before,
    parameters_of,
    preparation,
)


def merge(graph: Graph, plan: Mapping[Node, Hashable]) -> int:
    """Merge the collectives of each bucket of `plan` that have the same kind, group, dtype and
    reduction, in place.

    Returns the number of collectives saved.
    """
    members: dict[tuple, list[Node]] = defaultdict(list)
    for node, bucket in plan.items():
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
    return len(plan) - len(members)


def _merge_all_gathers(graph: Graph, nodes: list[Node]) -> None:
    """Merge all-gathers at the place of the first one, and move the preparation of the others
    before it.
    """
    ranks = group_size(nodes[0])
    shards = [node.all_input_nodes[0] for node in nodes]
    first = nodes[0]
    move_before(first, {leading for node in nodes for leading in preparation(node) or ()})
    with graph.inserting_before(first):
        flat = add_call(graph, aten.cat.default, [_flat(graph, shard) for shard in shards])
        flat.meta["copies"] = True
        gathered = add_call(graph, first.target, flat, *first.args[1:], bucket=nodes)
        rows = add_call(
            graph,
            aten.view.default,
            add_call(graph, collectives.wait_tensor.default, gathered),
            [ranks, -1],
        )
        start = 0
        for node, shard in zip(nodes, shards, strict=True):
            numel = shard.meta["val"].numel()
            columns = add_call(graph, aten.slice.Tensor, rows, 1, start, start + numel)
            weight = add_call(
                graph, aten.clone.default, columns, memory_format=torch.contiguous_format
            )
            weight.meta["copies"] = True
            _replace_wait(
                node, add_call(graph, aten.view.default, weight, list(node.meta["val"].shape))
            )
            start += numel


def _merge_reductions(graph: Graph, nodes: list[Node]) -> None:
    """Merge reductions at the place of the last one.

    Its results are views, and their users move behind it.
    """
    last, gradients = nodes[-1], [node.all_input_nodes[0] for node in nodes]
    with graph.inserting_before(last):
        if kind_of(last) == "all_reduce":
            bucket = add_call(
                graph, aten.cat.default, [_flat(graph, gradient) for gradient in gradients]
            )
        else:  # one row per rank
            rows = [
                add_call(graph, aten.reshape.default, gradient, [group_size(last), -1])
                for gradient in gradients
            ]
            bucket = add_call(graph, aten.cat.default, rows, 1)
        bucket.meta["copies"] = True
        reduced = add_call(graph, last.target, bucket, *last.args[1:], bucket=nodes)
        flat, start = _flat(graph, add_call(graph, collectives.wait_tensor.default, reduced)), 0
        for node in nodes:
            numel = node.meta["val"].numel()
            part = add_call(graph, aten.slice.Tensor, flat, 0, start, start + numel)
            _replace_wait(
                node,
                add_call(graph, aten.view.default, part, list(node.meta["val"].shape)),
                after=last,
            )
            start += numel


def _replace_wait(node: Node, part: Node, after: Node | None = None) -> None:
    """Replace uses of node's wait by `part`. after: move users that precede this node behind it."""
    (wait,) = node.users
    if after is not None:
        for late in sorted((user for user in descendants(wait) if user < after), reverse=True):
            after.append(late)
    wait.replace_all_uses_with(part)
    part.graph.erase_node(wait)  # keeps `node`, since others may still be inserted before it


def _flat(graph: Graph, node: Node) -> Node:
    return add_call(graph, aten.reshape.default, node, [math.prod(node.meta["val"].shape)])


def add_call(
    graph: Graph, target: Any, *args: Any, bucket: Sequence[Node] = (), **kwargs: Any
) -> Node:
    """Insert a call with its fake result. bucket: the collectives that it replaces."""
    node = graph.call_function(target, args, kwargs)
    if bucket:
        node.meta["bucket"] = [fqn for member in bucket for fqn in parameters_of(member)]

    def value(argument: Any) -> Any:
        if isinstance(argument, Node):
            return argument.meta["val"]
        return [value(each) for each in argument] if isinstance(argument, list) else argument

    values = [value(argument) for argument in args]
    mode = detect_fake_mode([each for each in values if isinstance(each, Tensor)])
    if mode is None:  # a graph of real or meta tensors, built by hand
        node.meta["val"] = target(*values, **kwargs)
    else:
        with mode:
            node.meta["val"] = target(*values, **kwargs)
    return node
