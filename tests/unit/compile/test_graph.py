"""Edits of a graph, on small graphs made by hand."""

import torch
from torch._subclasses import FakeTensorMode
from torch.fx import Graph

from titan_lite.collectives import collectives
from titan_lite.compile.graph import (
    add_call,
    merge_equal_all_gathers,
    merge_waits,
    move_before,
)

aten = torch.ops.aten


def call(graph, target, *args):
    return graph.call_function(target, args)


def test_an_added_call_has_its_fake_result():
    graph = Graph()
    inputs = [graph.placeholder(name) for name in ("a", "b")]
    with FakeTensorMode():
        for node in inputs:
            node.meta["val"] = torch.zeros(2, 3)
    joined = add_call(graph, aten.cat.default, inputs, 1)
    assert joined.args == (inputs, 1)
    assert joined.meta["val"].shape == (2, 6)
    copied = add_call(graph, aten.clone.default, joined, memory_format=torch.contiguous_format)
    assert copied.kwargs == {"memory_format": torch.contiguous_format}


def test_of_several_waits_for_a_collective_the_first_stays():
    graph = Graph()
    gather = call(
        graph, collectives.all_gather_into_tensor.default, graph.placeholder("shard"), 2, "dp"
    )
    first = call(graph, collectives.wait_tensor.default, gather)
    second = call(graph, collectives.wait_tensor.default, gather)
    matmul = call(graph, aten.mm.default, first, second)
    graph.output(matmul)
    assert merge_waits(graph) == 1
    assert list(gather.users) == [first]
    assert matmul.args == (first, first)


def test_equal_all_gathers_of_a_parameter_are_one():
    graph = Graph()
    shards = [graph.placeholder(name) for name in ("a", "b")]

    def gathered(shard, dtype=torch.bfloat16):
        cast = graph.call_function(aten._to_copy.default, (shard,), {"dtype": dtype})
        gather = call(graph, collectives.all_gather_into_tensor.default, cast, 2, "dp")
        return call(graph, collectives.wait_tensor.default, gather)

    waits = [gathered(shards[0]), gathered(shards[1]), gathered(shards[0])]
    waits += [gathered(shards[0], torch.float16)]
    of_tokens = call(graph, aten.sin.default, waits[0])
    tokens = [
        call(graph, collectives.all_gather_into_tensor.default, of_tokens, 2, "tp") for _ in "ab"
    ]
    graph.output((*waits, *tokens))
    assert merge_equal_all_gathers(graph) == 1
    assert graph.output_node().args[0] == (waits[0], waits[1], waits[0], waits[3], *tokens)


def test_nodes_move_in_their_order_and_back_where_the_move_is_not_accepted():
    graph = Graph()
    x = graph.placeholder("x")
    a, b, c, d = (call(graph, aten.neg.default, x) for _ in range(4))
    graph.output(call(graph, aten.add.Tensor, a, d))

    def refused():
        return list(graph.nodes)[1:5] != [a, c, d, b]

    assert not move_before(b, [d, a, c], refused)
    assert list(graph.nodes)[1:5] == [a, b, c, d]
    assert move_before(b, [d, a, c])
    assert list(graph.nodes)[1:5] == [a, c, d, b]
    assert not move_before(b, [a, c, d])
