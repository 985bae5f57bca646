"""Runs that are asked to stop, are killed, or fail: how they end, and that they go on as if nothing
had been.
"""

import fcntl
import json
import re
import signal
from pathlib import Path

import pytest
import torch
from checkpoints import tensors_of
from commands import Job, launcher, ranks_of, script, train
from descendants import until_ended
from tiny import DEBUG, NO_CHECKPOINT, NO_VALIDATION, ROOT, SMALL, every, steps

from titan_lite.metrics.run_files import read_metrics

pytestmark = pytest.mark.ranks(2)

STEPS = 12
OPTIONS = [
    *SMALL,
    *steps(STEPS),
    *every(4, validated=4, batches=2),
    "--training.global_batch_size=4",
]
OPTIONS += ["--checkpoint.keep_latest_k=0"]


def started(folder, *options):
    """A run of ./run_train.sh on two ranks."""
    return Job(f"{folder}.log", *script(folder, *OPTIONS, *options), NGPU=2)


def with_fault(folder, *options, fault, ranks=2, restarts=0):
    """A run in which `fault` happens, see tests/faulty.py."""
    program = [ROOT / "tests/faulty.py", DEBUG, "--job.dump_folder", folder, *OPTIONS, *options]
    return Job(
        f"{folder}.log",
        *launcher(ranks, *program, restarts=restarts),
        FAULT=json.dumps(fault),
        TORCH_ELASTIC_SHUTDOWN_TIMEOUT=300,  # seconds to save in
    )


def tensors(folder):
    """Every parameter and optimizer state of the last step, by name."""
    return tensors_of(Path(folder) / f"checkpoint/step-{saved_steps(folder)[-1]}")


def same(folder, expected):
    """Bitwise: losses of every step, and what was trained."""
    metrics, expected_metrics = (
        read_metrics(Path(run) / "metrics.jsonl") for run in (folder, expected)
    )
    names = ("loss", "grad_norm", "validation_loss", "lr", "tokens_seen")
    for step, values in expected_metrics.items():
        assert {n: v for n, v in metrics[step].items() if n in names} == {
            n: v for n, v in values.items() if n in names
        }
    assert metrics.keys() == expected_metrics.keys()
    found, trained = tensors(folder), tensors(expected)
    assert found.keys() == trained.keys()
    assert len(found) == 4 * (2 * 9 + 3)  # parameters, their two moments and steps
    assert all(torch.equal(found[name], trained[name]) for name in trained)


def saved_steps(folder):
    return sorted(
        int(path.name.removeprefix("step-"))
        for path in (Path(folder) / "checkpoint").glob("step-*")
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("alone")
    assert train(2, DEBUG, folder, *OPTIONS).returncode == 0
    return folder


@pytest.mark.slow
def test_a_run_that_is_stopped_twice_and_killed_once_is_the_run_left_alone(alone, tmp_path):
    folder = tmp_path / "run"
    # one rank, before the first of two validation batches
    run = with_fault(
        folder, fault={"at": "validation_batch", "step": 4, "rank": 1, "signal": "SIGUSR1"}
    )
    assert run.ended() == 75
    assert "SIGUSR1 received by rank 1 at step 4: saving, then exiting (code 75)" in run.output
    assert "step    4  validation loss" not in run.output
    assert saved_steps(folder) == [4]

    run = with_fault(
        folder,
        fault={"at": "step_start", "step": 6, "rank": 1, "signal": "SIGTERM", "to": "nobody"},
    )
    run.until("fault: ")
    run.process.send_signal(signal.SIGTERM)  # to the launcher, while a rank is in step 6
    assert run.ended() == 75
    assert "step    4  validation loss" in run.output
    told = r"SIGTERM received by rank \d( and 1 other)? at step 6: saving, then exiting \(code 75\)"
    assert len(re.findall(told, run.output)) == 1
    assert saved_steps(folder)[-1] == 6

    run = with_fault(
        folder, fault={"at": "step_start", "step": 10, "rank": 0, "signal": "SIGKILL"}, restarts=1
    )
    assert run.ended() == 0
    assert "restart 1 of 1: the attempt before ended in step 10" in run.output
    same(folder, alone)


@pytest.mark.release
def test_a_fault_that_repeats_at_the_same_step_is_not_restarted_again(tmp_path):
    fault = {"at": "step_start", "step": 2, "rank": 1, "raise": "a fault", "every": True}
    run = with_fault(tmp_path / "run", *NO_VALIDATION, *NO_CHECKPOINT, fault=fault, restarts=3)
    assert run.ended() == 3
    assert run.output.count("\nfault: {") == 2
    assert (
        "error: step 2 failed twice in a row, the second time after a restart, so there is no"
        " further one" in run.output
    )


def fault(at, step, signal, *, rank=1, to="rank"):
    return pytest.param(
        {"at": at, "step": step, "rank": rank, "signal": signal, "to": to}, id=f"{at}-{signal}-{to}"
    )


FAULTS = [  # and the step that is saved last
    (fault("step_start", 2, "SIGINT", to="launcher"), 2),
    (fault("save", 4, "SIGTERM"), 4),
    (fault("save", 4, "SIGUSR1", to="launcher"), 4),
    (fault("validation_batch", 12, "SIGTERM"), 12),  # the last one of the run
    (fault("train_start", None, "SIGTERM"), 0),
]


@pytest.mark.release
@pytest.mark.parametrize(
    ("fault", "saved"), [pytest.param(*f.values, saved, id=f.id) for f, saved in FAULTS]
)
def test_at_every_moment_it_stops_saved_and_goes_on_exactly(fault, saved, alone, tmp_path):
    folder = tmp_path / "run"
    run = with_fault(folder, fault=fault, restarts=2)
    assert run.ended() == 75
    assert "restart" not in run.output
    assert max(saved_steps(folder), default=0) == saved
    if fault["to"] == "rank":
        then = (
            "saving, then exiting"
            if fault["at"] in ("step_start", "validation_batch") and saved
            else "exiting"
        )
        assert (
            f"{fault['signal']} received by rank 1 at step {saved}: {then} (code 75)" in run.output
        )
    assert run.output.count("(code 75)") == 1
    assert run.output.count(f"checkpoint written to {folder}/checkpoint/step-{saved}\n") == bool(
        saved
    )
    again = started(folder)
    assert again.ended() == 0
    same(folder, alone)


@pytest.mark.release
def test_a_signal_in_the_last_step_leaves_the_exit_code_0(tmp_path):
    folder = tmp_path / "run"
    run = with_fault(
        folder,
        *NO_VALIDATION,
        fault={"at": "step_start", "step": STEPS, "rank": 1, "signal": "SIGTERM"},
    )
    assert run.ended() == 0
    assert (
        f"SIGTERM received by rank 1 at step {STEPS}: saving, then exiting, as the run is done"
        in run.output
    )
    assert f"done: step {STEPS}" in run.output
    assert saved_steps(folder)[-1] == STEPS


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("tensor", 2),
        pytest.param("pipeline", 4, marks=pytest.mark.release),
        pytest.param("context", 4, marks=pytest.mark.release),
    ],
)
def test_ranks_of_every_kind_of_parallelism_stop_at_the_same_step(kind, ranks, tmp_path):
    layout = [f"--parallelism.{kind}_parallel_degree", "2", *NO_VALIDATION]
    last = ranks - 1
    fault = {"at": "step_start", "step": 2, "rank": last, "signal": "SIGUSR1"}
    run = with_fault(tmp_path, *layout, fault=fault, ranks=ranks)
    assert run.ended() == 75
    assert (
        f"SIGUSR1 received by rank {last} at step 2: saving, then exiting (code 75)" in run.output
    )
    assert saved_steps(tmp_path) == [2]


ENDLESS = [*SMALL, *steps(100_000), *NO_VALIDATION, "--checkpoint.interval=100000"]


@pytest.mark.release
@pytest.mark.parametrize("ours", [True, False], ids=["script", "torchrun"])
def test_a_launcher_that_is_killed_takes_the_ranks_along_which_save(ours, tmp_path):
    folder = tmp_path / "run"
    program = ["-m", "titan_lite.train", DEBUG, "--job.dump_folder", folder, *ENDLESS]
    run = Job(f"{folder}.log", *launcher(2, *program, ours=ours))
    run.logged(3)
    ranks = ranks_of(run.process)
    run.process.kill()
    until_ended(ranks)
    assert run.ended() == -signal.SIGKILL
    with (folder / "checkpoint/lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # which waits for the end of the ranks' own processes
    assert re.search(
        r"the death of its launcher noticed by rank \d( and 1 other)? at step \d+: saving, then"
        r" exiting",
        run.output,
    )
    assert "to resume: torchrun --nproc-per-node 2 -m titan_lite.train " in run.output
    assert saved_steps(folder)
