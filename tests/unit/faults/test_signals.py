"""Effects of signals, and the death of a launcher, in separate processes."""

import os
import signal
import subprocess
import sys
import time

import pytest

from titan_lite.faults import signals

SCRIPT = """
import os, signal
from titan_lite.faults import signals
signals.listen()
print([signals.received()])
for name in {names}:
    os.kill(os.getpid(), getattr(signal, name))
    print(signals.received())
"""


def start(script, *arguments, **environment):
    variables = {"RANK": "3", "PYTHONPATH": ":".join(sys.path), **environment}
    streams = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return subprocess.Popen([sys.executable, "-c", script, *arguments], env=variables, **streams)


def run(names):
    process = start(SCRIPT.format(names=names))
    output, _ = process.communicate(timeout=60)
    return process.returncode, output.split()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_a_signal_is_noted(name):
    assert run([name]) == (0, ["['']", name])


def test_another_one_changes_nothing():
    assert run(["SIGUSR1", "SIGTERM", "SIGUSR1", "SIGINT"]) == (0, ["['']", *["SIGUSR1"] * 4])


def test_a_second_interrupt_ends_the_process():
    assert run(["SIGINT", "SIGINT"])[0] == -2


ENDING = """
import atexit, time
from titan_lite.faults import signals

def late():
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline:
        time.sleep(0.01)
    print("late", flush=True)

def main():
    signals.listen()
    print("up", flush=True)
    while not signals.received():
        time.sleep(0.01)
    signals.settle()
    print("settled", flush=True)
    atexit.register(late)
    return signals.STOPPED

signals.end_with(main)
"""


@pytest.mark.parametrize(
    "names", [["SIGTERM"], ["SIGUSR1"], ["SIGUSR1", "SIGTERM", "SIGINT"]], ids="-".join
)
def test_a_storm_until_the_interpreter_has_ended_leaves_the_exit_code(names):
    process = start(ENDING)
    assert process.stdout.readline() == "up\n"
    process.send_signal(getattr(signal, names[0]))
    told = process.stdout.readline() if "SIGINT" in names else ""  # two of which before would kill
    sent = 0
    while process.poll() is None:
        for name in names:
            process.send_signal(getattr(signal, name))
            sent += 1
    assert (process.returncode, told + process.stdout.read()) == (75, "settled\nlate\n")
    assert sent > 100


STARTING = """
import ctypes, sys
from titan_lite.faults import signals
signals.listen(starting=True)
if sys.argv[1] == "started":
    signals.started()
print("up", flush=True)
for _ in range(30):  # a signal ends the first of them early
    ctypes.CDLL(None).usleep(100_000)  # in a library, where no Python handler runs
print("through", signals.received(), flush=True)
"""


def test_a_process_that_is_starting_ends_at_once_also_from_within_a_library():
    process = start(STARTING, "starting")
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75
    assert process.stdout.read() == "[rank 3] SIGTERM: stopped at the start, with nothing to save\n"


def test_one_that_has_started_goes_on():
    process = start(STARTING, "started")
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert process.stdout.read() == "through SIGTERM\n"


# The death of a launcher

RANK = """
import os, sys, time
from titan_lite.faults import signals
signals.listen(starting=sys.argv[1] == "starting")
print(os.getpid(), flush=True)
while not signals.received():
    time.sleep(0.02)
print(signals.received(), flush=True)
os._exit(75)
"""
LAUNCHER = f"""
import os, subprocess, sys, time
from contextlib import nullcontext
from titan_lite.faults import signals
with signals.announce() if sys.argv[2] == "ours" else nullcontext():
    subprocess.Popen([sys.executable, "-c", {RANK!r}, sys.argv[1]]).wait()
"""


@pytest.mark.parametrize("phase", ["starting", "training"])
@pytest.mark.parametrize("whose", ["ours", "torchrun's"])
def test_a_rank_notices_that_its_launcher_was_killed(whose, phase):
    launcher = start(
        LAUNCHER, phase, whose, **({} if whose == "ours" else {"TORCHELASTIC_RUN_ID": "run"})
    )
    launcher.stdout.readline()
    launcher.kill()
    told = {
        "starting": f"[rank 3] {signals.LOST}: stopped at the start, with nothing to save\n",
        "training": f"{signals.LOST}\n",
    }
    assert launcher.stdout.read() == told[phase]  # to its end, which is the rank's


def test_a_rank_that_comes_after_the_death_of_its_launcher_ends(monkeypatch):
    monkeypatch.delenv(signals.LAUNCHER, raising=False)
    with signals.announce():
        name = os.environ[signals.LAUNCHER]
    process = start(RANK, "starting", **{signals.LAUNCHER: name})
    assert process.wait(60) == 75
    assert "[rank 3] the death of its launcher: stopped at the start" in process.stdout.read()


def test_a_process_without_a_launcher_outlives_its_parent():
    launcher = start(LAUNCHER, "training", "none")
    rank = int(launcher.stdout.readline())
    launcher.kill()
    launcher.wait()
    time.sleep(1.5)
    os.kill(rank, signal.SIGTERM)
    assert launcher.stdout.read() == "SIGTERM\n"


def test_a_pipe_that_is_gone_leaves_the_exit_code():
    code = "import sys\nfrom titan_lite.faults import signals\nsignals.end_with(lambda: print('told') or signals.STOPPED)"
    process = start(code)
    process.stdout.close()
    assert process.wait(60) == 75
