"""Runs of a mixture of experts: what is logged and drawn, and that a run that is stopped or killed is
the run left alone, on other ranks too.
"""

import json
import logging

import pytest
import torch
from commands import train
from ranks import run_ranks
from resumed import copy_at_step_2, losses, same, trained
from tiny import DEBUG, NO_VALIDATION, SMALL, steps

from titan_lite.config import load_config
from titan_lite.features.moe.balance import ExpertBalance
from titan_lite.hooks import Hook
from titan_lite.logging import logger
from titan_lite.metrics.run_files import read_metrics
from titan_lite.tools.report.page import main as report
from titan_lite.trainer import Trainer

MOE = ["--model.name=qwen3_moe", "--model.hidden_dim=32"]
BIAS = [*MOE, "--experts.balance=bias", "--experts.bias_update_rate=1e-4"]


FOUR = steps(4)


def test_a_run_logs_the_load_of_experts_and_the_report_draws_it(tmp_path):
    options = [*SMALL, *MOE, *steps(4), *NO_VALIDATION, "--metrics.log_freq=2"]
    done = train(2, DEBUG, tmp_path, *options)
    assert done.returncode == 0
    assert "of them for a token" in done.stdout
    last = read_metrics(tmp_path / "metrics.jsonl")[4]
    assert 0.9 < last["expert_balance"] < 1.5
    assert 1 < last["router_entropy"] < 2.08  # ln 8
    for layer in (0, 1):
        assert last[f"expert_load_min/{layer}"] <= 1 <= last[f"expert_load_max/{layer}"]
    written = json.loads((tmp_path / "experts.json").read_text())
    assert (written["first_step"], written["step"]) == (3, 4)
    assert [len(layer) for layer in written["layers"]] == [8, 8]
    assert all(sum(layer) == pytest.approx(1, abs=1e-3) for layer in written["layers"])
    report([str(tmp_path)])
    page = (tmp_path / "report.html").read_text()
    assert "<h2>Experts</h2>" in page
    assert "2 layers from above, 8 experts from left" in page
    assert '"expert_balance"' in page
    assert "expert_load_max/0" not in page


def test_a_resumed_mixture_is_the_run_left_alone(tmp_path):
    """To the bit: what routers keep, too."""
    _, left_alone = run_ranks(1, trained, tmp_path / "run", [*BIAS, *FOUR], init=False)[0]
    kept = [name for name in left_alone if ".router.expert_" in name]
    assert len(kept) == 2 * 2
    assert all(left_alone[name].std() > 0 for name in kept if "expert_bias" in name)
    copy = copy_at_step_2(tmp_path / "run", tmp_path / "copy")
    _, resumed = run_ranks(1, trained, copy, [*BIAS, *FOUR], init=False)[0]
    assert same(resumed, left_alone)


EP = "--parallelism.expert_parallel_degree=2"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param([], ["--parallelism.tensor_parallel_degree=2", EP], id="to tp and ep"),
        pytest.param([EP], [], id="from ep", marks=pytest.mark.slow),
    ],
)
def test_a_mixture_goes_on_on_another_layout(before, after, tmp_path):
    run_ranks(2 if before else 1, trained, tmp_path / "run", [*BIAS, *FOUR, *before], init=False)
    expected = losses(tmp_path / "run")
    copy = copy_at_step_2(tmp_path / "run", tmp_path / "copy")
    run_ranks(2 if after else 1, trained, copy, [*BIAS, *FOUR, *after], init=False)
    found = losses(copy)
    assert found[4] == pytest.approx(expected[4], rel=1e-5)


TWO_BATCHES = ["--training.local_batch_size=2", "--training.global_batch_size=8"]
COMPILED = ["--compile.enable", "--compile.backend=aot_eager"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param([], id="eager"),
        pytest.param(
            [
                *COMPILED,
                "--activation_checkpoint.mode=selective",
                "--parallelism.fsdp_communication=microbatch",
            ],
            id="compiled",
        ),
        pytest.param(
            [
                "--model.tied_embeddings=yes",
                "--parallelism.pipeline_parallel_degree=2",
                "--model.n_layers=4",
            ],
            id="tied pipeline",
            marks=pytest.mark.release,
        ),
        pytest.param(
            [
                "--parallelism.pipeline_parallel_degree=2",
                "--parallelism.pipeline_parallel_schedule=ZBVZeroBubble",
                "--model.n_layers=4",
            ],
            id="halves",
            marks=pytest.mark.release,
        ),
        pytest.param(
            ["--parallelism.pipeline_parallel_degree=2", "--model.n_layers=4", *COMPILED],
            id="compiled pipeline",
            marks=pytest.mark.release,
        ),
    ],
)
def test_a_step_without_room_runs_again_and_is_the_step_with_room(options, tmp_path):
    """Losses, norms, loads, what routers keep, and that a line says so; with two local batches a
    step, for which weights are gathered once.
    """
    options = [*options, EP, "--parallelism.data_parallel_shard_degree=2", *TWO_BATCHES]
    ranks = 4 if any("pipeline_parallel_degree" in option for option in options) else 2
    run_options = [*BIAS, *steps(4), *NO_VALIDATION, "--metrics.log_freq=2", *options]
    (whole, kept), *_ = run_ranks(ranks, with_tensors, tmp_path / "whole", run_options, init=False)
    tight = [*run_options, "--experts.capacity_factor=1"]
    (lines, found), *_ = run_ranks(ranks, with_tensors, tmp_path / "tight", tight, init=False)
    assert "ran again" not in whole
    assert "times the tokens of equally loaded ones, and experts.capacity_factor = 1" in lines
    expected = read_metrics(tmp_path / "whole" / "metrics.jsonl")
    values = read_metrics(tmp_path / "tight" / "metrics.jsonl")
    assert sum(row["repeated_steps"] for row in values.values()) >= 3
    assert all(row["expert_rows_max"] > 1 for row in values.values())
    names = ["loss", "grad_norm", "expert_balance", "router_entropy", "expert_load_max/1"]
    for step in (2, 4):
        for name in names:
            assert values[step][name] == pytest.approx(expected[step][name], rel=1e-6), name
    for name, buffer in kept.items():
        assert torch.equal(found[name], buffer), name


def with_tensors(folder, options):
    """(lines of the log, what routers keep at the end and what they counted in each step)."""
    lines, kept = [], {}
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    trainer = Trainer(load_config(DEBUG, ["--job.dump_folder", str(folder), *SMALL, *options]))

    class Keep(Hook):
        def on_gradients(self, step, parameters):
            (balance,) = (part for part in trainer.step_parts if isinstance(part, ExpertBalance))
            kept[f"counts of step {step}"] = balance.own.clone()

        def on_train_end(self, trainer):
            kept.update({fqn: each.clone() for fqn, each in trainer.model.buffers.items()})

    trainer.hooks.append(Keep())
    trainer.train()
    return "\n".join(lines), kept
