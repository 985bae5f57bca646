"""Faults of storage, injected: a rank killed in a save, a full disk, two runs in a folder."""

import fcntl
import re
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest
from commands import python, run, train
from tiny import DEBUG, NO_CHECKPOINT, NO_VALIDATION, SMALL, every, steps

from titan_lite.metrics.run_files import read_metrics

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


@pytest.mark.slow
@pytest.mark.parametrize("on_failure", ["stop", "continue"])
def test_a_run_whose_disk_is_full_stops_or_goes_on_as_its_recipe_says(on_failure, tmp_path):
    with file_system(tmp_path / "disk", int(1.5 * STEP) // 1024) as disk:
        options = ["--checkpoint.on_failure", on_failure, "--checkpoint.folder", disk]
        result = trained(tmp_path / "out", *options)
        reason = r"step 4 was not saved in .*: it needs 0.004 GiB, and 0.00\d GiB are free"
        if on_failure == "stop":
            assert result.returncode == 1
            assert re.search(rf"error: {reason}", result.stdout)
            assert max(read_metrics(tmp_path / "out/metrics.jsonl")) == 4
        else:
            assert result.returncode == 0
            assert re.search(rf"NOTHING WAS SAVED: {reason}", result.stdout)
            assert re.search("NOTHING WAS SAVED: step 6", result.stdout)
        assert sorted(path.name for path in disk.iterdir()) == ["lock", "step-2"]


@pytest.mark.parametrize(
    ("locked", "options", "key"),
    [
        pytest.param(".", NO_CHECKPOINT, "job.dump_folder", marks=pytest.mark.slow),
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
