"""Edits of a graph, on small graphs made by hand."""

import torch
from torch._subclasses import FakeTensorMode
from torch.fx import Graph

from titan_lite.compile.graph import add_call, merge_waits, move_before
from titan_lite.cost.collectives import collectives

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
    product = call(graph, aten.mm.default, first, second)
    graph.output(product)
    assert merge_waits(graph) == 1
    assert list(gather.users) == [first]
    assert product.args == (first, first)


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
