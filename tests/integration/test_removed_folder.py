"""`rm -rf` of a run's folder while it goes on: the folder is made again, or left to the run that has taken it since."""

import io
import json
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest
import torch.distributed as dist
from ranks import run_ranks
from tiny import DEBUG, NO_CHECKPOINT, NO_VALIDATION, NO_WORKERS, SMALL, every, steps

from titan_lite.metrics.records import read_metrics
from titan_lite.train import main

OPTIONS = [
    *SMALL,
    *steps(8),
    *every(3),
    *NO_VALIDATION,
    *NO_WORKERS,
    "--training.global_batch_size=4",
]
OPTIONS += ["--metrics.log_freq=2", "--metrics.enable_tensorboard"]


def meanwhile(folder, what, options):
    """Train in folder/out; after step 5 the first rank does what; (exit code, what was printed)."""

    def observe(moment, trainer):
        if moment == "step" and trainer.step == 5 and trainer.rank == 0:
            what(folder)

    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        code = main(
            [str(DEBUG), "--job.dump_folder", str(folder / "out"), *options], observe=observe
        )
    if not dist.is_initialized():  # as run_ranks wants it
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return code, said.getvalue()


def rm_rf(folder):
    shutil.rmtree(folder / "out")


def exchange(folder):
    (folder / "out").rename(folder / "aside")
    (folder / "other").rename(folder / "out")


@pytest.mark.parametrize("more", [[], NO_CHECKPOINT], ids=["saved", "not saved"])
def test_it_is_made_again_with_one_line_and_the_run_ends_well(more, tmp_path):
    out = tmp_path / "out"
    ((code, said),) = run_ranks(1, meanwhile, tmp_path, rm_rf, [*OPTIONS, *more], init=False)
    assert code == 0
    assert said.count(f"files of this run were removed from {out} during the run") == 1
    assert not re.search("Traceback|error|LOST|no loss curve", said)
    assert re.search(r"done: step 8, .*; loss \d", said)
    assert [*read_metrics(out / "metrics.jsonl")] == [6, 8]
    events = [json.loads(line)["event"] for line in (out / "events.jsonl").read_text().splitlines()]
    assert events == ["warning", *([] if more else ["checkpoint"] * 2), "done"]
    assert {"config.toml", "metrics.jsonl", "events.jsonl", "loss.png"} <= {
        path.name for path in out.iterdir()
    }
    if not more:
        assert "checkpoints: step-6, step-8" in said


HOLDER = (
    "import fcntl, os, sys; os.makedirs(sys.argv[1]); f = open(sys.argv[1] + '/lock', 'w')\n"
    "fcntl.lockf(f, fcntl.LOCK_EX); f.write('process 7 on x'); f.flush(); print('taken', flush=True); input()"
)


def test_a_run_that_has_taken_it_since_is_left_alone(tmp_path):
    command = [sys.executable, "-c", HOLDER, tmp_path / "other/checkpoint"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout.readline() == "taken\n"
        found = run_ranks(2, meanwhile, tmp_path, exchange, OPTIONS, init=False)
        holder.kill()
    assert [code for code, _ in found] == [2, 2]
    (line,) = [line for _, said in found for line in said.splitlines() if "error" in line]
    assert re.match(
        r'error: checkpoint.folder = "checkpoint": \S+/out/checkpoint was removed while this run wrote to it, and ',
        line,
    )
    assert (
        "now belongs to process 7 on x; this run ends and writes nothing more; use another job.dump_folder"
        in line
    )
    assert not any("Traceback" in said for _, said in found)
    out = tmp_path / "out"
    assert [str(path.relative_to(out)) for path in sorted(out.rglob("*"))] == [
        "checkpoint",
        "checkpoint/lock",
    ]
