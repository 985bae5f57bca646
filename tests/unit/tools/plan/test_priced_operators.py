"""A plan of eager mode prices the operators that a run computes, recomputed ones included."""

import dataclasses
from collections import Counter
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from tiny import UNTIED
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from titan_lite.config import ActivationCheckpoint, Config, Training
from titan_lite.cost.profiles import load_machine
from titan_lite.distributed.activation_checkpoint import apply_activation_checkpoint
from titan_lite.distributed.layout import Layout
from titan_lite.models.transformer import Transformer
from titan_lite.tools.plan.trace import PlannedLayout, PricedPasses, trace_stage

LAYERS, TOKENS = 3, 16
MODEL = dataclasses.replace(UNTIED, n_layers=LAYERS, max_seq_len=TOKENS)
WORDS = ("aten.mm.", "attention", "silu")


class Counting(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.names.append(str(operator))
        return operator(*args, **(kwargs or {}))


def counted(names):
    return Counter(name for name in names if any(word in name for word in WORDS))


CHECKPOINTING = [
    ("none", "op"),
    ("selective", "op"),
    ("selective", "op/2"),
    ("selective", "2"),
    ("full", "op"),
]


def priced_in_all_modes():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    return {(mode, option): priced(mode, option) for mode, option in CHECKPOINTING}


def priced(mode, option):
    """The operators in the graphs of a planned stage, forward and backward."""
    config = Config(
        training=Training(local_batch_size=1, seq_len=TOKENS, mixed_precision_param="float32"),
        activation_checkpoint=ActivationCheckpoint(mode=mode, selective_ac_option=option),
    )
    layout = PlannedLayout(**vars(Layout.from_config(config, 1, MODEL)), config=config)
    found = {}
    run = PricedPasses.run

    def noting(self, module, name):
        calls = [node for node in module.graph.nodes if node.op == "call_function"]
        names = counted(str(node.target) for node in calls)
        if names:  # the graphs of the loss have none
            found[name] = names
        run(self, module, name)

    modules = ("tok_embeddings", "norm", "output")
    with patch.object(PricedPasses, "run", noting):
        trace_stage(layout, modules, frozenset("B"), LAYERS, load_machine("H100"))
    return found


@pytest.fixture(scope="module")
def graphs():
    return run_ranks(1, priced_in_all_modes, init=False)[0]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "option"), CHECKPOINTING)
def test_the_graphs_of_eager_mode_have_the_operators_of_a_run(mode, option, graphs):
    model = Transformer(MODEL)
    model.init_weights(0)
    apply_activation_checkpoint(model.layers, mode, option)
    with Counting() as forward:
        output = model(torch.zeros(1, TOKENS, dtype=torch.int64))
    with Counting() as backward:
        output.square().mean().backward()
    assert graphs[mode, option]["forward"] == counted(forward.names)
    assert graphs[mode, option]["backward"] == counted(backward.names)
