"""The balance of experts does not depend on the layout: losses, gradients, choices, and what routers
keep are those of one process.
"""

import functools
from dataclasses import replace

import pytest
import torch
from tiny import DEBUG, DEBUG_TOKENIZER

from titan_lite.config import load_config
from titan_lite.config.families import QWEN3_MOE
from titan_lite.dtensor import local
from titan_lite.hooks import Hook
from titan_lite.models.fqns import is_of_experts
from titan_lite.models.shapes import shape_of
from titan_lite.tools.verify.compare import compare
from titan_lite.tools.verify.observe import run
from titan_lite.tools.verify.proxy import parse_layout, proxy, proxy_model, reference

pytestmark = pytest.mark.ranks(2)
STEPS = 3
STRONG = ["--experts.balance_coefficient=0.5"]  # a term that losses show
BALANCES = {
    "step": ["--experts.balance=step", *STRONG],
    "sequence": ["--experts.balance=sequence", *STRONG],
    "bias": ["--experts.balance=bias", "--experts.bias_update_rate=0.02"],
}
COMPILED = ["--compile.enable"]
FULL = ["--activation_checkpoint.mode=full"]
AT_ONCE = ["--training.global_batch_size=-1"]
ZBV = ["--parallelism.pipeline_parallel_schedule=ZBVZeroBubble"]
DEFAULT = pytest.param(
    *("bias", "pp=2", ZBV),
    marks=pytest.mark.skipif(
        torch.__version__ < "2.13",
        reason="torch 2.11 cannot split an eager backward that has an autograd.Function",
    ),
)
SLOW = [
    ("step", "dp_shard=2,tp=2", []),
    ("sequence", "tp=2", FULL),
    ("sequence", "cp=2", COMPILED),
]
LAYOUTS = {"dp_replicate=2,cp=2": [], "pp=2,tp=2": FULL}
RELEASE = [
    (balance, layout, options) for balance in BALANCES for layout, options in LAYOUTS.items()
]
RELEASE += [("step", "dp_shard=2", AT_ONCE)]


def proxy_of(layout, *options):
    keys = ["--model.name=qwen3_moe", f"--model.tokenizer_path={DEBUG_TOKENIZER}", *options]
    return proxy(load_config(DEBUG, keys), parse_layout(layout), STEPS)


class KeptAtTheEnd(Hook):
    """Fails unless routers keep the same at the end on all ranks, and writes it to a file."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_end(self, trainer):
        degrees = trainer.layout.degrees  # all ranks of a copy share the experts
        shards = degrees["dp_shard"] * degrees["cp"] * degrees["tp"]
        for fqn, parameter in trainer.parameters.items():
            if is_of_experts(parameter.shape):
                assert local(parameter).shape[0] == 8 // shards, fqn
        kept = {fqn: buffer.clone() for fqn, buffer in trainer.model.buffers.items()}
        stage = trainer.mesh["pp"].get_local_rank()
        file = f"{self.folder}/{stage}-{trainer.rank}.pt"
        torch.save(kept, file)


def keep(trainer, folder):
    trainer.hooks.append(KeptAtTheEnd(folder))


def trained(config, folder):
    """(what was observed, {FQN: what a router keeps at the end})."""
    folder.mkdir()
    model = proxy_model(shape_of(config.model), 4)
    observed = run(config, model, prepare=functools.partial(keep, folder=folder))
    kept: dict[str, torch.Tensor] = {}
    for file in folder.iterdir():
        for fqn, buffer in torch.load(file).items():
            assert torch.equal(kept.setdefault(fqn, buffer), buffer), fqn
    return observed, kept


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """alone(balance): a run of one process, once."""

    @functools.cache
    def alone(balance):
        config = reference(proxy_of("dp_shard=1", *BALANCES[balance], *AT_ONCE))
        return trained(config, tmp_path_factory.mktemp(balance) / "kept")

    return alone


CASES = [
    DEFAULT,
    *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
    *(pytest.param(*case, marks=pytest.mark.release) for case in RELEASE),
]


@pytest.mark.parametrize(("balance", "layout", "options"), CASES)
def test_a_balance_is_that_of_one_process(balance, layout, options, alone, tmp_path):
    observed, kept = trained(proxy_of(layout, *BALANCES[balance], *options), tmp_path / "kept")
    expected, expected_kept = alone(balance)
    result = compare(observed, expected)
    assert result.agrees, result
    assert len(expected.choices) == 4
    assert result.loss < 1e-5, result
    assert kept.keys() == expected_kept.keys()
    assert len(kept) == 2 * 4
    # steps are of whole numbers of tokens: a token that has another expert is one of 512
    for fqn, buffer in kept.items():
        assert (buffer - expected_kept[fqn]).abs().max() <= 3 / 512, fqn


def flip(trainer):
    """Route some tokens of the last layer otherwise."""
    router = trainer.model.stages[-1].model.layers["3"].moe.router
    router.expert_bias += torch.tensor([0.01, *[0.0] * 7])


@pytest.mark.slow
def test_choices_that_differ_are_found_with_their_gap():
    config = reference(proxy_of("dp_shard=1", "--experts.balance=none", *AT_ONCE))
    model = replace(proxy_model(QWEN3_MOE.flavors["debug"], 1))
    expected = run(config, model)
    result = compare(run(config, model, prepare=flip), expected)
    assert not result.agrees
    assert result.flips > 0
    assert 1e-6 < result.gap <= 0.011

    # by choices alone: an exchange of two that are nearly equal is none
    fqn, choices = next(iter(expected.choices.items()))
    exchanged = choices.experts.clone()
    exchanged[0, 0] = (exchanged[0, 0] + 1) % 8
    found = replace(
        expected, choices={**expected.choices, fqn: replace(choices, experts=exchanged)}
    )
    for gap, agrees in ((1e-3, False), (1e-8, True)):
        expected.choices[fqn].gaps[0, 0] = gap
        result = compare(found, expected)
        assert (result.flips, result.agrees) == (1, agrees)
        assert result.gap == pytest.approx(gap)
