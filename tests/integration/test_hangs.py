"""A rank that stops, hangs or fails: all the others end, and say which it was and where they waited
for it.
"""

import json
import os
import re
import signal
from pathlib import Path

import pytest
from commands import Job, launcher, python
from ranks import reserved_port
from tiny import AOT_EAGER, DEBUG, NO_CHECKPOINT, NO_VALIDATION, NO_WORKERS, ROOT, SMALL, steps

pytestmark = pytest.mark.ranks(2)

OPTIONS = [
    *SMALL,
    "--model.n_layers=6",
    *steps(1000),
    *NO_VALIDATION,
    *NO_CHECKPOINT,
    *NO_WORKERS,
    "--training.global_batch_size=4",
]
LIMIT = ["--comm.train_timeout_seconds=30"]  # longer than a busy machine stops a rank that is well


class Ranks:
    """Ranks of their own, without a launcher that would end the others when one ends.

    fault: see tests/faulty.py.
    """

    def __init__(self, world_size, folder, *options, fault=None):
        world = {
            "WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": world_size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": reserved_port(),
        }
        program = [ROOT / "tests/faulty.py"] if fault else ["-m", "titan_lite.train"]
        command = python(*program, DEBUG, "--job.dump_folder", folder, *OPTIONS, *options)
        self.jobs = [
            Job(
                folder / f"rank-{rank}.log",
                *command,
                **world,
                RANK=rank,
                LOCAL_RANK=rank,
                FAULT=json.dumps(fault),
            )
            for rank in range(world_size)
        ]

    def __enter__(self):
        return self.jobs

    def __exit__(self, *failure):
        for job in self.jobs:
            job.__exit__()


def all_ended(jobs, *alive):
    """Return what all ranks have printed, when those that are not stopped have ended by themselves,
    and none well.
    """
    assert all(job.ended() != 0 for rank, job in enumerate(jobs) if rank not in alive)
    return "\n".join(job.output for job in jobs)


def stop_a_rank(ranks, folder, stopped, *options):
    with Ranks(ranks, folder, *LIMIT, *options) as jobs:
        jobs[0].logged(3)
        jobs[stopped].process.send_signal(signal.SIGSTOP)
        text = all_ended(jobs, stopped)
        assert jobs[stopped].process.poll() is None  # and did not end of itself
    return text


@pytest.mark.slow
def test_of_a_stopped_rank_the_other_one_tells(tmp_path):
    text = stop_a_rank(2, tmp_path, 1)
    assert re.search(
        r"hang: rank 0 has made no progress for 30 s in step \d+"
        r" \(comm.train_timeout_seconds = 30\)",
        text,
    )
    assert "rank 1 gives no sign of life (stopped, dead, or cut off)" in text
    # of a parameter, or of the loss and the times of ranks
    assert re.search(r"rank 0 waits in \w+ #\d+.* for rank 1", text)


@pytest.mark.release
@pytest.mark.parametrize("stopped", [1, 3])
def test_one_of_the_other_ranks_names_a_stopped_rank(stopped, tmp_path):
    text = stop_a_rank(4, tmp_path, stopped, "--parallelism.tensor_parallel_degree", "2")
    assert len(re.findall("hang: ", text)) == 1  # one tells for all
    assert f"rank {stopped} gives no sign of life (stopped, dead, or cut off)" in text
    assert re.search(rf"wait(s)? in \w+ #\d+.* for rank {stopped}", text)


@pytest.mark.slow
def test_a_rank_that_does_not_enter_a_collective_is_named_with_the_layer(tmp_path):
    with Ranks(
        2, tmp_path, *LIMIT, fault={"rank": 1, "at": "layer", "layer": 2, "step": 3, "sleep": 1000}
    ) as jobs:
        text = all_ended(jobs)
    assert len(re.findall("hang: ", text)) == 1
    assert re.search(r"rank 0 waits in all_gather #\d+ \(layers\.[23]\) for rank 1", text)
    place = (
        r"happen \(tests/faulty.py:\d+\), called by forward"
        r" \(titan_lite/models/transformer.py:\d+\)"
    )
    assert re.search(f"rank 1, in step 3: {place}", text)
    assert "gives no sign" not in text


@pytest.mark.release
def test_a_compilation_that_takes_too_long_has_its_own_limit(tmp_path):
    options = [*AOT_EAGER, "--comm.compile_timeout_seconds", "60"]
    with Ranks(
        2, tmp_path, *LIMIT, *options, fault={"rank": 1, "at": "compile", "sleep": 1000}
    ) as jobs:
        text = all_ended(jobs)
    limit = r"\(comm.compile_timeout_seconds = 60\)"
    assert re.search(rf"no progress for 60 s in (step 1|compiling) {limit}", text)
    assert re.search(r"rank 1, in compiling: happen \(tests/faulty.py:\d+\)", text)


@pytest.mark.release
def test_a_start_that_never_completes(tmp_path):
    limits = [*LIMIT, "--comm.init_timeout_seconds", "60"]
    with Ranks(2, tmp_path, *limits, fault={"rank": 1, "at": "start", "sleep": 1000}) as jobs:
        text = all_ended(jobs)
    assert re.search(r"no progress for 60 s in start \(comm.init_timeout_seconds = 60\)", text)
    assert re.search(r"rank \d, in start: happen \(tests/faulty.py:\d+\)", text)


@pytest.mark.release
def test_a_process_whose_interpreter_is_held_ends_all_the_same(tmp_path):
    with Ranks(
        2, tmp_path, *LIMIT, fault={"rank": 1, "at": "layer", "layer": 0, "step": 3, "hold": 1000}
    ) as jobs:
        text = all_ended(jobs)
    assert "rank 1 gives no sign of life" in text
    assert re.search(r'Timeout .*\n(.*\n)+.*File ".*faulty.py", line \d+ in happen', text)


@pytest.mark.release
@pytest.mark.parametrize(
    "fault", [{"at": "layer", "layer": 0, "step": 3}, {"at": "model_built"}], ids=["step", "start"]
)
def test_who_loses_a_rank_tells_why_that_failed(fault, tmp_path):
    with Ranks(
        2,
        tmp_path,
        fault={"rank": 1, "raise": "a fault of this rank alone\nand more lines", **fault},
    ) as jobs:
        text = all_ended(jobs)
    assert (
        "error: [rank 0] stopped, since rank 1 failed: ValueError: a fault of this rank alone\n"
        in text
    )
    assert "Traceback" not in jobs[0].output


@pytest.mark.release
def test_of_a_rank_that_died_the_others_tell(tmp_path):
    with Ranks(2, tmp_path) as jobs:
        jobs[0].logged(3)
        jobs[1].process.kill()
        text = all_ended(jobs)
    assert "rank 1 gives no sign of life (stopped, dead, or cut off)" in text


@pytest.mark.release
def test_torchrun_ends_the_stopped_rank_too(tmp_path):
    program = ["-m", "titan_lite.train", DEBUG, "--job.dump_folder", tmp_path, *OPTIONS, *LIMIT]
    # seconds from SIGTERM, which a stopped process does not see, to SIGKILL
    environment = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": 3}
    with Job(tmp_path / "log", *launcher(2, *program, ours=False), **environment) as job:
        job.logged(3)
        children = (
            Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children").read_text().split()
        )
        (stopped,) = (
            int(child)
            for child in children
            if b"\0RANK=1\0" in Path(f"/proc/{child}/environ").read_bytes()
        )
        os.kill(stopped, signal.SIGSTOP)
        assert job.ended() == 1
    assert "rank 1 gives no sign of life (stopped, dead, or cut off)" in job.output
    assert not Path(f"/proc/{stopped}").exists()


@pytest.mark.release
def test_a_rank_whose_data_is_slow_is_named(tmp_path):
    # longer than a busy machine makes the data of rank 0 late
    fault = {"rank": 1, "from": 1, "sleep": 5, "at": "batch"}
    with Ranks(2, tmp_path, *steps(4), "--metrics.log_freq", "2", fault=fault) as jobs:
        assert [job.ended() for job in jobs] == [0, 0]
    said = r"step \d+: rank (\d) is ready for a step of .* s; the others wait for its data"
    assert set(re.findall(said, jobs[0].output)) == {"1"}
