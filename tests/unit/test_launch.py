"""The launcher with processes that do not train: what they get, whether they are restarted, what it exits with."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from titan_lite.launch import exit_code

WORKER = """
import os, sys, time
from titan_lite.faults import signals
os.write(1, b"up\\n")  # whole: torchrun's processes are unbuffered, and share it
how, rank = sys.argv[1], int(os.environ["RANK"])
if how == "stop":
    time.sleep(1)  # as imports do
signals.listen()
while how == "stop" and not signals.received():
    time.sleep(0.05)
while how == "hang":
    time.sleep(0.05)
os.write(1, f"rank {rank} {signals.received()}\\n".encode())
sys.exit(75 if how == "stop" else int(how) * rank)
"""


@pytest.fixture
def launch(tmp_path):
    (tmp_path / "worker.py").write_text(WORKER)

    def start(how, *names):
        """(exit code, output) of two processes that do as WORKER says `how`; the launcher gets the signals of these names."""
        command = [
            sys.executable,
            "-m",
            "titan_lite.launch",
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            "localhost:0",
        ]
        process = subprocess.Popen(
            [
                *command,
                "--nproc-per-node",
                "2",
                "--max-restarts",
                "1",
                str(tmp_path / "worker.py"),
                how,
            ],
            env={
                **os.environ,
                "PYTHONPATH": str(Path(__file__).parents[2]),
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        output = ""
        while names and output.count("up\n") < 2:
            output += process.stdout.readline()
        for name in names:
            process.send_signal(getattr(signal, name))
            output += process.stdout.readline()  # is told that it came, before there is another
        output += process.stdout.read()
        return process.wait(60), output

    return start


def test_a_signal_reaches_the_processes_which_are_not_restarted(launch):
    code, output = launch("stop", "SIGUSR1")
    assert code == 75
    assert output.count("up") == 2
    assert {"rank 0 SIGUSR1", "rank 1 SIGUSR1"} <= set(output.splitlines())
    assert "error" not in output.lower()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_so_do_the_others(name, launch):
    code, output = launch("stop", name)
    assert code == 75
    assert {f"rank 0 {name}", f"rank 1 {name}"} <= set(output.splitlines())


@pytest.mark.slow
def test_a_second_interrupt_kills(launch):
    assert launch("hang", "SIGINT", "SIGINT")[0] == 130


def test_a_failure_is_restarted_as_often_as_asked_for_and_told(launch):
    code, output = launch("1")
    assert code == 1
    assert output.count("up") == 4
    first, second = [line for line in output.splitlines() if line.startswith("error: ")]
    assert "was the first to end, with exit code 1; all are started again, 1 times at most" in first
    assert second.endswith("was the first to end, with exit code 1")


@pytest.mark.slow
@pytest.mark.parametrize("how", [2, 3, 75])
def test_what_would_end_there_again_or_was_meant_to_is_not_restarted(how, launch):
    code, output = launch(str(how))
    assert (code, output.count("up")) == (how, 2)


@pytest.mark.parametrize(
    ("codes", "asked", "code"),
    [
        ([1, -15], False, 1),  # one failed, the other was ended by torchrun
        ([-9, 1], False, 1),
        ([-15], False, 1),
        ([2, 1], False, 2),
        ([3, 3], False, 3),
        ([75, 75], False, 75),  # a rank got the signal itself
        ([75, 75], True, 75),
        ([75, -15], True, 75),  # torchrun ended it in its last moment
        ([-10, -10], True, 75),
        ([-9, 75], True, 1),
        ([1, 75], True, 1),  # the save failed
    ],
)
def test_exit_codes(codes, asked, code):
    assert exit_code(codes, asked) == code
