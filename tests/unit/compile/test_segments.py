"""Segments: what is compiled, what runs in which order, what is freed when."""

import dataclasses
import weakref

import pytest
import torch
from plain_weights import PlainWeights
from tiny import UNTIED, of_family
from torch._functorch.aot_autograd import make_boxed_func
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from titan_lite.compile.backends import starts_of_blocks
from titan_lite.compile.joint import TraceSettings
from titan_lite.compile.model_graph import compose
from titan_lite.compile.model_parts import TraceableModel, trace_parts
from titan_lite.compile.segments import (
    CutGraph,
    OperatorCall,
    SegmentCall,
    is_outside,
    split,
)
from titan_lite.config.families import ModelConfig
from titan_lite.distributed.activation_checkpoint import (
    apply_activation_checkpoint,
    checkpoint_rule,
)
from titan_lite.models.experts import experts_of
from titan_lite.models.transformer import Transformer

aten = torch.ops.aten
MOE = of_family("qwen3_moe", UNTIED)


def is_sine(node):
    """An operator that stands for a collective."""
    return node.target is aten.sin.default


def traced(function, *shapes):
    with FakeTensorMode():
        return make_fx(function)(*(torch.empty(shape) for shape in shapes))


def as_traced(segment):
    return make_boxed_func(segment.module.forward)


def compiled(cut, compile_segment=as_traced):
    return cut.program({key: compile_segment(part) for key, part in cut.segments.items()})


def chain(x, w):
    """Three equal blocks."""
    for _ in range(3):
        x = torch.sin(torch.relu(x @ w) + 1)
    return (x,)


def test_equal_segments_are_compiled_once_and_called_each_time():
    cut = CutGraph(traced(chain, (4, 4), (4, 4)), is_sine)
    (segment,) = cut.segments.values()
    assert [value.shape for value in segment.inputs] == [(4, 4), (4, 4)]
    program = compiled(cut)
    assert program.segments == 3
    assert program.different_segments == 1
    kinds = [type(call) for call in program.calls]
    assert kinds == [SegmentCall, OperatorCall] * 3
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    assert torch.equal(*program([x, w]), *chain(x, w))


@pytest.mark.parametrize(
    "second",
    [
        lambda x: torch.sin(x * 3.0),
        lambda x: torch.sin(x.double() * 2.0),
        lambda x: torch.sin(x[:2] * 2.0),
        lambda x: torch.sin(x.t() * 2.0),
        lambda x: torch.sin(x + 2.0),
    ],
    ids=["another constant", "another dtype", "another shape", "a transpose", "another operator"],
)
def test_segments_that_differ_are_compiled_apart(second):
    def both(x):
        first = torch.sin(x * 2.0)
        return torch.sin(first), second(first)

    program = compiled(CutGraph(traced(both, (3, 4)), is_sine))
    assert program.different_segments == 2
    x = torch.randn(3, 4)
    for result, expected in zip(program([x]), both(x), strict=True):
        assert torch.equal(result, expected)


def test_segments_that_read_other_strides_are_compiled_apart():
    def both(x):
        return torch.sin(x * 2.0), torch.sin(torch.sin(x.t()) * 2.0)

    program = compiled(CutGraph(traced(both, (4, 4)), is_sine))
    assert program.segments == program.different_segments == 3  # two matmuls and the transpose


def test_equal_segments_of_different_graphs_have_one_text():
    """Which Inductor's cache has their code by: of another depth, or of another pipeline stage."""

    def deep(x, w):
        return chain(torch.sin(torch.relu(x) @ w @ w), w)

    (own,) = CutGraph(traced(chain, (4, 4), (4, 4)), is_sine).segments.items()
    of_deep = CutGraph(traced(deep, (4, 4), (4, 4)), is_sine).segments
    assert len(of_deep) == 2
    structure, segment = own
    assert of_deep[structure].module.code == segment.module.code


def test_constants_of_one_name_in_two_graphs_are_different_segments():
    """Segments of forward and backward are compiled together."""

    def function(x):
        return (torch.sin(x + 1),)

    keys = set()
    for value in (1.0, 2.0):
        graph = traced(function, (4,))
        graph.constant_0 = torch.full((4,), value)
        (sum_,) = graph.graph.find_nodes(op="call_function", target=aten.add.Tensor)
        with graph.graph.inserting_before(sum_):
            constant = graph.graph.create_node("get_attr", "constant_0")
        constant.meta["val"] = sum_.meta["val"]
        sum_.args = (sum_.args[0], constant)
        keys.update(CutGraph(graph, is_sine).segments)
    assert len(keys) == 2


def test_operators_outside_keep_their_order_and_arguments():
    def function(x, y):
        late = torch.relu(y)
        first = torch.sin(x)
        second = torch.sin(y)
        return first + late, second, x

    graph = traced(function, (4,), (4,))
    program = compiled(CutGraph(graph, is_sine))
    sines = [node for node in graph.graph.nodes if is_sine(node)]
    assert len(sines) == sum(isinstance(call, OperatorCall) for call in program.calls) == 2
    x, y = torch.randn(4), torch.randn(4)
    inputs = [x, y]
    results = program(inputs)
    assert inputs == []
    assert results[2] is x
    for result, expected in zip(results, function(x, y), strict=True):
        assert torch.equal(result, expected)


def test_the_results_of_an_operator_stay_with_it():
    def function(x):
        values, indices = torch.max(x, dim=0)
        return torch.sin(values), indices

    graph = traced(function, (3, 4))
    sine = next(node for node in graph.graph.nodes if is_sine(node))
    sine.append(sine.prev)  # the indices
    parts = split(graph.graph, is_sine)
    assert [len(part) for part in parts] == [3, 1]
    x = torch.randn(3, 4)
    program = compiled(CutGraph(graph, is_sine))
    for result, expected in zip(program([x]), function(x), strict=True):
        assert torch.equal(result, expected)


def test_nodes_apart_are_a_segment_of_their_own():
    """So that those of equal blocks are equal, wherever a pass has moved them."""

    def function(x, first, second):
        x = x * 2.0
        first, second = first + 1.0, second + 1.0
        x = x * 3.0
        first, second = torch.sin(first * 5.0), torch.sin(second * 5.0)
        return (x + first + second,)

    graph = traced(function, *[(4,)] * 3)
    sines = [node for node in graph.graph.nodes if is_sine(node)]
    apart = [[sine.args[0].args[0], sine.args[0]] for sine in sines]
    parts = split(graph.graph, is_sine, apart)
    assert [len(part) for part in parts] == [2, 2, 2, 1, 1, 2]
    assert [set(part) for part in parts[:2]] == [set(nodes) for nodes in apart]
    program = compiled(CutGraph(graph, is_sine, apart))
    assert (program.segments, program.different_segments) == (4, 3)
    inputs = [torch.randn(4) for _ in range(3)]
    assert torch.equal(*program([*inputs]), *function(*inputs))


def test_values_are_freed_after_their_last_read():
    """Inputs are, too: backward's are the activations that forward saved."""

    def function(x, unread, w):
        hidden = torch.relu(x)
        for _ in range(2):
            hidden = torch.sin(hidden) @ w
        return (hidden,)

    x, unread, w = (torch.randn(4, 4) for _ in range(3))
    alive = {"x": weakref.ref(x), "unread": weakref.ref(unread), "w": weakref.ref(w)}
    seen = []

    def compile_segment(segment):
        def run(arguments):
            seen.append([name for name, tensor in alive.items() if tensor() is not None])
            return segment.module.forward(*arguments)

        return run

    program = compiled(CutGraph(traced(function, *[(4, 4)] * 3), is_sine), compile_segment)
    inputs = [x, unread, w]
    del x, unread, w
    program(inputs)
    # `run` itself holds x in the first segment, and w in the others
    assert seen == [["x", "w"], ["w"], ["w"]]


@pytest.mark.parametrize("layers", [3, 7])
def test_without_collectives_blocks_are_segments_that_are_compiled_once(layers):
    shapes = dict(dim=32, n_heads=4, n_kv_heads=2, hidden_dim=96, vocab_size=64, max_seq_len=16)
    model = Transformer(ModelConfig(n_layers=layers, **shapes))
    model.init_weights(0)
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    traceable = TraceableModel(model, PlainWeights(model), model.layers)
    graphs = compose(trace_parts(traceable, {"tokens": tokens}, TraceSettings()))

    for graph in (graphs.forward, graphs.backward):
        starts = starts_of_blocks(graph.graph)
        program = compiled(CutGraph(graph, is_outside, starts=starts))
        # what is before the blocks, behind them, and the blocks
        assert program.segments == layers + 2
        assert program.different_segments == 3


@pytest.mark.parametrize("capacity", [0.0, pytest.param(1.5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["none", "full"])
def test_a_mixture_has_as_many_different_segments_whatever_its_depth(mode, capacity):
    """Though operators of routers and experts have their FQNs as arguments."""
    found = []
    for layers in (3, 7):
        model = Transformer(dataclasses.replace(MOE, n_layers=layers))
        model.init_weights(0)
        for experts in experts_of(model).values():
            experts.own = range(2)
            for name, weight in experts.named_parameters():
                setattr(experts, name, torch.nn.Parameter(weight.detach()[:2].clone()))
            experts.capacity_factor = capacity
        apply_activation_checkpoint(model.layers, mode, compiled=True)
        tokens = torch.zeros(2, 16, dtype=torch.int64)
        traceable = TraceableModel(model, PlainWeights(model), model.layers, checkpoint_rule)
        graphs = compose(trace_parts(traceable, {"tokens": tokens}, TraceSettings()))
        programs = [
            compiled(CutGraph(graph, is_outside, starts=starts_of_blocks(graph.graph)))
            for graph in (graphs.forward, graphs.backward)
        ]
        found.append([program.different_segments for program in programs])
    assert found[0] == found[1]
