"""Faults of storage, injected: a rank killed in a save, a full disk, a read-only folder, a flipped
bit, two runs in a folder.
"""

import fcntl
import re
import subprocess
import sys
from collections import namedtuple
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path

import pytest
import torch
from checkpoints import flip
from commands import python, run, train
from ranks import end_ranks, start_ranks
from tiny import DEBUG, NO_CHECKPOINT, NO_VALIDATION, SMALL, every, steps

from titan_lite.checkpoint import manager as checkpoint
from titan_lite.checkpoint.manager import Checkpointer, CheckpointError
from titan_lite.checkpoint.state import RunState
from titan_lite.config import Checkpoint, ConfigError
from titan_lite.hooks import Hook
from titan_lite.metrics.run_files import read_metrics
from titan_lite.train import main

pytestmark = pytest.mark.ranks(2)

OPTIONS = [
    *SMALL,
    *steps(6, schedule=12),
    *every(2),
    *NO_VALIDATION,
    "--training.global_batch_size=2",
]
STEP = 323_904 * 3 * 4  # bytes: parameters and two moments


def trained(folder, *options):
    return train(1, DEBUG, folder, *OPTIONS, *options)


@contextmanager
def file_system(path, kibibytes):
    """A small one in memory."""
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={kibibytes}k", "tmpfs", path],
        capture_output=True,
        text=True,
    )
    if mounted.returncode:
        pytest.skip(f"needs to mount a tmpfs: {mounted.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


def killed(folder, count, *cases):
    """Kill a rank in a save, `count` times in each case; return the outcomes."""
    result = run(
        *python(Path(__file__).with_name("kill_in_save.py"), folder, count, *cases), seconds=500
    )
    return re.findall(r"^(ok|WRONG): ", result.stdout, re.MULTILINE)


@pytest.mark.slow
def test_a_rank_killed_in_a_save_leaves_a_whole_step(tmp_path):
    assert (
        killed(tmp_path, 1, "data-async", "manifest-disabled", "rename-async", "retention-disabled")
        == ["ok"] * 4
    )


@pytest.mark.release
@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.parametrize("phase", ["data", "manifest", "rename", "retention"])
def test_a_rank_killed_anywhere_in_a_save_leaves_a_whole_step(phase, mode, tmp_path):
    assert killed(tmp_path, 3, f"{phase}-{mode}") == ["ok"] * 3


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_disk_that_is_full_in_the_middle_of_a_save(mode, tmp_path, monkeypatch, world_of_one):
    tensors = {"w": torch.randn(256, 1024), "v": torch.randn(256, 1024)}  # 2 MiB
    with file_system(tmp_path / "disk", 3 * 1024) as disk:
        steps_of = Checkpointer(Checkpoint(enable=True, async_mode=mode), disk)
        steps_of.save(1, tensors, RunState())
        steps_of.wait()
        usage = namedtuple("usage", "free")
        with pytest.raises(
            CheckpointError,
            match=r"step 2 was not saved in .*: it needs 0.002 GiB, and 0.001 GiB are free",
        ):
            save(steps_of, 2, tensors)
        monkeypatch.setattr(
            checkpoint.shutil, "disk_usage", lambda path: usage(2**30)
        )  # as it was before another wrote there
        with pytest.raises(
            CheckpointError,
            match=r"step 2 was not saved in .*: rank 0: OSError: .*No space left on device",
        ):
            save(steps_of, 2, tensors)
        assert sorted(path.name for path in (disk / "checkpoint").iterdir()) == ["step-1"]
        assert steps_of.verified_step() == 1
        goes_on = Checkpointer(
            Checkpoint(enable=True, async_mode=mode, on_failure="continue"), disk
        )
        save(goes_on, 2, tensors)
        save(goes_on, 3, {"w": tensors["w"][:64]})  # which has room
        assert goes_on.verified_step() == 3


def save(steps_of, step, tensors):
    steps_of.save(step, tensors, RunState())
    steps_of.wait()


def test_a_folder_that_may_not_be_written(tmp_path, world_of_one):
    tensors = {"w": torch.randn(8)}
    with file_system(tmp_path / "disk", 1024) as disk:
        steps_of = Checkpointer(Checkpoint(enable=True), disk)
        save(steps_of, 1, tensors)
        subprocess.run(
            ["mount", "-o", "remount,ro", disk], check=True
        )  # root would not be stopped by permissions
        with pytest.raises(
            CheckpointError,
            match=(
                r"step 2 was not saved in .*: rank 0: OSError: \[Errno 30\] Read-only file system"
            ),
        ):
            save(steps_of, 2, tensors)
        assert steps_of.verified_step() == 1
        with pytest.raises(
            ConfigError,
            match=(
                r"checkpoint.folder = .*checkpoint/lock: Read-only file system; use a"
                r" job.dump_folder"
            ),
        ):
            steps_of.lock()


def test_a_run_goes_on_from_the_step_before_an_altered_one_as_if_it_had_not_been(tmp_path):
    first = trained(tmp_path, *steps(4), "--checkpoint.async_mode", "async")
    assert first.returncode == 0
    expected = read_metrics(tmp_path / "metrics.jsonl")
    flip(tmp_path / "checkpoint/step-4/state.json")
    again = trained(tmp_path, *steps(4))
    assert again.returncode == 0
    assert re.search(
        r"step-4 is not loaded: .*state.json.*; set aside as invalid-step-4",
        again.stdout,
    )
    assert "step-2" in re.search(r"resumed from (\S+)", again.stdout)[1]
    found = read_metrics(tmp_path / "metrics.jsonl")
    for step in (3, 4):
        assert (found[step]["loss"], found[step]["grad_norm"]) == (
            expected[step]["loss"],
            expected[step]["grad_norm"],
        )
    names = sorted(path.name for path in (tmp_path / "checkpoint").iterdir())
    assert names == ["invalid-step-4", "lock", "step-2", "step-4"]


@pytest.mark.release
@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.parametrize("on_failure", ["stop", "continue"])
def test_a_run_whose_disk_is_full_stops_or_goes_on_as_its_recipe_says(mode, on_failure, tmp_path):
    options = ["--checkpoint.async_mode", mode, "--checkpoint.on_failure", on_failure]
    with file_system(tmp_path / "disk", int(1.5 * STEP) // 1024) as disk:
        result = trained(tmp_path / "out", *options, "--checkpoint.folder", disk)
        reason = r"step 4 was not saved in .*: it needs 0.004 GiB, and 0.00\d GiB are free"
        if on_failure == "stop":
            assert result.returncode == 1
            assert re.search(rf"error: {reason}", result.stdout)
            assert max(read_metrics(tmp_path / "out/metrics.jsonl")) in (
                (4,) if mode == "disabled" else (4, 5, 6)
            )
        else:
            assert result.returncode == 0
            assert re.search(rf"NOTHING WAS SAVED: {reason}", result.stdout)
            assert re.search("NOTHING WAS SAVED: step 6", result.stdout)
        assert sorted(path.name for path in disk.iterdir()) == ["lock", "step-2"]


def train_on_a_full_disk(disk, log):
    """Train in a folder on the disk, which others fill before each step when step 2 is saved."""

    class Fill(Hook):
        def on_step_start(self, step):
            if step > 2:
                fill(disk / f"another-{step}")

    options = [*OPTIONS, *steps(30, schedule=30), "--checkpoint.on_failure", "continue"]
    with open(log, "a") as output, redirect_stdout(output), redirect_stderr(output):
        code = main([str(DEBUG), "--job.dump_folder", str(disk / "out"), *options], hooks=[Fill()])
    sys.exit(code)


@pytest.mark.release
def test_a_run_whose_whole_folder_is_on_a_full_disk_goes_on_as_its_recipe_says(tmp_path):
    with file_system(tmp_path / "disk", int(1.5 * STEP) // 1024) as disk:
        log = tmp_path / "log"
        assert end_ranks(start_ranks(1, train_on_a_full_disk, disk, log), 300) == [0]
        said = log.read_text()
        print(said)
        assert said.count("METRICS ARE LOST, the run goes on") == 1
        assert "NOTHING WAS SAVED: step 30" in said
        assert [path.name for path in (disk / "out/checkpoint").glob("*step*")] == ["step-2"]


def fill(path):
    with open(path, "wb", buffering=0) as file, suppress(OSError):
        for size in (2**16, 2**10, 1):
            with suppress(OSError):
                while True:
                    file.write(bytes(size))


@pytest.mark.release
def test_a_run_that_is_done_and_has_the_model_alone_has_nothing_to_do(tmp_path):
    options = ["--checkpoint.last_save_model_only"]
    assert trained(tmp_path, *options).returncode == 0
    again = trained(tmp_path, *options)
    assert again.returncode == 0
    assert "nothing to do: step 6 is done" in again.stdout
    longer = trained(tmp_path, *options, *steps(8))
    assert longer.returncode == 2
    assert "the checkpoint has only the model" in longer.stdout


@pytest.mark.parametrize(
    ("locked", "options", "key"),
    [
        pytest.param(".", NO_CHECKPOINT, "job.dump_folder", marks=pytest.mark.slow),
        pytest.param(".", [], "job.dump_folder", marks=pytest.mark.slow),
        ("checkpoint", [], "checkpoint.folder"),  # which may be in another run's folder
    ],
)
def test_a_second_run_in_one_folder_ends_before_it_begins(tmp_path, locked, options, key):
    folder = tmp_path / locked
    folder.mkdir(exist_ok=True)
    (tmp_path / "lock").touch()  # as every run has one
    (tmp_path / "config.toml").write_text("of the first run")
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = run(
            *python("-m", "titan_lite.train", DEBUG, "--job.dump_folder", tmp_path),
            *OPTIONS,
            *options,
        )
    assert result.returncode == 2
    _, line = result.stdout.splitlines()  # after the one that says it starts
    assert re.fullmatch(
        rf"error: {key} = \S+: {folder.resolve()} is in use by another run; end that run, or .*",
        line,
    )
    assert (tmp_path / "config.toml").read_text() == "of the first run"
    assert not (tmp_path / "metrics.jsonl").exists()
    assert not (tmp_path / "events.jsonl").exists()
