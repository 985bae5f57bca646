"""The main job through its entry points: what it writes, that it resumes, and how it ends."""

import json
import math
import re

import pytest
import torch
from commands import run, script, train
from ranks import run_ranks
from tiny import AOT_EAGER, DEBUG, SHORT, SMALL, every, steps

from titan_lite.checkpoint.weights import load, open_weights
from titan_lite.config import load_config
from titan_lite.metrics.run_files import read_metrics
from titan_lite.models.loss import Loss
from titan_lite.resilience import TrainingError
from titan_lite.tools import convert
from titan_lite.tools.report.page import main
from titan_lite.tools.report.run_record import read_run
from titan_lite.trainer import Trainer

SIX_STEPS = ["--training.seq_len=64", *steps(6, schedule=12), *every(3, validated=3)]
OPTIONS = [*SMALL, *SIX_STEPS]
OF_THE_DEBUG_FLAVOR = [*SHORT, *SIX_STEPS]


def embeddings_of(seed, folder):
    options = ["--job.dump_folder", str(folder), *SMALL, f"--debug.seed={seed}"]
    parameters = Trainer(load_config(DEBUG, options)).parameters
    return parameters["tok_embeddings.weight"].full_tensor().detach()


@pytest.mark.slow
def test_another_seed_has_other_weights(tmp_path):
    of_seeds = [
        run_ranks(1, embeddings_of, seed, tmp_path / str(seed), init=False)[0] for seed in (0, 1)
    ]
    assert not torch.equal(*of_seeds)


def test_the_main_job_writes_what_it_promises_goes_on_on_one_rank_and_is_exported(tmp_path):
    def files():
        return {
            path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*") if path.is_file()
        }

    command = script(tmp_path, *OF_THE_DEBUG_FLAVOR)
    first = run(*command)
    assert first.returncode == 0
    assert files() == {
        "config.toml",
        "metrics.jsonl",
        "events.jsonl",
        "tb",
        "checkpoint",
        "lock",
    }
    assert "layout: 2 ranks = dp_shard 2, each one CPU" in first.stdout
    said = [line.partition(" ")[2] for line in first.stdout.splitlines()]
    (end,) = (number for number, line in enumerate(said) if line.startswith("done: step 6, "))
    assert re.fullmatch(r"goodput: \d+\.\d% of .* in productive steps; .*", said[end + 2])
    assert said[end + 3 : end + 5] == [
        "checkpoints: step-3, step-6",
        f"to look at: python -m titan_lite report {tmp_path}; tensorboard --logdir {tmp_path}",
    ]
    assert re.search(r"5,770,496 parameters", first.stdout)
    assert re.search(
        r"step +6  loss \d\.\d{4}  grad norm \S+  lr \S+  tps \S+  tflops \S+  memory \S+ GiB",
        first.stdout,
    )
    assert "\033[" not in first.stdout  # colours are for terminals
    metrics = read_metrics(tmp_path / "metrics.jsonl")
    assert list(metrics) == [0, 1, 2, 3, 4, 5, 6]
    assert metrics[1]["loss"] == pytest.approx(math.log(2048) + 1 / 32, abs=0.05)
    assert metrics[6]["validation_loss"] < metrics[0]["validation_loss"] - 0.1
    assert {"loss", "grad_norm", "lr", "tps", "tflops", "memory_gib", "data_wait"} <= metrics[
        6
    ].keys()
    assert "mfu" not in metrics[6]  # of a CPU no peak is stated
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == [
        "lock",
        "step-3",
        "step-6",
    ]

    more = run(*command, *steps(8), NGPU=1)
    assert more.returncode == 0
    assert "resumed from" in more.stdout
    rounds = "results differ by floating-point rounding: ranks along dp_shard: 1, was 2"
    assert rounds in more.stdout
    assert "layout: 1 rank, each one CPU" in more.stdout
    assert list(read_metrics(tmp_path / "metrics.jsonl")) == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert json.loads((tmp_path / "checkpoint/step-8/state.json").read_text())["step"] == 8

    done = run(*command)
    assert done.returncode == 0
    assert "nothing to do: step 8 is done" in done.stdout

    events = [(event["event"], event["step"]) for event in read_run(tmp_path, "run").events]
    saved = [("checkpoint", 3), ("checkpoint", 6), ("done", 6)]
    assert events == [
        ("start", 0),
        ("first step", 1),
        *saved,
        ("resume", 6),
        ("first step", 7),
        ("checkpoint", 8),
        ("done", 8),
        ("resume", 8),
        ("done", 8),
    ]
    assert main([str(tmp_path)]) == 0
    exported = tmp_path / "exported"
    assert convert.main([str(tmp_path), str(exported)]) == 0
    ours, theirs = ({"output.weight": torch.zeros(2048, 256)} for _ in range(2))
    load(open_weights(tmp_path / "checkpoint/step-8"), ours)
    load(open_weights(exported), theirs)
    assert ours["output.weight"].norm() > 1
    assert torch.equal(ours["output.weight"], theirs["output.weight"])


def with_a_broken_loss(folder):
    """A run whose model cannot be traced, as its loss depends on a value; returns how it ended."""
    config = load_config(DEBUG, ["--job.dump_folder", str(folder), *OPTIONS, *AOT_EAGER])
    Loss.__call__ = lambda loss, hidden, *others: hidden.sum() if hidden.any() else hidden.mean()
    with pytest.raises(TrainingError) as failure:
        Trainer(config).train()
    return str(failure.value), type(failure.value.__cause__.__cause__).__name__


def test_what_cannot_be_compiled_ends_the_run_with_the_keys_to_change(tmp_path):
    ((message, cause),) = run_ranks(1, with_a_broken_loss, tmp_path, init=False)
    assert re.fullmatch(
        r'compile.backend = "aot_eager" cannot compile the model \(.+\); use compile.enable ='
        r" false",
        message,
    )
    assert cause == "GuardOnDataDependentSymNode"


# Two command lines stand for all wrong recipes. Each mistake and its message is tested with its rule
# (tests/unit/rules, tests/unit/config), wrong variables in tests/unit/test_launch_options.py.


def test_a_wrong_recipe_ends_before_anything_starts(tmp_path):
    folder = tmp_path / "out"
    result = run(*script(folder, "--training.stepz", "3"), CONFIG_FILE="debug_model")
    assert result.returncode == 2
    assert result.stdout == (
        "error: command line: unknown option --training.stepz; did you mean training.steps?\n"
    )
    assert not folder.exists()


def test_a_recipe_wrong_for_this_machine_ends_before_ranks_are_connected(tmp_path):
    folder = tmp_path / "out"
    result = train(2, DEBUG, folder, "--profiling.enable_memory_snapshot")
    assert result.returncode == 2
    starting, line = result.stdout.splitlines()
    assert starting.endswith("starting on 2 ranks")
    # a process group would be named by "[rank 0]"
    assert line.startswith("error: command line: profiling.enable_memory_snapshot = true takes")
    assert not folder.exists()
