"""Runs with Muon and Shampoo: on every layout that of one process, resumed to the bit, and between
optimizers in words.
"""

import dataclasses

import pytest
import torch
from ranks import run_ranks
from resumed import copy_at_step_2, losses, same, trained
from tiny import (
    DEBUG,
    DEBUG_TOKENIZER,
    NO_CHECKPOINT,
    NO_VALIDATION,
    NO_WORKERS,
    SMALL,
    steps,
)

from titan_lite.config import ConfigError, load_config
from titan_lite.config.families import LLAMA3
from titan_lite.distributed.layout import Layout
from titan_lite.rules.machine import check_machine
from titan_lite.tools.verify.compare import compare
from titan_lite.tools.verify.observe import run
from titan_lite.tools.verify.proxy import parse_layout, proxy, proxy_model, reference
from titan_lite.trainer import Trainer

TINY = [
    "--model.dim=64",
    "--model.n_layers=2",
    "--model.hidden_dim=90",
]  # rows that four ranks have unevenly
OPTIONS = {"Muon": [*TINY, "--optimizer.name=Muon", "--optimizer.ns_dtype=float32"]}
OPTIONS["Shampoo"] = [*TINY, "--optimizer.name=Shampoo", "--optimizer.max_preconditioner_dim=48"]
OPTIONS["Shampoo"] += [
    "--optimizer.start_preconditioning_step=2",
    "--optimizer.precondition_frequency=3",
]


def train(name, folder, *options, ranks=2):
    return run_ranks(ranks, trained, folder, [*steps(4), *OPTIONS[name], *options], init=False)


# Layouts


def parameters_of(folder, name, options):
    """{FQN: whole parameter} on this rank's stages, after four steps of the debug model in float32."""
    options = [
        *SMALL,
        *steps(4),
        *NO_VALIDATION,
        *NO_CHECKPOINT,
        *NO_WORKERS,
        "--lr_scheduler.warmup_steps=1",
        *options,
    ]
    options += [
        "--training.global_batch_size=8",
        "--training.local_batch_size=2",
        "--job.dump_folder",
        str(folder),
    ]
    trainer = Trainer(load_config(DEBUG, [*OPTIONS[name], *options]))
    trainer.train()
    return {fqn: parameter.detach().full_tensor() for fqn, parameter in trainer.parameters.items()}


def degrees(**of):
    names = dict(pp="pipeline_parallel", dp="data_parallel_replicate", tp="tensor_parallel")
    return [f"--parallelism.{names[axis]}_degree={degree}" for axis, degree in of.items()]


LAYOUTS = {
    "FSDP": (2, []),
    "FSDP of 4": (4, []),
    "HSDP": (4, degrees(dp=2)),
    "FSDP x TP": (4, degrees(tp=2)),
    "FSDP x PP": (4, degrees(pp=2)),
}
SLOW = [
    ("Shampoo", "llama3", "FSDP"),
    ("Muon", "qwen3", "FSDP"),
    ("Muon", "qwen3_moe", "FSDP"),
]
RELEASE = [
    ("Shampoo", "qwen3", "FSDP of 4"),
    ("Muon", "qwen3_moe", "HSDP"),
    ("Shampoo", "llama3", "FSDP x TP"),
    ("Muon", "qwen3_moe", "FSDP x PP"),
]


@pytest.mark.parametrize(
    ("name", "family", "layout"),
    [
        ("Muon", "llama3", "FSDP"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
        *(pytest.param(*case, marks=pytest.mark.release) for case in RELEASE),
    ],
)
def test_four_steps_on_a_layout_are_those_of_one_process(name, family, layout, tmp_path):
    of_family = [f"--model.name={family}"]
    (expected,) = run_ranks(1, parameters_of, tmp_path / "one", name, of_family, init=False)
    ranks, options = LAYOUTS[layout]
    seen = set()
    options = [*of_family, *options]
    for found in run_ranks(ranks, parameters_of, tmp_path / "ranks", name, options, init=False):
        seen |= found.keys()
        for fqn, parameter in found.items():
            torch.testing.assert_close(parameter, expected[fqn], atol=1e-5, rtol=0)
    assert seen == expected.keys()


# Resuming

OF_FOUR = (degrees(dp=2), degrees(tp=2), degrees(pp=2))


@pytest.fixture(scope="module", params=["Shampoo", pytest.param("Muon", marks=pytest.mark.slow)])
def whole(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return folder, train(request.param, folder), request.param


@pytest.fixture
def at_step_2(whole, tmp_path):
    return copy_at_step_2(whole[0], tmp_path)


def test_a_run_resumes_to_the_bit(whole, at_step_2):
    assert f"optimizer: {whole[2]} for 14 matrices, shared by 2 ranks" in whole[1][0][0]
    found = train(whole[2], at_step_2)
    assert losses(at_step_2) == {step: loss for step, loss in losses(whole[0]).items() if step > 2}
    assert all(
        same(tensors, expected) for (_, tensors), (_, expected) in zip(found, whole[1], strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "options"),
    [(1, []), *(pytest.param(4, each, marks=pytest.mark.release) for each in OF_FOUR)],
)
def test_on_another_layout_it_goes_on_within_rounding(whole, at_step_2, ranks, options):
    train(whole[2], at_step_2, *options, ranks=ranks)
    assert losses(at_step_2)[4] == pytest.approx(losses(whole[0])[4], rel=1e-5)


def test_another_optimizer_is_refused_and_begins_with_the_model_alone_if_asked(whole, at_step_2):
    config = load_config(
        DEBUG,
        [*SMALL, *TINY, "--job.dump_folder", str(at_step_2), "--training.global_batch_size=8"],
    )
    with pytest.raises(ConfigError) as refused:
        check_machine(config, Layout.from_config(config, 2))
    assert f'the optimizer restarts: optimizer.name = "AdamW", was "{whole[2]}"' in str(
        refused.value
    )
    assert str(refused.value).endswith(
        "accept_model_only = true, which starts with moments of zero"
    )
    options = [*TINY, *steps(3), "--checkpoint.accept_model_only"]
    (told, tensors), _ = run_ranks(2, trained, at_step_2, options, init=False)
    assert f'optimizer.name = "AdamW", was "{whole[2]}"' in told
    assert {name.rpartition(".")[2] for name in tensors if "wq" in name} == {
        "weight",
        "exp_avg",
        "exp_avg_sq",
        "step",
    }
    assert tensors["optimizer.state.layers.0.attention.wq.weight.step"] == 1


# Refused


@pytest.mark.release
@pytest.mark.parametrize("name", OPTIONS)
def test_verify_compares_a_layout_that_has_owners(name):
    config = load_config(
        DEBUG, [f"--optimizer.name={name}", f"--model.tokenizer_path={DEBUG_TOKENIZER}"]
    )
    small = proxy(config, parse_layout("dp_shard=2,tp=2"), 3)
    of_name = {"Muon": ("ns_dtype", "float32"), "Shampoo": ("start_preconditioning_step", 1)}
    key, value = of_name[name]
    assert (small.optimizer.name, getattr(small.optimizer, key)) == (name, value)
    model = dataclasses.replace(proxy_model(LLAMA3.flavors["debug"], 4), dim=64, hidden_dim=96)
    result = compare(run(small, model), run(reference(small), model))
    assert result.agrees, result
