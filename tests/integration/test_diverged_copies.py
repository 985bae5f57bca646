"""Copies that part, and values that are not finite, end a run before they are saved: one line names
rank and parameter.
"""

import io
import re
from contextlib import redirect_stderr, redirect_stdout

import torch
from commands import train
from ranks import run_ranks
from tiny import DEBUG, NO_VALIDATION, NO_WORKERS, SMALL, every, steps

from titan_lite.hooks import Hook
from titan_lite.train import main

OPTIONS = [
    *SMALL,
    *steps(6),
    *every(2),
    *NO_VALIDATION,
    *NO_WORKERS,
    "--training.global_batch_size=8",
]
OPTIONS += ["--training.compare_replicas_freq=0"]
PURE_DDP = ["--parallelism.data_parallel_replicate_degree=2"]
TENSOR = ["--parallelism.tensor_parallel_degree=2"]


def noise(trainer):
    generator = torch.Generator().manual_seed(0)
    for parameter in trainer.parameters.values():
        rows = parameter.to_local()
        rows *= 1 + 0.05 * torch.randn(rows.shape, generator=generator)


def a_bit_of_a_norm(trainer):
    trainer.parameters["layers.1.ffn_norm.weight"].to_local().view(torch.int32)[-1] ^= 1


def broken(folder, options, fault, rank=1, at=3):
    """Train, where something happens to one rank after a step.

    (exit code, lines of errors, losses logged).
    """

    class Break(Hook):
        def on_train_start(self, trainer):
            self.trainer = trainer

        def on_metrics(self, metrics):
            if metrics.step == at and self.trainer.rank == rank:
                with torch.no_grad():
                    fault(self.trainer)

    out, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(errors):
        code = main([str(DEBUG), "--job.dump_folder", str(folder), *options], hooks=[Break()])
    return (
        code,
        re.findall(r"^error: .*|^Traceback.*", errors.getvalue(), re.M),
        re.findall(r"step +(\d+)  loss", out.getvalue()),
    )


def refused(ranks, folder, *arguments):
    """The line that a run ends with, which is told once; only step-2 is on disk."""
    found = run_ranks(ranks, broken, folder, *arguments, init=False)
    assert [code for code, _, _ in found] == [1] * ranks
    (line,) = [line for _, lines, _ in found for line in lines]
    assert sorted(path.name for path in (folder / "checkpoint").iterdir()) == ["lock", "step-2"]
    assert (
        "so nothing was saved at this step; started again, by hand or by the launcher, the run"
        f" resumes from {folder}" in line
    )
    return re.sub(r" \([\w.-]+\)", "", line), found[0][2]


def test_a_rank_with_other_weights_is_told_before_the_save_and_the_run_goes_on_from_the_step_before(
    tmp_path,
):
    line, logged = refused(2, tmp_path, [*OPTIONS, *PURE_DDP], noise)
    assert re.match(
        r"error: step 4: rank 0 and rank 1 have different copies of tok_embeddings.weight and \d+"
        r" others; ",
        line,
    )
    assert line.endswith("checkpoint/step-2")
    assert logged == ["1", "2", "3", "4"]
    again = train(2, DEBUG, tmp_path, *OPTIONS, *PURE_DDP)
    assert again.returncode == 0
    assert "resumed from" in again.stdout


def test_a_bit_of_a_norm_under_tensor_parallelism_is_seen_every_so_many_steps(tmp_path):
    line, logged = refused(
        2, tmp_path, [*OPTIONS, *TENSOR, "--training.compare_replicas_freq=3"], a_bit_of_a_norm
    )
    assert line.startswith(
        "error: step 3: rank 0 and rank 1 have different copies of layers.1.ffn_norm.weight; so"
    )
    assert logged == ["1", "2"]
