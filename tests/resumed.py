"""Runs that are stopped and resumed: their log, state and losses."""

import logging
import shutil
from pathlib import Path

import torch
from tiny import DEBUG, NO_VALIDATION, NO_WORKERS, SMALL, every

from titan_lite.config import load_config
from titan_lite.dtensor import local
from titan_lite.logging import logger
from titan_lite.metrics.run_files import read_metrics
from titan_lite.trainer import Trainer

OPTIONS = [
    *SMALL,
    *every(2),
    *NO_VALIDATION,
    *NO_WORKERS,
    "--training.global_batch_size=8",
    "--lr_scheduler.warmup_steps=1",
    "--lr_scheduler.decay_begin=2",
    "--lr_scheduler.decay_length=2",
]


def trained(folder, options):
    """(lines of the log, {name: this rank's part} of parameters and state at the end)."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    trainer = Trainer(load_config(DEBUG, ["--job.dump_folder", str(folder), *OPTIONS, *options]))
    trainer.train()
    return "\n".join(lines), {
        name: local(tensor.detach()).clone() for name, tensor in trainer.tensors().items()
    }


def losses(folder):
    lines = read_metrics(Path(folder) / "metrics.jsonl").items()
    return {
        step: [values[name] for name in ("loss", "validation_loss") if name in values]
        for step, values in lines
    }


def copy_at_step_2(folder, copied):
    """Copy a run of four steps, which then goes on from its second."""
    shutil.copytree(folder, copied, dirs_exist_ok=True)
    shutil.rmtree(copied / "checkpoint/step-4")
    (copied / "metrics.jsonl").unlink()
    return copied


def same(found, expected):
    """Return True if both have the same tensors to the bit, by name."""
    assert found.keys() == expected.keys()
    return all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
