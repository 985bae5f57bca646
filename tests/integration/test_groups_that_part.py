"""a replica group is killed at a chosen point, and nothing is lost without a word."""

import json
from collections import Counter

import pytest
from commands import ROOT, Job, python
from tiny import DEBUG, NO_WORKERS, SMALL, every, steps

from titan_lite.metrics.run_files import read_lines

pytest.importorskip("torchft")
pytestmark = pytest.mark.ranks(2)

STEPS = 8
INTERVAL = 4
SECONDS = 500  # of a run that starts several times, on a busy machine
OPTIONS = [
    *SMALL,
    *NO_WORKERS,
    *steps(STEPS),
    *every(INTERVAL, INTERVAL, batches=2),
    "--training.global_batch_size=16",
    "--training.compare_replicas_freq=1",
    "--fault_tolerance.replica_groups=2",
    "--fault_tolerance.timeout_seconds=45",
]
ASYNC = ["--checkpoint.async_mode=async"]


def killed(folder, at, step, *options, group=0):
    """Train with two groups, of which one is killed; return the exit code and the output."""
    command = python(ROOT / "tests/killed_groups.py", DEBUG, "--job.dump_folder", folder)
    point = json.dumps({"group": group, "at": at, "step": step})
    job = Job(folder.with_suffix(".log"), *command, *OPTIONS, *options, KILL=point)
    code = job.ended(SECONDS)
    assert (folder / "killed").exists() == (at != "disk")
    return code, job.output


def written(folder, name):
    """Return how often each step has a line in metrics.jsonl with a metric."""
    lines = [line for _, line in read_lines(folder / "metrics.jsonl")]
    assert None not in lines
    return Counter(line["step"] for line in lines if name in line)


def assert_all_is_there(folder, *, saved=(INTERVAL, STEPS)):
    assert written(folder, "loss") == dict.fromkeys(range(1, STEPS + 1), 1)
    assert written(folder, "validation_loss") == dict.fromkeys((0, INTERVAL, STEPS), 1)
    found = {path.name for path in (folder / "checkpoint").glob("step-*")}
    assert found == {f"step-{step}" for step in saved}


# The first is for every machine, the next ones for CI, and the others for a release.
POINTS = [
    ("line", INTERVAL),
    ("save", INTERVAL),
    ("save", STEPS),
    ("validation", STEPS),
    ("commit", INTERVAL),
    ("validation", INTERVAL),
    ("rename", INTERVAL),
    ("commit", STEPS),
    ("line", STEPS),
    ("rename", STEPS),
]
MARKS = [(), *3 * [pytest.mark.slow], *6 * [pytest.mark.release]]


@pytest.mark.parametrize(
    ("at", "step"),
    [pytest.param(*point, marks=marks) for point, marks in zip(POINTS, MARKS, strict=True)],
)
def test_what_the_first_group_was_about_to_write_is_written_by_the_next_one(at, step, tmp_path):
    code, _ = killed(tmp_path / "run", at, step)
    assert code == 0
    assert_all_is_there(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("at", "step"), [("line", INTERVAL), ("save", INTERVAL), ("save", STEPS), ("rename", STEPS)]
)
def test_a_first_group_that_is_back_writes_what_it_was_about_to_write(at, step, tmp_path):
    """No step is taken without it, so it gets the state of the other one."""
    code, _ = killed(tmp_path / "run", at, step, "--fault_tolerance.min_replica_groups=2")
    assert code == 0
    assert_all_is_there(tmp_path / "run")


@pytest.mark.slow
def test_an_asynchronous_save_that_died_with_its_writer_is_named_and_the_next_step_saved(tmp_path):
    code, output = killed(tmp_path / "run", "write", INTERVAL, *ASYNC)
    assert code == 0
    found = {path.name for path in (tmp_path / "run/checkpoint").glob("step-*")}
    others = found - {f"step-{STEPS}"}
    (saved,) = others
    step = int(saved.removeprefix("step-"))
    assert INTERVAL <= step < STEPS
    # The killed group may be back before the other one has seen that it was lost.
    told = [
        f"step {step} is due and not on disk: group {group} saves it"
        if step == INTERVAL
        else f"step {INTERVAL} is not on disk, as the group that was saving it is lost: group {group}"
        f" saves step {step} at once"
        for group in range(2)
    ]
    assert any(line in output for line in told)
    assert_all_is_there(tmp_path / "run", saved=(step, STEPS))


@pytest.mark.slow
def test_the_last_asynchronous_save_that_died_with_its_writer_is_made_by_the_other(tmp_path):
    code, _ = killed(tmp_path / "run", "write", STEPS, *ASYNC)
    assert code == 0
    assert_all_is_there(tmp_path / "run")


@pytest.mark.slow
def test_a_group_that_is_lost_and_writes_nothing_costs_nothing(tmp_path):
    code, _ = killed(tmp_path / "run", "line", STEPS, group=1)
    assert code == 0
    assert_all_is_there(tmp_path / "run")


@pytest.mark.release
def test_a_run_whose_groups_cannot_save_ends_with_1(tmp_path):
    """Each of them tries, starts again, and takes no step beyond that of the checkpoint."""
    code, output = killed(tmp_path / "run", "disk", INTERVAL)
    assert code == 1
    assert "error: groups have failed 7 times without a further step" in output
    assert max(written(tmp_path / "run", "loss")) == INTERVAL
    assert not list((tmp_path / "run/checkpoint").glob("step-*"))
