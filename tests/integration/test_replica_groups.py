"""Replica groups: one is lost, and the run goes on without a step, a document or a bit lost.

    NCOPIES=2 NGPU=1 ./run_train.sh

All runs compare parameters and optimizer state of their groups every step.
"""

import os
import signal
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from commands import Job, python, run, train
from descendants import runs
from ranks import reserved_port
from tiny import AOT_EAGER, DEBUG, NO_VALIDATION, SMALL, every, steps

from titan_lite.manifest import read_json
from titan_lite.metrics.run_files import read_events, read_metrics

pytest.importorskip("torchft")
pytestmark = pytest.mark.ranks(3)

OPTIONS = [
    *SMALL,
    *NO_VALIDATION,
    "--training.global_batch_size=16",
    "--training.compare_replicas_freq=1",
    "--fault_tolerance.timeout_seconds=10",
]


ENDLESS = steps(1_000_000)  # until a signal: however fast the machine is, there is a next step
SAME_LOSS = 2e-5  # a sum over groups has another order; relative


def groups(folder, *options, ngpu=1, **environment):
    """Start two groups of `ngpu` ranks each."""
    environment = {"NCOPIES": 2, "NGPU": ngpu, "PYTHONSAFEPATH": 1, **environment}
    command = python("-m", "titan_lite.launch", DEBUG, "--job.dump_folder", folder)
    return Job(folder.with_suffix(".log"), *command, *OPTIONS, *options, **environment)


def alone(folder, *options, ranks=1):
    """Train in one world, and return its metrics."""
    done = train(ranks, DEBUG, folder, *[o for o in OPTIONS if "fault_tol" not in o], *options)
    assert done.returncode == 0
    return read_metrics(folder / "metrics.jsonl")


def processes(job, word, group=None):
    """Return the processes of a job, of a group of it, whose command line has a word."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            variables = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
        except (OSError, UnicodeDecodeError):
            continue
        is_of_job = f"TITAN_LITE_SUPERVISOR={job.process.pid}" in variables
        if is_of_job and word in words and (group is None or f"COPY={group}" in variables):
            found.append(int(pid))
    return sorted(pid for pid in found if runs(pid))


def children(pid):
    """Return the processes that a process has started."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def ranks(job, group):
    """Return the ranks of a group and their loaders' processes, the first rank first."""
    return processes(job, "titan_lite.train", group)


def kill(job, group, number=signal.SIGKILL):
    """Send a signal to the first rank of a group."""
    os.kill(ranks(job, group)[0], number)


def newest(folder):
    return max(read_metrics(folder / "metrics.jsonl"), default=0)


def goes_on(job, folder, more=3, seconds=90):
    """Wait until the run has done some more steps, and return the last one."""
    goal = newest(folder) + more
    deadline = time.monotonic() + seconds
    while newest(folder) < goal:
        assert job.process.poll() is None, job.output
        assert time.monotonic() < deadline, job.output
        time.sleep(0.1)
    return newest(folder)


def position(folder, step):
    """Return what a step has of the data: positions, counts of tokens and of documents."""
    parts = read_json(folder / f"checkpoint/step-{step}/state.json")["parts"]
    return {name: parts[name] for name in ("loader", "progress", "per_source", "bad_documents")}


def losses(folder):
    return {step: values["loss"] for step, values in read_metrics(folder / "metrics.jsonl").items()}


def assert_same_losses(one, other):
    assert one.keys() == other.keys()
    for step, loss in one.items():
        assert loss == pytest.approx(other[step], rel=SAME_LOSS), f"step {step}"


EXPERTS = ["--model.name=qwen3_moe", "--model.hidden_dim=32", "--experts.balance=bias"]
PIPELINE = ["--parallelism.pipeline_parallel_degree=2", "--training.local_batch_size=4"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ngpu"),
    [
        pytest.param([], 1, id="dense"),
        pytest.param(EXPERTS, 1, id="experts", marks=pytest.mark.release),
        pytest.param(["--optimizer.name=Muon"], 2, id="Muon", marks=pytest.mark.release),
        pytest.param(AOT_EAGER, 2, id="compiled", marks=pytest.mark.release),
        pytest.param(
            ["--parallelism.tensor_parallel_degree=2"], 2, id="tensor", marks=pytest.mark.release
        ),
        pytest.param(PIPELINE, 2, id="pipeline", marks=pytest.mark.release),
    ],
)
def test_without_faults_groups_are_replicas_of_one_world(kind, ngpu, tmp_path):
    options = [*kind, *steps(12)]
    # no sum takes so long, on a busy machine either
    both = ["--fault_tolerance.min_replica_groups=2", "--fault_tolerance.timeout_seconds=45"]
    job = groups(tmp_path / "groups", *options, *both, ngpu=ngpu)
    assert job.ended() == 0
    replicas = "--parallelism.data_parallel_replicate_degree=2"
    world = alone(tmp_path / "world", *options, replicas, ranks=2 * ngpu)
    ours = read_metrics(tmp_path / "groups/metrics.jsonl")
    assert_same_losses(losses(tmp_path / "groups"), {s: v["loss"] for s, v in world.items()})
    for step, values in ours.items():
        assert values["grad_norm"] == pytest.approx(world[step]["grad_norm"], rel=1e-4)
    assert [values["copies"] for values in ours.values()] == [2] * 12
    assert position(tmp_path / "groups", 12) == position(tmp_path / "world", 12)


@pytest.mark.parametrize(
    "killed",
    [pytest.param([0], id="first"), pytest.param([1, 0], marks=pytest.mark.slow, id="both")],
)
def test_a_group_is_killed_and_the_run_is_the_one_left_alone(killed, tmp_path):
    folder = tmp_path / "run"
    with groups(folder, *ENDLESS, *every(50)) as job:
        job.until("2 of 2 groups take part")
        goes_on(job, folder)
        for group in killed:
            kill(job, group)
            job.until(rf"group {group} has failed")
            joined = rf"group {group}\] group {group} resumes from step \d+ of a living group"
            job.until(rf"(?s)group {group} has failed.*{joined}")
            goes_on(job, folder)
        job.process.send_signal(signal.SIGTERM)
        assert job.ended() == 75
    assert job.output.count("started again in 1 s") == len(killed)
    assert "are not equal" not in job.output
    last = newest(folder)
    alone(tmp_path / "alone", *steps(last, schedule=1_000_000), *every(last))
    assert_same_losses(losses(folder), losses(tmp_path / "alone"))
    assert position(folder, last) == position(tmp_path / "alone", last)
    events, notes = read_events(folder / "events.jsonl")
    assert not notes
    assert [event["event"] for event in events].count("start") == 1


@pytest.mark.slow
def test_a_stopped_group_and_a_lost_lighthouse_do_not_stop_the_run(tmp_path):
    """The first group writes the files; while it is stopped the second does."""
    folder = tmp_path / "run"
    with groups(folder, *ENDLESS, *every(10)) as job:
        job.until("2 of 2 groups take part")
        goes_on(job, folder)
        stopped = ranks(job, 0)
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        job.until(r"group 1\] 1 of 2 groups take part from step \d+ on, 2 before")
        reached = goes_on(job, folder, more=12)
        job.until(rf"group 1\] checkpoint written to \S+step-{reached // 10 * 10}\n")
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        job.until(r"group 0 resumes from step \d+ of a living group")
        goes_on(job, folder)

        (lighthouse,) = processes(job, "titan_lite.lighthouse")
        os.kill(lighthouse, signal.SIGKILL)
        job.until(r"the lighthouse has ended \(killed by SIGKILL\): started again")
        goes_on(job, folder)
        job.process.send_signal(signal.SIGTERM)
        assert job.ended() == 75
    last = newest(folder)
    assert (folder / f"checkpoint/step-{last}").is_dir()
    assert f"to resume: NCOPIES=2 NGPU=1 titan-lite train {DEBUG}" in job.output


@pytest.mark.release
def test_when_all_groups_are_lost_the_run_goes_on_from_its_newest_step(tmp_path):
    folder = tmp_path / "run"
    with groups(folder, *ENDLESS, *every(5)) as job:
        job.until("checkpoint written to .*step-10")
        first_ranks = [ranks(job, group)[0] for group in (0, 1)]
        for pid in first_ranks:
            os.kill(pid, signal.SIGKILL)
        job.until(r"resumed from \S+step-\d+")
        goes_on(job, folder)
        job.process.send_signal(signal.SIGTERM)
        assert job.ended() == 75
    last = newest(folder)
    alone(tmp_path / "alone", *steps(last, schedule=1_000_000), *every(last))
    assert_same_losses(losses(folder), losses(tmp_path / "alone"))
    assert position(folder, last) == position(tmp_path / "alone", last)


@contextmanager
def lone_groups(tmp_path, *options):
    """Return a context with two groups that are started one by one, and a lighthouse."""
    port = reserved_port()
    serve = python("-m", "titan_lite.lighthouse", "--host", "127.0.0.1", "--port", port)
    command = python("-m", "titan_lite.launch", DEBUG, "--job.dump_folder", tmp_path / "run")
    command += [*OPTIONS, *options, f"--fault_tolerance.lighthouse=http://127.0.0.1:{port}"]
    with Job(tmp_path / "lighthouse.log", *serve, PYTHONSAFEPATH=1) as lighthouse:
        lighthouse.until("lighthouse: ")
        variables = {"NCOPIES": 2, "NGPU": 1, "PYTHONSAFEPATH": 1}
        yield [Job(tmp_path / f"{n}.log", *command, COPY=n, **variables) for n in range(2)]


@pytest.mark.release
def test_groups_that_are_started_one_by_one_meet_at_a_lighthouse(tmp_path):
    with lone_groups(tmp_path, *steps(200), "--fault_tolerance.min_replica_groups=2") as jobs:
        assert [job.ended() for job in jobs] == [0, 0]
    assert "2 of 2 groups take part from step 1 on" in jobs[0].output
    assert "group 0] done: step 200" in jobs[0].output
    assert newest(tmp_path / "run") == 200


@pytest.mark.release
def test_a_group_that_is_left_alone_saves_where_more_are_needed(tmp_path):
    """Also if it is not the one that writes, and if nobody had saved before."""
    needed = ["--fault_tolerance.min_replica_groups=2", "--fault_tolerance.wait_seconds=60"]
    with lone_groups(tmp_path, *ENDLESS, *every(1_000_000), *needed) as (first, second):
        first.until("2 of 2 groups take part")
        goes_on(first, tmp_path / "run")
        for pid in (first.process.pid, *children(first.process.pid)):
            os.kill(pid, signal.SIGKILL)
        first.process.wait()
        second.until("waiting for other groups")
        assert second.ended() == 75
    (saved,) = (tmp_path / "run/checkpoint").glob("step-*")
    assert f"checkpoint written to {saved}" in second.output


def test_without_a_lighthouse_a_group_is_refused_before_it_starts(tmp_path):
    command = python("-m", "titan_lite.launch", DEBUG, "--job.dump_folder", tmp_path)
    done = run(*command, *OPTIONS, NCOPIES=2, COPY=1, NGPU=1, PYTHONSAFEPATH=1)
    assert done.returncode == 2
    assert "fault_tolerance.lighthouse" in done.stdout
    assert "Traceback" not in done.stdout
