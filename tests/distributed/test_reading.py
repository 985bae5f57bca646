"""A step that logs nothing reads nothing from the device, and a run that reads a step late has the
same figures.
"""

import sys

import pytest
import torch
from ranks import run_ranks
from tiny import DEBUG, NO_CHECKPOINT, NO_VALIDATION, NO_WORKERS, SMALL, steps

from titan_lite.config import load_config
from titan_lite.hooks import Hook
from titan_lite.metrics import deferred
from titan_lite.metrics.run_files import read_metrics
from titan_lite.trainer import Trainer

READS = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "numpy")
ON_HOST = (
    "torch/distributed/device_mesh.py",
    "titan_lite/metrics/deferred.py",
)  # tensors that are not on the device
OPTIONS = [*SMALL, *steps(8), *NO_VALIDATION, *NO_CHECKPOINT, *NO_WORKERS]


def train_late(folder, options, lag):
    """Return how tensors were read from the first batch of a step to its end, from the third step
    on, and the tokens seen.
    """
    deferred.LAG["cpu"] = lag
    config = load_config(DEBUG, [f"--job.dump_folder={folder}", *OPTIONS, *options])
    reads, counting = [], [False]

    def watch(name):
        plain = getattr(torch.Tensor, name)

        def read(tensor, *args, **kwargs):
            caller = sys._getframe(1).f_code
            if counting[0] and not caller.co_filename.endswith(ON_HOST):
                reads.append(f"{name} by {caller.co_name} ({caller.co_filename})")
            return plain(tensor, *args, **kwargs)

        setattr(torch.Tensor, name, read)

    for name in READS:
        watch(name)

    class Count(Hook):
        def on_batch(self, step):
            counting[0] = 2 < step < config.training.steps  # the last one logs

    trainer = Trainer(config, hooks=[Count()])
    trainer.train()
    return reads, trainer.progress.tokens_seen


@pytest.mark.parametrize("options", [[], ["--training.spike_window=3"]], ids=["plain", "spikes"])
def test_a_step_that_logs_nothing_reads_nothing(options, tmp_path):
    (reads, tokens), _ = run_ranks(
        2, train_late, tmp_path, ["--metrics.log_freq=100", *options], 1, init=False
    )
    assert reads == []
    assert tokens == 8 * 8 * 32


def test_a_run_that_reads_late_logs_the_same(tmp_path):
    runs = [
        run_ranks(2, train_late, tmp_path / str(lag), ["--metrics.log_freq=2"], lag, init=False)
        for lag in (0, 1)
    ]
    assert len({tokens for ranks in runs for _, tokens in ranks}) == 1
    now, late = (read_metrics(tmp_path / str(lag) / "metrics.jsonl") for lag in (0, 1))
    for name in ("loss", "grad_norm", "lr", "tokens_seen"):
        assert [late[step][name] for step in (2, 4, 6, 8)] == [
            now[step][name] for step in (2, 4, 6, 8)
        ]
