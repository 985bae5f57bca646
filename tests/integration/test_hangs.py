"""A rank that stops, hangs or fails: all the others end, and say which it was and where they waited for it."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEBUG = ROOT / "train_configs/debug_model.toml"
OPTIONS = ["--training.seq_len", "32", "--training.global_batch_size", "4", "--training.steps", "1000", "--metrics.log_freq", "1"]
OPTIONS += ["--no-validation.enable", "--no-checkpoint.enable", "--no-metrics.enable_tensorboard", "--data.num_workers", "0"]
LIMIT = ["--comm.train_timeout_seconds", "3"]


class Run:
    """Ranks of their own, without a launcher that would end the others when one ends."""

    def __init__(self, ranks, folder, *options, fault=""):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        world = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "FAULT": fault}
        world |= {"OMP_NUM_THREADS": 1, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ROOT}
        program = [ROOT / "tests/faulty.py"] if fault else ["-m", "titan_lite.train"]
        command = [sys.executable, *program, DEBUG, "--job.dump_folder", folder, *OPTIONS, *options]
        self.logs = [folder / f"rank-{rank}.log" for rank in range(ranks)]
        self.processes = []
        for rank, log in enumerate(self.logs):
            environment = {**os.environ, **{key: str(value) for key, value in world.items()}}
            with open(log, "wb") as output:
                self.processes.append(
                    subprocess.Popen(
                        [*map(str, command)],
                        env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )

    def __enter__(self):
        return self

    def __exit__(self, *failure):
        for process in self.processes:
            process.kill()  # a stopped one as well
            process.wait()

    def output(self, rank):
        return self.logs[rank].read_text()

    def until(self, rank, text):
        """Wait until the rank has said so."""
        deadline = time.monotonic() + 120
        while text not in self.output(rank):
            assert self.processes[rank].poll() is None, self.output(rank)
            assert time.monotonic() < deadline, self.output(rank)
            time.sleep(0.1)

    def ended(self, *ranks):
        """What they and all others have said, when they have ended by themselves; none well."""
        for rank in ranks:
            assert self.processes[rank].wait(120) not in (0, None)
        text = "\n".join(map(self.output, range(len(self.processes))))
        print(text)
        return text


def stop_a_rank(ranks, folder, stopped, *options):
    with Run(ranks, folder, *LIMIT, *options) as run:
        run.until(0, "step    3 ")
        run.processes[stopped].send_signal(signal.SIGSTOP)
        text = run.ended(*(rank for rank in range(ranks) if rank != stopped))
        assert run.processes[stopped].poll() is None  # and did not end of itself
    return text


def test_of_a_stopped_rank_the_other_one_tells(tmp_path):
    text = stop_a_rank(2, tmp_path, 1)
    assert re.search(r"hang: rank 0 has made no progress for 3 s in step \d+ \(comm.train_timeout_seconds = 3\)", text)
    assert "rank 1 gives no sign of life (stopped, dead, or cut off)" in text
    assert re.search(r"rank 0 waits in (all_gather|reduce_scatter|all_reduce) #\d+.*, which rank 1 did not enter", text)


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [1, 3])
def test_of_a_stopped_rank_the_others_tell(stopped, tmp_path):
    text = stop_a_rank(4, tmp_path, stopped, "--parallelism.tensor_parallel_degree", "2")
    assert len(re.findall("hang: ", text)) == 1  # one tells for all
    assert f"rank {stopped} gives no sign of life (stopped, dead, or cut off)" in text
    assert re.search(rf"wait(s)? in \w+ #\d+.*, which rank {stopped} did not enter", text)


def test_a_rank_that_does_not_enter_a_collective_is_named_with_the_layer(tmp_path):
    with Run(2, tmp_path, *LIMIT, fault="in_layer 1 2 3 1000") as run:
        text = run.ended(0, 1)
    assert len(re.findall("hang: ", text)) == 1
    assert re.search(r"rank 1 did not enter all_gather #\d+ \(layers\.[23]\..+\); rank 0 waits there", text)
    place = r"<lambda> \(tests/faulty.py:\d+\), called by forward \(titan_lite/models/llama3.py:\d+\)"
    assert re.search(f"rank 1, in step 3: {place}", text)
    assert "gives no sign" not in text


@pytest.mark.slow
def test_a_compilation_that_takes_too_long_has_its_own_limit(tmp_path):
    options = ["--compile.enable", "--compile.backend", "aot_eager", "--comm.compile_timeout_seconds", "60"]
    with Run(2, tmp_path, *LIMIT, *options, fault="in_compile 1 1000") as run:
        text = run.ended(0, 1)
    assert re.search(r"no progress for 60 s in step 1 \(comm.compile_timeout_seconds = 60\)", text)
    assert re.search(r"rank 1, in step 1: slow \(tests/faulty.py:\d+\)", text)


@pytest.mark.slow
def test_a_start_that_never_completes(tmp_path):
    with Run(2, tmp_path, *LIMIT, "--comm.init_timeout_seconds", "10", fault="at_start 1 1000") as run:
        text = run.ended(0, 1)
    assert re.search(r"no progress for 10 s in start \(comm.init_timeout_seconds = 10\)", text)
    assert re.search(r"rank \d, in start: late \(tests/faulty.py:\d+\)", text)


@pytest.mark.slow
def test_a_process_whose_interpreter_is_held_ends_all_the_same(tmp_path):
    with Run(2, tmp_path, *LIMIT, fault="holding_the_interpreter 1 3 1000") as run:
        text = run.ended(0, 1)
    assert "rank 1 gives no sign of life" in text
    assert re.search(r'Timeout .*\n(.*\n)+.*File ".*faulty.py", line \d+ in <lambda>', text)


@pytest.mark.slow
def test_who_loses_a_rank_tells_why_that_failed(tmp_path):
    with Run(2, tmp_path, fault="raising 1 3") as run:
        text = run.ended(0, 1)
    assert "error: [rank 0] stopped, since rank 1 failed: ValueError: a fault of this rank alone\n" in text
    assert "Traceback" not in run.output(0)


@pytest.mark.slow
def test_of_a_rank_that_died_the_others_tell(tmp_path):
    with Run(2, tmp_path) as run:
        run.until(0, "step    3 ")
        run.processes[1].kill()
        text = run.ended(0)
    assert "rank 1 gives no sign of life (stopped, dead, or cut off)" in text


@pytest.mark.slow
def test_torchrun_ends_the_stopped_rank_too(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command += ["--nproc-per-node", "2", "-m", "titan_lite.train", DEBUG, "--job.dump_folder", tmp_path, *OPTIONS, *LIMIT]
    environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "3"  # seconds from SIGTERM, which a stopped process does not see, to SIGKILL
    log = tmp_path / "log"
    with open(log, "wb") as output:
        launcher = subprocess.Popen(
            [*map(str, command)], env={**os.environ, **environment}, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        while "step    3 " not in log.read_text():
            assert launcher.poll() is None, log.read_text()
            time.sleep(0.1)
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        (stopped,) = (int(child) for child in children if b"\0RANK=1\0" in Path(f"/proc/{child}/environ").read_bytes())
        os.kill(stopped, signal.SIGSTOP)
        assert launcher.wait(120) == 1
    finally:
        launcher.kill()
    assert "rank 1 gives no sign of life (stopped, dead, or cut off)" in log.read_text()
    assert not Path(f"/proc/{stopped}").exists()


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["in_layer 1 2 3 0.3", "in_data 1 3 0.3"])
def test_a_slow_rank_is_named(fault, tmp_path):
    with Run(2, tmp_path, "--training.steps", "40", "--metrics.log_freq", "4", fault=fault) as run:
        assert [process.wait(240) for process in run.processes] == [0, 0]
    said = r"step \d+: rank (\d) is slower than the others, which wait for it: its steps take [\d.]+ times theirs"
    slower = re.findall(said, run.output(0))
    assert set(slower) == {"1"}


@pytest.mark.slow
def test_of_ranks_that_are_equally_fast_none_is_named(tmp_path):
    with Run(2, tmp_path, "--training.steps", "40", "--metrics.log_freq", "4") as run:
        assert [process.wait(240) for process in run.processes] == [0, 0]
    assert "slower" not in run.output(0)
