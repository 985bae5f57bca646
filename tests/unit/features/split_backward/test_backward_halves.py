"""The halves of a backward graph compute the numbers of the whole, bit by bit; the half of the
weights reads no weight, and receives the fewest bytes.
"""

import pytest
import torch
import torch.distributed as dist
from handmade_graphs import GATHER, REDUCE, Hand, Pretend, aten, collectives, count
from tiny import HEADS
from torch.fx import GraphModule
from torch.testing._internal.distributed.fake_pg import FakeStore

from titan_lite.compile.compile import compile_model
from titan_lite.compile.graph_passes import GraphPasses
from titan_lite.compile.model_parts import TraceableModel
from titan_lite.compile.settings import PassSettings
from titan_lite.config import Compile
from titan_lite.distributed.activation_checkpoint import (
    apply_activation_checkpoint,
    checkpoint_rule,
)
from titan_lite.distributed.mesh import build_mesh, parameter_mesh
from titan_lite.distributed.pipeline import keep_modules
from titan_lite.distributed.simple_fsdp import FSDPOptions, apply_simple_fsdp
from titan_lite.distributed.tensor_parallel import apply_tensor_parallel
from titan_lite.features.split_backward.backward_halves import split_backward
from titan_lite.graph import MATMULS, is_all_gather, nbytes_of, parameters_of
from titan_lite.models.transformer import Transformer

TOKENS = 16


def as_module(graph):
    return GraphModule(torch.nn.Module(), graph)


def run_halves(halves, module, inputs):
    """The gradients of both halves, merged."""
    names = [node.name for node in module.graph.find_nodes(op="placeholder")]
    given = dict(zip(names, inputs, strict=True))
    first = Pretend(halves.input).run(*inputs)
    count = len(first) - len(halves.crossing)
    crossing = first[count:]
    second = Pretend(halves.weight).run(*[given[name] for name in halves.saved], *crossing)
    return [
        late if early is None else early for early, late in zip(first[:count], second, strict=True)
    ]


def check_same(module, halves, inputs):
    whole = Pretend(module).run(*inputs)
    merged = run_halves(halves, module, inputs)
    assert len(merged) == len(whole)
    for expected, found in zip(whole, merged, strict=True):
        if isinstance(expected, torch.Tensor):
            assert torch.equal(expected, found)
        else:
            assert expected is found


def targets(module):
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


# Graphs made by hand


def linear(hand, dy, number, reduces=True):
    """Backward of y = silu(x) @ w.T: the gradients of x and of w."""
    x = hand.input(4, 6)
    w = hand.gather(hand.input(4, 6), f"layers.{number}")
    dw = hand.call(aten.mm.default, hand.call(aten.t.default, dy), hand.call(aten.silu.default, x))
    dx = hand.call(aten.silu_backward.default, hand.call(aten.mm.default, dy, w), x)
    return dx, hand.reduce(dw, f"layers.{number}") if reduces else dw


@pytest.fixture
def two_layers():
    """(Hand, module, gradient of the input) of two layers."""
    hand = Hand()
    dy = hand.input(4, 8)
    middle, second = linear(hand, dy, 1)
    wide = hand.call(aten.cat.default, [middle, hand.call(aten.narrow.default, middle, 1, 0, 2)], 1)
    dx, first = linear(hand, wide, 0)
    graph = hand.output(first, second, dx, hand.graph.find_nodes(op="placeholder")[1])
    return hand, as_module(graph), dx


def test_the_half_of_the_weights_has_their_matmuls_and_reductions(two_layers):
    hand, module, dx = two_layers
    halves = split_backward(module, dx)
    assert count(halves.input.graph, GATHER) == 2 == count(halves.weight.graph, REDUCE)
    assert count(halves.input.graph, REDUCE) == 0 == count(halves.weight.graph, GATHER)
    assert count(halves.input.graph, aten.mm.default) == 2
    assert count(halves.weight.graph, aten.mm.default) == 2
    check_same(module, halves, hand.inputs)


def test_each_half_returns_its_gradients_and_inputs_that_are_none(two_layers):
    hand, module, dx = two_layers
    halves = split_backward(module, dx)
    first = Pretend(halves.input).run(*hand.inputs)[:4]
    assert [gradient is None for gradient in first] == [True, True, False, False]
    assert first[3] is hand.inputs[1]
    named = [node.name for node in halves.weight.graph.find_nodes(op="placeholder")]
    assert named == [*halves.saved, *halves.crossing]


def test_the_graph_itself_does_not_change(two_layers):
    _, module, dx = two_layers
    before = str(module.graph)
    split_backward(module, dx)
    assert str(module.graph) == before


def test_what_reads_a_weight_is_computed_in_the_half_of_the_input():
    """Even if only a gradient of a weight needs it, as the input of a matmul after a norm."""
    hand = Hand()
    x, dy, scales = hand.input(4, 6), hand.input(4, 8), hand.input(3)
    weight = hand.call(aten.view.default, hand.gather(scales, "norm"), [1, 6])
    normed = hand.call(aten.mul.Tensor, x, weight)
    dw = hand.call(aten.mm.default, hand.call(aten.t.default, dy), normed)
    module = as_module(hand.output(hand.reduce(dw, "layers.0"), None))
    halves = split_backward(module)
    assert aten.mul.Tensor in targets(halves.input)
    assert aten.mul.Tensor not in targets(halves.weight)
    assert halves.crossing == (normed.name,)
    check_same(module, halves, hand.inputs)


def test_weights_that_no_graph_gathers_are_named_by_the_caller():
    hand = Hand()
    x, dy, weight = hand.input(4, 6), hand.input(4, 8), hand.input(1, 6)
    normed = hand.call(aten.mul.Tensor, x, weight)
    small = hand.call(aten.sum.dim_IntList, hand.call(aten.mul.Tensor, normed, x), [0])
    dw = hand.call(aten.mm.default, hand.call(aten.t.default, dy), normed)
    module = as_module(hand.output(dw, small))
    halves = split_backward(module, weights=[weight])
    assert weight.name not in halves.saved
    check_same(module, halves, hand.inputs)


@pytest.mark.parametrize(
    ("computes", "received"),
    [
        # one matmul of two saved values: the matmul crosses
        (lambda hand, a, b: hand.call(aten.mul.Tensor, hand.call(aten.silu.default, a), b), 1),
        # in float32 it would be twice as large as a saved value in bfloat16
        (lambda hand, a, b: hand.call(aten._to_copy.default, a, dtype=torch.float32), 0),
        # and a view costs nothing
        (lambda hand, a, b: hand.call(aten.view.default, a, [4, 6]), 0),
    ],
)
def test_the_fewest_bytes_live_from_one_half_to_the_other(computes, received):
    hand = Hand()
    a, b = hand.input(4, 6, dtype=torch.bfloat16), hand.input(4, 6, dtype=torch.bfloat16)
    x = computes(hand, a, b)
    dy = hand.input(4, 8, dtype=x.meta["val"].dtype)
    dw = hand.call(aten.mm.default, hand.call(aten.t.default, dy), x)
    module = as_module(hand.output(hand.reduce(dw, "layers.0"), None, None))
    halves = split_backward(module)
    assert len(halves.crossing) == received
    assert len(halves.saved) == 2 - received
    check_same(module, halves, hand.inputs)


def test_sums_over_tokens_cross_and_not_what_they_sum():
    hand = Hand()
    x, dy = hand.input(64, 6), hand.input(64, 6)
    of_norm = hand.call(aten.sum.dim_IntList, hand.call(aten.mul.Tensor, x, dy), [0])
    module = as_module(hand.output(hand.reduce(of_norm, "norm")))
    halves = split_backward(module)
    assert halves.crossing == (of_norm.name,)
    assert halves.saved == ()
    check_same(module, halves, hand.inputs)


def test_tokens_are_gathered_again_for_the_weights():
    """Both halves need those of the gradient; the weights alone need those of the input."""
    hand = Hand()
    x, dy = hand.input(2, 6), hand.input(2, 8)
    wait = collectives.wait_tensor.default
    all_dy = hand.call(wait, hand.call(GATHER, dy, 2, "tp"))
    all_x = hand.call(wait, hand.call(GATHER, x, 2, "tp"))
    dx = hand.call(aten.mm.default, all_dy, hand.gather(hand.input(4, 6), "layers.0"))
    dw = hand.call(aten.mm.default, hand.call(aten.t.default, all_dy), all_x)
    module = as_module(hand.output(hand.reduce(dw, "layers.0"), dx))
    halves = split_backward(module, dx)
    assert halves.crossing == ()
    assert halves.saved == (x.name, dy.name)
    assert count(halves.input.graph, GATHER) == 2  # of tokens, and of the weight
    assert count(halves.weight.graph, GATHER) == 2
    check_same(module, halves, hand.inputs)


# Graphs of the model


class Captured(GraphPasses):
    """Keep the graphs as they are traced."""

    def __init__(self):
        super().__init__(PassSettings(Compile(enable=True, backend="aot_eager")))
        self.modules = {}

    def run(self, module, name):
        self.modules[name] = module
        super().run(GraphModule(module, module.graph), name)


STAGES = {
    "first": ("tok_embeddings", "layers.0"),
    "middle": ("layers.0", "layers.1"),
    "last": ("layers.1", "norm", "output"),
}
MODES = ("none", "selective", "full")


def backward_of(mesh, stage, mode):
    model = Transformer(HEADS)
    keep_modules(model, STAGES[stage])
    apply_tensor_parallel(model, mesh["tp"], "llama3")
    apply_activation_checkpoint(model.layers, mode, compiled=True)
    options = FSDPOptions(param_dtype=torch.bfloat16)
    sharding = apply_simple_fsdp(model, parameter_mesh(mesh), options)
    schedule = Captured()
    compiled = compile_model(
        TraceableModel(model, sharding, model.layers, checkpoint_rule), schedule
    )
    if stage == "first":
        input = torch.zeros(2, TOKENS, dtype=torch.int64)
    else:
        input = torch.zeros(2, TOKENS // 2, HEADS.dim, dtype=torch.bfloat16, requires_grad=True)
    compiled(input)
    return schedule.modules["backward"]


@pytest.fixture(scope="module")
def backwards():
    """Backward graphs by (stage, mode), of two tensor-parallel and two sharding ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    mesh = build_mesh(dict(pp=1, dp_replicate=1, dp_shard=2, cp=1, tp=2), "cpu")
    yield {(stage, mode): backward_of(mesh, stage, mode) for stage in STAGES for mode in MODES}
    dist.destroy_process_group()


def gradient_of_hidden(module):
    (output,) = module.graph.find_nodes(op="output")
    found = [
        node
        for node in output.args[0]
        if node is not None and node.op == "call_function" and node.meta["val"].dim() == 3
    ]
    return found[0] if found else None


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stage", STAGES)
def test_a_stages_weights_are_gathered_for_one_half_and_reduced_in_the_other(
    backwards, stage, mode
):
    module = backwards[stage, mode]
    halves = split_backward(module, gradient_of_hidden(module))
    kinds = {  # is it gathered, or reduced
        name: {is_all_gather(node) for node in half.graph.nodes if parameters_of(node)}
        for name, half in (("input", halves.input), ("weight", halves.weight))
    }
    assert kinds == {"input": {True}, "weight": {False}}
    matmuls = [
        sum(target in MATMULS for target in targets(half))
        for half in (module, halves.input, halves.weight)
    ]
    assert matmuls[0] == matmuls[1] + matmuls[2]  # none is computed twice


@pytest.mark.parametrize("mode", MODES)
def test_a_stage_needs_no_more_between_its_halves_than_a_matmul_needs(backwards, mode):
    """The factors of the weights' gradients, each once, are a way to divide the graph. Gathered
    tokens count as one rank's, but for inputs that forward saves after it has gathered them.
    """
    module = backwards["middle", mode]
    halves = split_backward(module, gradient_of_hidden(module))
    by_name = {node.name: node for node in module.graph.nodes}
    received = sum(nbytes_of(by_name[name]) for name in (*halves.saved, *halves.crossing))
    dim, hidden, heads = HEADS.dim, HEADS.hidden_dim // 2, HEADS.n_heads // 2
    head = HEADS.dim // HEADS.n_heads
    tokens = dim / 2 + (dim if mode == "none" else dim / 2)
    of_attention = tokens + 2 * heads * head + 2 * (HEADS.n_kv_heads // 2) * head
    of_feed_forward = tokens + 3 * hidden
    factors = 2 * 2 * TOKENS * 2 * (of_attention + of_feed_forward)
    of_norms = 2 * 2 * 2 * dim
    assert received <= factors + of_norms
