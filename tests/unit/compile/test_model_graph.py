"""The graphs of a model, put together from traced parts: the results and gradients of eager mode,
bit by bit, and one traced block for each kind.
"""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from plain_weights import PlainWeights
from torch import nn

from titan_lite.compile import model_parts
from titan_lite.compile.compile import compile_model
from titan_lite.compile.errors import CompileError
from titan_lite.compile.graph import placeholders, results_of
from titan_lite.compile.graph_passes import GraphPasses
from titan_lite.compile.joint import TraceSettings
from titan_lite.compile.model_graph import compose
from titan_lite.compile.model_parts import TraceableModel, trace_parts
from titan_lite.compile.settings import PassSettings
from titan_lite.config import Compile
from titan_lite.config.families import ModelConfig
from titan_lite.distributed.activation_checkpoint import (
    apply_activation_checkpoint,
    checkpoint_rule,
)
from titan_lite.features.split_backward.backward_halves import halves_of
from titan_lite.models.attention import doc_starts
from titan_lite.models.transformer import Transformer

UNTIED = ModelConfig(
    dim=32, n_layers=4, n_heads=4, n_kv_heads=2, hidden_dim=96, vocab_size=64, max_seq_len=16
)
TIED = dataclasses.replace(UNTIED, n_layers=2, tied_embeddings=True)
TOKENS = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))


def build(config=UNTIED, without=()):
    model = Transformer(config)
    model.init_weights(0)
    for name in without:
        setattr(model, name, None)
    return model


def parts_of(model, **arguments):
    traceable = TraceableModel(model, PlainWeights(model), model.layers, checkpoint_rule)
    return trace_parts(traceable, arguments, TraceSettings())


def run(model, *arguments, by=None, **keywords):
    """(output, gradients of the inputs and of the parameters by FQN)

    by: graphs of the model, which run it.
    """
    inputs = [
        argument.clone().requires_grad_() if argument.is_floating_point() else argument
        for argument in arguments
    ]
    output = (by or model)(*inputs, **keywords)
    torch.manual_seed(1)
    output.backward(torch.randn(output.shape))
    gradients = {fqn: parameter.grad for fqn, parameter in model.named_parameters()}
    model.zero_grad()
    return output.detach(), [each.grad for each in inputs], gradients


def check(model, *arguments, **keywords):
    expected = run(model, *arguments, **keywords)
    with torch.no_grad():
        without_gradients = model(*arguments, **keywords)
    schedule = GraphPasses(PassSettings(Compile(enable=True, backend="aot_eager")))
    traceable = TraceableModel(model, PlainWeights(model), model.layers, checkpoint_rule)
    compiled = compile_model(traceable, schedule)
    for _ in range(2):  # compiled, and again
        found = run(model, *arguments, by=compiled, **keywords)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    with torch.no_grad():
        assert torch.equal(compiled(*arguments, **keywords), without_gradients)
    assert [report.graph for report in schedule.reports] == ["forward", "backward", "inference"]
    return compiled


def test_a_tied_weight_has_one_gradient():
    check(build(TIED), TOKENS)


def test_a_mask_is_made_once_for_all_blocks():
    starts = doc_starts(TOKENS, bos_id=1, eos_id=2)
    assert (starts > 0).any()
    check(build(), TOKENS, doc_starts=starts)
    parts = parts_of(build(), tokens=TOKENS, doc_starts=starts)
    assert parts.different_blocks == 1


def test_a_stage_in_the_middle_of_a_pipeline():
    model = build(without=["tok_embeddings", "norm", "output"])
    check(model, torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(2)))


def test_a_stage_without_blocks():
    model = build(without=["tok_embeddings"])
    model.layers.clear()
    check(model, torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(2)))


@pytest.mark.parametrize(
    ("mode", "option", "kinds"),
    [("none", "op", 1), ("full", "op", 1), ("selective", "op", 1), ("selective", "2", 2)],
)
def test_checkpointed_blocks(mode, option, kinds):
    model = build()
    apply_activation_checkpoint(model.layers, mode, option, compiled=True)
    assert parts_of(model, tokens=TOKENS).different_blocks == kinds
    check(model, TOKENS)


def test_full_checkpointing_saves_the_input_of_a_block_alone():
    model = build()
    apply_activation_checkpoint(model.layers, "full", compiled=True)
    graphs = compose(parts_of(model, tokens=TOKENS))
    saved = graphs.forward.graph.find_nodes(op="output")[0].args[0][1:]
    computed = [node for node in saved if node.op != "placeholder"]
    # the input of each block, and what the norm and the output save
    assert sum(node.meta["val"].shape == (2, 16, 32) for node in computed) <= UNTIED.n_layers + 2


def test_the_models_inputs_are_marked_in_each_graph():
    """Since others keep them: they are not memory that a graph needs (cost/timeline.py)."""
    graphs = compose(parts_of(build(), tokens=TOKENS))
    inputs = placeholders(graphs.forward.graph)
    assert all(node.meta["is_model_input"] for node in inputs)
    saved = results_of(graphs.forward.graph)[1:]
    weights = {node.name for node in saved if node in inputs}
    assert weights
    of_backward = placeholders(graphs.backward.graph)
    assert {node.name for node in of_backward if node.meta["is_model_input"]} == weights


def test_tracing_takes_as_long_for_a_deep_model(monkeypatch):
    traced = []
    trace = model_parts.trace
    monkeypatch.setattr(
        model_parts,
        "trace",
        lambda *arguments, **keywords: traced.append(1) or trace(*arguments, **keywords),
    )
    for layers in (2, 12):
        traced.clear()
        model = Transformer(dataclasses.replace(UNTIED, n_layers=layers))
        parts = parts_of(model, tokens=TOKENS)
        assert len(traced) == 2
        assert [block.fqn for block in parts.blocks] == [f"layers.{i}" for i in range(layers)]


@pytest.mark.slow
def test_a_block_that_differs_in_anything_its_code_may_read_is_traced():
    model = build()
    model.layers["2"].attention_norm.eps = 0.5
    assert parts_of(model, tokens=TOKENS).different_blocks == 2
    model.layers["3"].feed_forward.w1 = nn.Linear(32, 96)
    assert parts_of(model, tokens=TOKENS).different_blocks == 3
    model.layers["1"].requires_grad_(False)
    assert parts_of(model, tokens=TOKENS).different_blocks == 4
    check(model, TOKENS)


def test_arrays_of_numpy_are_told_apart_by_their_numbers():
    model = build()
    for block in model.layers.values():
        block.attention.slopes = [np.linspace(0.5, 1, 4, dtype=np.float32)]
    assert parts_of(model, tokens=TOKENS).different_blocks == 1
    model.layers["2"].attention.slopes = [np.linspace(0.5, 1, 4)]
    model.layers["3"].attention.slopes = [np.linspace(0.5, 2, 4, dtype=np.float32)]
    assert parts_of(model, tokens=TOKENS).different_blocks == 3


def test_weights_before_which_nothing_is_trained():
    model = build()
    model.tok_embeddings.requires_grad_(False)
    model.layers["0"].requires_grad_(False)
    check(model, TOKENS)


def test_a_gradient_of_other_strides_is_copied():
    model = build()
    schedule = GraphPasses(PassSettings(Compile(enable=True, backend="aot_eager")))
    model(TOKENS).sum().backward()
    expected = model.output.weight.grad
    model.zero_grad()
    compiled = compile_model(TraceableModel(model, PlainWeights(model), model.layers), schedule)
    compiled(TOKENS).sum().backward()
    assert torch.equal(model.output.weight.grad, expected)


# Backward in halves


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("config", [UNTIED, pytest.param(TIED, marks=pytest.mark.slow)])
@pytest.mark.parametrize("without", [(), ("norm", "output"), ("tok_embeddings",)])
def test_halves_are_the_whole_to_the_bit(config, without, mode):
    model = build(config, without)
    apply_activation_checkpoint(model.layers, mode, compiled=True)
    hidden = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(2))
    argument = hidden if "tok_embeddings" in without else TOKENS
    output, of_input, of_weights = run(model, argument)
    schedule = GraphPasses(PassSettings(Compile(enable=True, backend="aot_eager")))
    traceable = TraceableModel(model, PlainWeights(model), model.layers, checkpoint_rule)
    compiled = compile_model(traceable, schedule, split_backward=halves_of)

    whole = run(model, argument, by=compiled)
    torch.testing.assert_close(whole, (output, of_input, of_weights), rtol=0, atol=0)
    second_halves = []
    for _ in range(2):  # two microbatches
        with compiled.first_halves() as second:
            _, gradients, nothing = run(model, argument, by=compiled)
        assert set(nothing.values()) == {None}
        torch.testing.assert_close(gradients, of_input, rtol=0, atol=0)
        second_halves.append(second)
    for half in itertools.chain(*second_halves):
        half.run()
    for fqn, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, 2 * of_weights[fqn]), fqn
    names = [report.graph for report in schedule.reports]
    assert names == ["forward", "backward", "backward_input", "backward_weight"]


# What cannot be traced block by block


class Chain(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.layers = nn.ModuleDict({str(i): nn.Linear(4, 4) for i in range(3)})
        self.call = call

    def forward(self, x):
        return self.call(x, list(self.layers.values()))


def scaled_between(x, blocks):
    for block in blocks:
        x = block(2 * x)
    return x


def first_two(x, blocks):
    return blocks[1](blocks[0](x))


def twice(x, blocks):
    for block in [*blocks, *blocks]:
        x = block(x)
    return x


@pytest.mark.parametrize("call", [scaled_between, first_two, twice])
def test_a_model_whose_blocks_are_no_chain_is_refused(call):
    model = Chain(call)
    schedule = GraphPasses(PassSettings(Compile(enable=True, backend="aot_eager")))
    compiled = compile_model(TraceableModel(model, PlainWeights(model), model.layers), schedule)
    with pytest.raises(CompileError, match="blocks"):
        compiled(torch.ones(2, 4))


@pytest.mark.parametrize("fqn", ["", "layers.2", "layers.1.attention"])
def test_hooks_are_refused(fqn):
    model = build()
    model.get_submodule(fqn).register_forward_hook(lambda module, inputs, output: 2 * output)
    schedule = GraphPasses(PassSettings(Compile(enable=True, backend="aot_eager")))
    compiled = compile_model(TraceableModel(model, PlainWeights(model), model.layers), schedule)
    with pytest.raises(CompileError, match="has hooks"):
        compiled(TOKENS)


def test_a_weight_that_is_trained_later_gets_a_gradient():
    model = build()
    model.layers["1"].requires_grad_(False)
    compiled = check(model, TOKENS)
    model.layers["1"].requires_grad_(True)
    expected = run(model, TOKENS)
    torch.testing.assert_close(run(model, TOKENS, by=compiled), expected, rtol=0, atol=0)
