"""Resuming for real: on other ranks the same samples and losses.

Samples are compared by hash, step by step. Losses on other ranks: within 1e-4, relative; on the
same ones bitwise.
"""

import hashlib
import json
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from commands import python, run
from ranks import run_ranks
from tiny import DEBUG, NO_VALIDATION, SMALL, every, steps

from titan_lite.config import load_config
from titan_lite.metrics.run_files import read_metrics
from titan_lite.trainer import Trainer

OPTIONS = [
    *SMALL,
    *steps(6, schedule=12),
    "--lr_scheduler.warmup_steps=2",
    *every(2),
    *NO_VALIDATION,
]


def watched(folder, options):
    """One rank's part of a run: the hashes of the sequences it took by step, and one of its
    parameters at the end.
    """
    config = load_config(DEBUG, ["--job.dump_folder", str(folder), *OPTIONS, *options])
    trainer = Trainer(config)
    samples: dict[int, list[str]] = {}
    next_batch = trainer.next_batch

    def watching():
        batch = next_batch()
        rows = torch.cat([batch.input, batch.label[:, -1:]], dim=1)
        samples.setdefault(trainer.step, []).extend(
            hashlib.sha256(row.numpy().tobytes()).hexdigest() for row in rows
        )
        return batch

    trainer.next_batch = watching
    trainer.train()
    own = torch.cat(
        [parameter.detach().to_local().flatten() for parameter in trainer.parameters.values()]
    )
    return samples, hashlib.sha256(own.numpy().tobytes()).hexdigest()


def train(ranks, folder, *options):
    """Train in `folder`; ({step: {hash: how often it was seen}}, the ranks' hashes of parameters)."""
    results = run_ranks(ranks, watched, folder, [*options], init=False)
    seen: dict[int, Counter] = {}
    for samples, _ in results:
        for step, hashes in samples.items():
            seen.setdefault(step, Counter()).update(hashes)
    return seen, [parameters for _, parameters in results]


def losses(folder):
    return {
        step: values["loss"]
        for step, values in read_metrics(Path(folder) / "metrics.jsonl").items()
    }


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Six steps on two ranks, every second one saved."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    samples, parameters = train(2, folder)
    assert list(samples) == [1, 2, 3, 4, 5, 6]
    assert {sum(counts.values()) for counts in samples.values()} == {8}
    assert len({sample for counts in samples.values() for sample in counts}) == 6 * 8
    for values in read_metrics(folder / "metrics.jsonl").values():  # of 4 sequences of each rank
        assert values["tps"] * values["step_time"] == pytest.approx(4 * 32)
    return folder, samples, parameters


@pytest.fixture
def at_step_2(uninterrupted, tmp_path):
    """A run that was stopped there."""
    shutil.copytree(uninterrupted[0], tmp_path, dirs_exist_ok=True)
    for step in (4, 6):
        shutil.rmtree(tmp_path / f"checkpoint/step-{step}")
    (tmp_path / "metrics.jsonl").unlink()
    return tmp_path


def same_run(parts, folder, uninterrupted, **tolerance):
    """Assert that the parts of the run in `folder` have the samples and losses of the uninterrupted
    run.
    """
    expected = {step: samples for step, samples in uninterrupted[1].items() if step > 2}
    assert {step: samples for part in parts for step, samples in part.items()} == expected
    assert sum(len(part) for part in parts) == len(expected)  # no step twice
    whole = losses(uninterrupted[0])
    assert losses(folder) == pytest.approx({step: whole[step] for step in expected}, **tolerance)


def test_resumed_on_1_and_then_4_ranks_it_reads_the_samples_of_2_ranks(uninterrupted, at_step_2):
    parts = [train(1, at_step_2, *steps(4))[0], train(4, at_step_2)[0]]
    same_run(parts, at_step_2, uninterrupted, rel=1e-4)


def test_resumed_twice_it_is_bitwise_the_uninterrupted_run(uninterrupted, at_step_2):
    """From step 2 to 3, and from there to the end."""
    first, _ = train(2, at_step_2, *steps(3))
    second, parameters = train(2, at_step_2)
    same_run([first, second], at_step_2, uninterrupted, rel=0, abs=0)
    assert parameters == uninterrupted[2]


@pytest.mark.slow
def test_in_float8_it_is_bitwise_too(tmp_path):
    """Scales are not saved: they are those of the weights."""
    float8 = ["--float8.enable", "--float8.all_gather"]
    whole = train(2, tmp_path / "whole", *float8, *steps(2))
    train(2, tmp_path / "parts", *float8, *steps(1))
    again = train(2, tmp_path / "parts", *float8, *steps(2))
    assert again[1] == whole[1]
    assert losses(tmp_path / "parts")[2] == losses(tmp_path / "whole")[2]


@pytest.mark.release
def test_restart_data_begins_anew_only_once(uninterrupted, at_step_2, tmp_path_factory):
    """restart_data stays in the recipe, and a later resume does not begin once more."""
    other = ["--debug.seed=7", "--checkpoint.restart_data"]
    expected, _ = train(2, tmp_path_factory.mktemp("other"), "--debug.seed=7")
    parts = [
        train(2, at_step_2, *other, *steps(4))[0],
        train(1, at_step_2, *other)[0],
    ]
    found = {step: samples for part in parts for step, samples in part.items()}
    assert list(found) == [3, 4, 5, 6]
    assert [found[step] for step in found] == [expected[step - 2] for step in found]
    assert not found[3].keys() & uninterrupted[1][3].keys()


def test_a_checkpoint_records_its_recipe_and_run(uninterrupted):
    folder, *_ = uninterrupted
    state = json.loads((folder / "checkpoint/step-6/state.json").read_text())
    config = load_config(folder / "config.toml")
    run = state["identity"]
    recipe = {section: vars(getattr(config, section)) for section in run["recipe"]}
    recipe["job"] = {
        **recipe["job"],
        "dump_folder": run["recipe"]["job"]["dump_folder"],
    }  # made absolute for config.toml
    assert run["recipe"] == json.loads(json.dumps(recipe))
    assert (
        run["tokenizer"]
        == hashlib.sha256(Path(config.model.tokenizer_path).read_bytes()).hexdigest()
    )
    assert run["mesh"] == {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1, "ep": 1}
    assert (run["world_size"], run["sequences"], run["model"]["n_layers"]) == (2, 8, 2)
    assert run["decay"] == {"begin": 10, "steps": 2}
    assert run["versions"]["torch"] == torch.__version__
    assert run["numerics"]["threads"] == 1
    assert run["numerics"]["CPU capability"] == torch.backends.cpu.get_cpu_capability()
    assert re.fullmatch(r"[0-9a-f]{40}(\+changes)?|", run["git"])
    assert state["parts"]["progress"]["tokens_seen"] == 6 * 8 * 32
    assert state["tensors"] == ["model", "optimizer"]


@pytest.mark.slow
def test_a_recipe_that_cannot_go_on_is_told_in_one_line_before_anything_starts(uninterrupted):
    folder, *_ = uninterrupted
    options = ["--job.dump_folder", folder, *OPTIONS, *steps(8), "--debug.seed=4"]
    result = run(*python("-m", "titan_lite.train", DEBUG, *options))
    assert result.returncode == 2
    starting, line = result.stdout.splitlines()
    assert starting.endswith("starting on 1 rank")
    assert "debug.seed = 4, was 0" in line
