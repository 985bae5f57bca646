"""Runs with optimizer state in bfloat16: resumed to the bit, and converted in words."""

import logging
import shutil
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from tiny import DEBUG, NO_VALIDATION, NO_WORKERS, SMALL, every, steps
from titan_lite.optimizer.offload import local

from titan_lite.config.recipe import load_config
from titan_lite.logging import logger
from titan_lite.metrics.records import read_metrics
from titan_lite.trainer import Trainer

OPTIONS = [
    *SMALL,
    *every(2),
    *NO_VALIDATION,
    *NO_WORKERS,
    "--training.global_batch_size=8",
    "--lr_scheduler.warmup_steps=1",
]
OPTIONS += ["--lr_scheduler.total_steps=4"]
BFLOAT16 = ["--optimizer.state_dtype=bfloat16", "--training.dtype=bfloat16"]


def trained(folder, options):
    """(lines of the log, {name: this rank's part} of parameters and state at the end)."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    trainer = Trainer(load_config(DEBUG, ["--job.dump_folder", str(folder), *OPTIONS, *options])[0])
    trainer.train()
    return "\n".join(lines), {
        name: local(tensor.detach()).clone() for name, tensor in trainer.state_tensors().items()
    }


def train(folder, *options, ranks=2):
    return run_ranks(ranks, trained, folder, [*steps(4), *options], init=False)


def losses(folder):
    lines = read_metrics(Path(folder) / "metrics.jsonl").items()
    return {
        step: [values[name] for name in ("loss", "validation_loss") if name in values]
        for step, values in lines
    }


def same(found, expected):
    assert found.keys() == expected.keys()
    return all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return folder, train(folder, *BFLOAT16)


def copy_at_step_2(folder, copied):
    """Copy a run of four steps, which then goes on from its second."""
    shutil.copytree(folder, copied, dirs_exist_ok=True)
    shutil.rmtree(copied / "checkpoint/step-4")
    (copied / "metrics.jsonl").unlink()
    return copied


@pytest.fixture
def at_step_2(whole, tmp_path):
    return copy_at_step_2(whole[0], tmp_path)


def test_a_run_in_bfloat16_resumes_to_the_bit(whole, at_step_2):
    found = train(at_step_2, *BFLOAT16)
    assert losses(at_step_2) == {step: loss for step, loss in losses(whole[0]).items() if step > 2}
    for (_, tensors), (_, expected) in zip(found, whole[1], strict=True):
        assert {tensor.dtype for name, tensor in tensors.items() if not name.endswith(".step")} == {
            torch.bfloat16
        }
        assert same(tensors, expected)


def test_another_state_dtype_is_told_and_the_moments_are_converted(whole, at_step_2):
    ((told, tensors), *_) = train(
        at_step_2,
        "--training.dtype=bfloat16",
        "--optimizer.state_dtype=float32",
        *steps(3),
        ranks=1,
    )
    assert 'changed: optimizer.state_dtype = "float32", was "bfloat16"' in told
    assert {tensor.dtype for name, tensor in tensors.items() if "exp_avg" in name} == {
        torch.float32
    }
    assert losses(at_step_2)[3] == [
        pytest.approx(losses(whole[0])[3][0], rel=1e-4)
    ]  # it goes on from the converted ones
