"""Resharding after forward: what is tagged on a graph made by hand, and what the partitioner then
saves for backward.
"""

import pytest
import torch
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from titan_lite.collectives import collectives
from titan_lite.compile.passes.resharding import (
    recompute_parameter_all_gathers,
    reshard_after_forward,
)
from titan_lite.graph import is_all_gather

aten = torch.ops.aten
RANKS, GROUP = 2, "dp_shard"


def call(graph, name, target, *args, **kwargs):
    node = graph.call_function(target, args, kwargs)
    node._rename(name)
    return node


def test_the_gather_its_casts_and_padding_and_its_views_are_tagged_and_nothing_else():
    graph = Graph()
    shard, x = graph.placeholder("shard"), graph.placeholder("x")
    cast = call(graph, "cast", aten._to_copy.default, shard, dtype=torch.bfloat16)
    zeros = call(graph, "zeros", aten.new_zeros.default, cast, [1, 8])
    cat = call(graph, "cat", aten.cat.default, [cast, zeros])
    gather = call(graph, "gather", collectives.all_gather_into_tensor.default, cat, RANKS, GROUP)
    wait = call(graph, "wait", collectives.wait_tensor.default, gather)
    rows = call(graph, "rows", aten.slice.Tensor, wait, 0, 0, 15)
    view = call(graph, "view", aten.view.default, rows, [15, 8])
    transposed = call(graph, "transposed", aten.t.default, view)
    matmul = call(graph, "matmul", aten.mm.default, x, transposed)
    view_of_matmul = call(graph, "view_of_matmul", aten.view.default, matmul, [-1])
    relu = call(
        graph, "relu", aten.relu.default, wait
    )  # computed from the weight, so no view of it
    view_of_relu = call(graph, "view_of_relu", aten.t.default, relu)
    reduced = call(
        graph, "reduced", collectives.reduce_scatter_tensor.default, matmul, "sum", RANKS, GROUP
    )
    waited = call(graph, "waited", collectives.wait_tensor.default, reduced)
    graph.output((view_of_matmul, view_of_relu, waited))

    assert recompute_parameter_all_gathers(graph) == 1
    tagged = {node for node in graph.nodes if "recompute" in node.meta}
    assert tagged == {cast, zeros, cat, gather, wait, rows, view, transposed}
    assert all(node.meta["recompute"] is CheckpointPolicy.MUST_RECOMPUTE for node in tagged)
    assert len({node.meta["ac_graph_id"] for node in tagged}) == 1
    assert not any("ac_graph_id" in node.meta for node in set(graph.nodes) - tagged)


def test_waits_for_inputs_and_their_views_are_tagged_whatever_is_kept():
    graph = Graph()
    weight, x = graph.placeholder("weight"), graph.placeholder("x")
    wait = call(graph, "wait", collectives.wait_tensor.default, weight)
    transposed = call(graph, "transposed", aten.t.default, wait)
    graph.output(call(graph, "matmul", aten.mm.default, x, transposed))
    for keep in (None, (), ("weight",)):
        reshard_after_forward(graph, keep)
        assert {node for node in graph.nodes if node.meta.pop("recompute", None)} == {
            wait,
            transposed,
        }


def test_what_is_kept_is_left_alone():
    graph, gathers = Graph(), {}
    for fqn in ("layers.3.wq.weight", "layers.31.wq.weight", "norm.weight"):
        gathers[fqn] = graph.call_function(
            collectives.all_gather_into_tensor.default, (graph.placeholder(fqn), RANKS, GROUP)
        )
        gathers[fqn].meta["custom"] = {"fqn": fqn}
        graph.call_function(collectives.wait_tensor.default, (gathers[fqn],))
    graph.output(())
    assert (
        recompute_parameter_all_gathers(graph, keep_gathered=("layers.3.wq.weight", "norm.weight"))
        == 1
    )
    tagged = [node for node in graph.nodes if "recompute" in node.meta]
    assert tagged == [gathers["layers.31.wq.weight"], *gathers["layers.31.wq.weight"].users]


def joint_graph(rows):
    """Forward and backward of two layers y = x @ w.T, whose weights are gathered, cast and unpadded
    as SimpleFSDP does.
    """

    def joint(primals, tangents):
        x, *shards = primals
        wholes = []
        activations = [x]
        for shard in shards:
            shard = shard.to(torch.bfloat16)
            whole = collectives.wait_tensor(
                collectives.all_gather_into_tensor(shard, RANKS, GROUP)
            )[:rows]
            wholes.append(whole)
            activations.append(activations[-1] @ whole.t())
        (gradient,) = tangents
        gradients = []
        for whole, activation in reversed(list(zip(wholes, activations, strict=False))):
            summed = collectives.reduce_scatter_tensor(
                gradient.t() @ activation, "sum", RANKS, GROUP
            )
            gradients.append(collectives.wait_tensor(summed).float())
            gradient = gradient @ whole
        return [activations[-1]], [gradient, *reversed(gradients)]

    x, tangent = torch.randn(6, 8).bfloat16(), torch.randn(6, 8).bfloat16()
    return make_fx(joint, tracing_mode="fake")([x, torch.randn(4, 8), torch.randn(4, 8)], [tangent])


@pytest.mark.parametrize(("tag", "gathers_in_backward"), [(False, 0), (True, 2)])
def test_the_partitioner_then_saves_shards_and_gathers_again_in_backward(tag, gathers_in_backward):
    joint = joint_graph(rows=8)
    if tag:
        assert recompute_parameter_all_gathers(joint.graph) == 2
    forward, backward = min_cut_rematerialization_partition(joint, None, num_fwd_outputs=1)
    assert len([node for node in forward.graph.nodes if is_all_gather(node)]) == 2
    assert (
        len([node for node in backward.graph.nodes if is_all_gather(node)]) == gathers_in_backward
    )
    (output,) = forward.graph.find_nodes(op="output")
    saved = [node.meta["val"] for node in output.args[0][1:]]
    weights = [
        tuple(value.shape) for value in saved if value.shape[1:] == (8,) and value.shape[0] != 6
    ]
    assert weights == [(4, 8)] * 2 if tag else [(8, 8)] * 2
