"""A rank that stops, hangs or fails: all the others end, and say which it was and where they waited
for it.
"""

import json
import re
import signal

import pytest
from commands import Job, python
from ranks import reserved_port
from tiny import DEBUG, NO_CHECKPOINT, NO_VALIDATION, NO_WORKERS, ROOT, SMALL, steps

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
def test_a_process_whose_interpreter_is_held_ends_all_the_same(tmp_path):
    with Ranks(
        2, tmp_path, *LIMIT, fault={"rank": 1, "at": "layer", "layer": 0, "step": 3, "hold": 1000}
    ) as jobs:
        text = all_ended(jobs)
    assert "rank 1 gives no sign of life" in text
    assert re.search(r'Timeout .*\n(.*\n)+.*File ".*faulty.py", line \d+ in happen', text)
