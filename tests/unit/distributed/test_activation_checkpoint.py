"""Activation checkpointing: the same gradients to the bit, and in backward exactly the operators
that were to be recomputed.
"""

import gc
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from titan_lite.config.families import ModelConfig
from titan_lite.distributed.activation_checkpoint import (
    apply_activation_checkpoint,
    checkpoint_rule,
    fully_checkpointed,
)
from titan_lite.models.transformer import Transformer, TransformerBlock

LAYERS = 3
CONFIG = ModelConfig(
    dim=32, n_layers=LAYERS, n_heads=4, n_kv_heads=2, hidden_dim=48, vocab_size=64, max_seq_len=16
)
MODES = ("none", "selective", "full")


def build_model(mode, option="op"):
    model = Transformer(CONFIG)
    model.init_weights(0)
    apply_activation_checkpoint(model.layers, mode, option)
    return model


def loss_of(model):
    tokens = torch.randint(CONFIG.vocab_size, (2, 16), generator=torch.Generator().manual_seed(0))
    return model(tokens).square().mean()


class Count(TorchDispatchMode):
    """Operators by name: "mm", "silu", "attention" whichever kernel it is."""

    def __enter__(self):
        self.calls = Counter()
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        attends = name.startswith("_scaled_dot_product") and not name.endswith("backward")
        self.calls["attention" if attends else name] += 1
        return func(*args, **(kwargs or {}))


def operators(mode, option="op"):
    """(in forward, in backward)"""
    model = build_model(mode, option)
    with Count() as forward:
        loss = loss_of(model)
    with Count() as backward:
        loss.backward()
    return forward.calls, backward.calls


@pytest.mark.parametrize(
    ("mode", "option"), [("selective", "op"), ("selective", "op/2"), ("full", "op")]
)
def test_gradients_are_bitwise_those_without_it(mode, option):
    expected, model = build_model("none"), build_model(mode, option)
    losses = [loss_of(each) for each in (expected, model)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    for (name, ours), theirs in zip(
        model.named_parameters(), expected.named_parameters(), strict=True
    ):
        assert theirs[1].grad.any(), name
        assert torch.equal(ours.grad, theirs[1].grad), name


@pytest.mark.parametrize(
    ("mode", "option", "recomputed"),
    [
        ("none", "op", dict(mm=0, attention=0, silu=0)),
        ("selective", "op", dict(mm=0, attention=0, silu=1)),
        ("selective", "op/2", dict(mm=3, attention=0, silu=1)),  # wk, wo and w3
        # of seven matmuls all but the last, whose result backward does not need
        ("full", "op", dict(mm=6, attention=1, silu=1)),
    ],
)
def test_what_a_block_computes_again_in_backward(mode, option, recomputed):
    forward, backward = operators(mode, option)
    assert (forward["mm"], forward["attention"], forward["silu"]) == (
        7 * LAYERS + 1,
        LAYERS,
        LAYERS,
    )
    own = dict(
        mm=2 * forward["mm"], attention=0, silu=0
    )  # two matmuls for the gradients of each one
    assert {name: (backward[name] - own[name]) / LAYERS for name in recomputed} == recomputed


@pytest.mark.parametrize(("option", "blocks"), [("1", 3), ("2", 2), ("3", 1)])
def test_every_so_many_blocks_is_recomputed(option, blocks):
    _, backward = operators("selective", option)
    assert backward["silu"] == blocks
    checkpointed = list(map(checkpoint_rule, build_model("selective", option).layers.values()))
    assert [rule is not None for rule in checkpointed] == [
        i % int(option) == 0 for i in range(LAYERS)
    ]


def test_blocks_are_counted_in_the_whole_model_and_not_in_a_stage():
    model = Transformer(CONFIG)
    del model.layers["0"]
    apply_activation_checkpoint(model.layers, "selective", "2")
    rules = [checkpoint_rule(block) for block in model.layers.values()]
    assert [rule is not None for rule in rules] == [False, True]


@pytest.mark.parametrize("mode", ["none", "selective"])
def test_blocks_can_be_fully_checkpointed_for_a_time(mode):
    model = build_model(mode)
    tokens = torch.arange(8)[None]
    with fully_checkpointed(model.layers):
        model(tokens).sum().backward()
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    model(tokens).sum().backward()
    for gradient, parameter in zip(found, model.parameters(), strict=True):
        assert torch.equal(gradient, parameter.grad)
    is_checkpointed = [checkpoint_rule(block) is not None for block in model.layers.values()]
    assert is_checkpointed == [mode != "none"] * LAYERS


@pytest.mark.parametrize("mode", MODES)
def test_names_and_classes_stay(mode):
    plain = Transformer(CONFIG)
    names = [name for name, _ in plain.named_parameters()]
    modules = [name for name, _ in plain.named_modules()]
    model = build_model(mode)
    assert [name for name, _ in model.named_parameters()] == names
    assert list(model.state_dict()) == names
    assert [name for name, _ in model.named_modules()] == modules
    for block in model.layers.values():
        assert isinstance(block, TransformerBlock)
        assert (checkpoint_rule(block) is None) is (mode == "none")


def test_one_model_does_not_change_another():
    build_model("full")
    _, backward = operators("none")
    assert backward["silu"] == 0


@pytest.mark.parametrize("mode", MODES)
def test_without_gradients_nothing_is_kept(mode):
    with torch.no_grad():
        expected, actual = loss_of(build_model("none")), loss_of(build_model(mode))
    assert not actual.requires_grad
    assert torch.equal(actual, expected)


@pytest.mark.parametrize(("option", "kept"), [("op", 6), ("op/2", 3)])
def test_the_result_of_a_block_is_kept_once(option, kept):
    """Its input is the result of the one before.

    No copy of its last matmul is kept in eager mode: no gradient needs it.
    """
    model = build_model("selective", option)
    gc.collect()
    others = {id(each) for each in gc.get_objects() if issubclass(type(each), torch.Tensor)}
    loss = loss_of(model)
    rows = (
        2 * CONFIG.max_seq_len
    )  # results of matmuls have two dimensions; those that autograd saves have three
    found = [
        each
        for each in gc.get_objects()
        if issubclass(type(each), torch.Tensor) and id(each) not in others
    ]
    assert sum(each.dim() == 2 and len(each) == rows for each in found) == kept * LAYERS
    loss.backward()
