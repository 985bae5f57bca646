"""Numbers gone wrong: a loss that leaps, a gradient that is none.

No parameter changes, on any rank.
"""

import json
import math
import shutil

import torch
import torch.distributed as dist
from ranks import run_ranks
from tiny import DEBUG, NO_VALIDATION, NO_WORKERS, SMALL, every, steps

from titan_lite.config import load_config
from titan_lite.hooks import Hook
from titan_lite.metrics.run_files import read_metrics
from titan_lite.resilience import TrainingError
from titan_lite.trainer import Trainer

OPTIONS = [*SMALL, "--metrics.log_freq=4", *steps(8, schedule=20), *NO_VALIDATION, *NO_WORKERS]


def with_faults(folder, options, fault):
    """Train with the hook `fault`, and watch whether parameters change.

    Returns what is left of the run: ({step: whether parameters changed}, losses seen by the guard,
    why it ended, the parameters).
    """
    before, changed = [], {}

    def parameters():
        return torch.cat(
            [parameter.detach().to_local().flatten() for parameter in trainer.parameters.values()]
        ).clone()

    class Watch(Hook):
        def on_step_start(self, step):
            before[:] = [parameters()]

        def on_metrics(self, metrics):
            changed[metrics.step] = not torch.equal(before[0], parameters())

    config = load_config(DEBUG, ["--job.dump_folder", str(folder), *OPTIONS, *options])
    trainer = Trainer(config, hooks=[Watch(), fault])
    try:
        trainer.train()
        message = ""
    except TrainingError as error:
        message = str(error)
    return changed, trainer.skipped_steps.state_dict(), message, parameters()


class Leaping:
    """A runner whose loss leaps on rank 1 alone, in step 6."""

    def __init__(self, trainer):
        self.trainer, self.runner = trainer, trainer.model.runner

    def forward_backward(self, *batch):
        loss, step = self.runner.forward_backward(*batch), self.trainer.step
        return loss + 100 if self.trainer.rank == 1 and step == 6 else loss


class Leap(Hook):
    def on_train_start(self, trainer):
        trainer.model.runner = Leaping(trainer)


GUARD = ["--training.spike_window", "3", "--training.spike_sigmas", "50"]


def test_a_step_whose_loss_leaps_is_skipped_on_all_ranks_and_a_resumed_run_knows(tmp_path):
    options = [*GUARD, *steps(9), "--checkpoint.interval", "7"]
    whole = run_ranks(2, with_faults, tmp_path / "whole", options, Leap(), init=False)
    for changed, state, message, _ in whole:
        assert [step for step, did in changed.items() if not did] == [6]
        assert [skipped["step"] for skipped in state["skipped"]] == [6]
        assert message == ""
    step = "checkpoint/step-7"
    saved = json.loads((tmp_path / "whole" / step / "state.json").read_text())
    assert [skipped["step"] for skipped in saved["parts"]["skipped_steps"]["skipped"]] == [6]
    shutil.copytree(tmp_path / "whole" / step, tmp_path / "resumed" / step)
    resumed = run_ranks(2, with_faults, tmp_path / "resumed", options, Leap(), init=False)
    for (changed, state, _, parameters), (_, expected_state, _, expected) in zip(
        resumed, whole, strict=True
    ):
        assert [*changed] == [8, 9]
        assert state == expected_state
        assert torch.equal(parameters, expected)


class Infinite(Hook):
    """Make one gradient of rank 1 infinite in these steps."""

    def __init__(self, *steps):
        self.steps = steps

    def on_gradients(self, step, parameters):
        if step in self.steps and dist.get_rank() == 1:
            next(iter(parameters.values())).grad.to_local()[0, 0] = math.inf


INFINITE = [
    *steps(6),
    "--metrics.log_freq=1",
    *every(50, validated=3),
    "--validation.enable",
    "--training.max_nonfinite_steps=2",
]


def test_a_step_with_a_gradient_that_is_not_finite_is_skipped_on_all_ranks(tmp_path):
    for changed, _, message, _ in run_ranks(
        2, with_faults, tmp_path, INFINITE, Infinite(2, 4), init=False
    ):
        assert changed == {1: True, 2: False, 3: True, 4: False, 5: True, 6: True}
        assert message == ""
    metrics = read_metrics(tmp_path / "metrics.jsonl")
    assert metrics[2]["grad_norm"] is None  # JSON has no infinity
    assert [metrics[step]["skipped_steps"] for step in range(1, 7)] == [0, 1, 1, 2, 2, 2]
    assert math.isfinite(metrics[6]["validation_loss"])
