"""Which all-gathers of a graph read parameters, on small graphs made by hand."""

import pytest
import torch
from torch.fx import Graph

from titan_lite.collectives import collectives
from titan_lite.graph import descendants, is_all_gather, parameter_all_gathers

aten = torch.ops.aten
RANKS, GROUP = 2, "dp_shard"


def gather(graph, node):
    return graph.call_function(collectives.all_gather_into_tensor.default, (node, RANKS, GROUP))


def wait(graph, node):
    return graph.call_function(collectives.wait_tensor.default, (node,))


def call(graph, target, *args):
    return graph.call_function(target, args)


def cast(graph, node):
    return graph.call_function(aten._to_copy.default, (node,), {"dtype": torch.bfloat16})


def padded(graph, node):
    zeros = graph.call_function(aten.new_zeros.default, (node, [1, 8]), {"pin_memory": False})
    return call(graph, aten.cat.default, [node, zeros])


def shard(graph):
    return [gather(graph, graph.placeholder("shard"))]


def cast_and_padded_shard(graph):
    return [gather(graph, padded(graph, cast(graph, graph.placeholder("shard"))))]


def two_shards_and_one_read_twice(graph):
    first, second = graph.placeholder("first"), graph.placeholder("second")
    return [gather(graph, first), gather(graph, second), gather(graph, first)]


def other_collectives(graph):
    shard = graph.placeholder("shard")
    call(graph, collectives.reduce_scatter_tensor.default, shard, "sum", RANKS, GROUP)
    call(graph, collectives.all_reduce.default, shard, "sum", GROUP)
    return []


def matmul_of_inputs(graph):
    gather(graph, call(graph, aten.mm.default, graph.placeholder("x"), graph.placeholder("weight")))
    return []


def activation_of_the_first_layer(graph):
    """Keys gathered along the sequence, computed with a weight that was gathered before."""
    weight = gather(graph, graph.placeholder("shard"))
    gather(graph, call(graph, aten.mm.default, graph.placeholder("x"), wait(graph, weight)))
    return [weight]


@pytest.mark.parametrize(
    "build",
    [
        shard,
        cast_and_padded_shard,
        two_shards_and_one_read_twice,
        other_collectives,
        matmul_of_inputs,
        activation_of_the_first_layer,
    ],
)
def test_all_gathers_of_parameters_in_order(build):
    graph = Graph()
    expected = build(graph)
    assert list(parameter_all_gathers(graph)) == expected


def test_an_all_gather_is_told_from_its_wait_and_from_other_collectives():
    graph = Graph()
    (all_gather,) = shard(graph)
    others = [wait(graph, all_gather), graph.output(all_gather)]
    other_collectives(graph)
    assert [node for node in graph.nodes if is_all_gather(node)] == [all_gather]
    assert not any(is_all_gather(node) for node in others)


def test_descendants_are_what_depends_on_a_node():
    graph = Graph()
    x = graph.placeholder("x")
    a, b = (call(graph, aten.neg.default, x) for _ in range(2))
    result = call(graph, aten.add.Tensor, a, a)
    graph.output((result, b))
    assert descendants(a) == {a, result}
