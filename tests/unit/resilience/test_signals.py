"""Effects of signals, and the death of a launcher, in separate processes."""

import os
import signal
import subprocess
import sys
import time

import pytest
from commands import ranks_of

from titan_lite.resilience import signals

NAMES = ["SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP"]
WITHOUT_EFFECT = ["SIGTERM", "SIGUSR1", "SIGHUP"]  # after another signal


def start(script, *arguments, environment=None, **options):
    # All of os.environ, by which conftest.py finds what has lost its parent
    own = {"RANK": "3", "PYTHONPATH": ":".join(sys.path)}
    variables = {**os.environ, **own, **(environment or {})}
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, "-c", script, *arguments], env=variables, **options)


NOTING = """
import os, signal, sys, time
from titan_lite.resilience import signals
signals.listen(starting=False)
if sys.argv[1] == "unblocked":
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals.STOPPING)  # as a library may do
for name in sys.argv[3:]:
    os.kill(os.getpid(), getattr(signal, name))
    end = time.monotonic() + float(sys.argv[2])  # a thread receives the signal, on a busy machine after a while
    time.sleep(0.1)
    while not signals.received() and time.monotonic() < end:
        time.sleep(0.1)
    print([signals.received()])
"""


@pytest.mark.parametrize("how", ["blocked", "unblocked"])
def test_the_first_signal_is_noted_and_others_change_nothing(how):
    for first in NAMES if how == "blocked" else ["SIGTERM"]:
        process = start(NOTING, how, "60", first, *WITHOUT_EFFECT, *WITHOUT_EFFECT)
        assert process.communicate(timeout=300)[0].split() == [f"['{first}']"] * 7
        assert process.returncode == 0


def test_a_hangup_that_is_ignored_stays_ignored():
    def ignore():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does

    process = start(NOTING, "blocked", "1", "SIGHUP", preexec_fn=ignore)
    assert process.communicate(timeout=300)[0].split() == ["['']"]
    process = start(NOTING, "blocked", "60", "SIGINT", preexec_fn=ignore)
    assert process.communicate(timeout=300)[0].split() == ["['SIGINT']"]


ENDING = """
import atexit, sys, time
from titan_lite.resilience import exit_code
from titan_lite.resilience import signals

def late():
    print("late", flush=True)
    sys.stdin.read()  # until the test closes it

def main():
    signals.listen(starting=False)
    print("up", flush=True)
    while not signals.received():
        time.sleep(0.01)
    atexit.register(late)
    return exit_code.STOPPED

exit_code.end_with(main)
"""


def test_a_storm_until_the_interpreter_has_ended_leaves_the_exit_code():
    process = start(ENDING, stdin=subprocess.PIPE)

    def send(times):
        for name in WITHOUT_EFFECT * times:
            process.send_signal(getattr(signal, name))

    assert process.stdout.readline() == "up\n"
    send(times=50)
    assert process.stdout.readline() == "late\n"
    send(times=50)
    process.stdin.close()
    while process.poll() is None:
        send(times=1)
    assert (process.returncode, process.stdout.read()) == (75, "")


SAVING = """
import ctypes, os
from titan_lite.resilience import signals
signals.listen(starting=False)
signals.end_start(lambda: "step 7, which began 12 s ago, and a save")
print("up", flush=True)
reading, writing = os.pipe()
# in a library, where no Python handler runs
ctypes.CDLL(None).read(reading, ctypes.create_string_buffer(1), 1)
"""
WAITS = "[rank 0] {}: stopping after step 7, which began 12 s ago, and a save"


@pytest.mark.parametrize("first", ["SIGTERM", "SIGINT"])
def test_the_first_signal_says_what_it_waits_for_and_a_further_sigint_does_not_wait(first):
    process = start(SAVING, environment={"RANK": "0"})
    assert process.stdout.readline() == "up\n"
    process.send_signal(getattr(signal, first))
    assert process.stdout.readline() == f"{WAITS.format(first)}; {signals.AT_ONCE}\n"
    process.send_signal(signal.SIGUSR1)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 75
    assert process.stdout.read() == "[rank 0] SIGINT again: ended at once, without a save\n"


@pytest.mark.parametrize("first", [[], ["SIGTERM"]])
def test_sigquit_ends_a_rank_at_once_though_its_launcher_blocks_it(first):
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGQUIT})
    try:
        process = start(SAVING)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    assert process.stdout.readline() == "up\n"
    for name in [*first, "SIGQUIT"]:
        process.send_signal(getattr(signal, name))
    assert process.wait(60) == -signal.SIGQUIT


STARTING = """
import ctypes, os, sys, threading, time
from titan_lite.resilience import signals
signals.listen()
reading, writing = os.pipe()

def end_library():
    while not signals.received():
        time.sleep(0.01)
    os.write(writing, b"1")

if sys.argv[1] == "started":
    signals.end_start()
    threading.Thread(target=end_library, daemon=True).start()
print("up", flush=True)
# in a library, where no Python handler runs: until the signal is received, or for ever
ctypes.CDLL(None).read(reading, ctypes.create_string_buffer(1), 1)
print("through", signals.received(), flush=True)
"""


@pytest.mark.parametrize(
    ("phase", "code", "said"),
    [
        ("starting", 75, "[rank 3] SIGTERM: stopped at the start, with nothing to save\n"),
        ("started", 0, "through SIGTERM\n"),
    ],
)
def test_a_process_that_is_starting_ends_at_once_also_from_within_a_library(phase, code, said):
    process = start(STARTING, phase)
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == code
    assert process.stdout.read() == said


# The death of a launcher

RANK = """
import os, sys, time
from titan_lite.resilience import signals
starting = sys.argv[1] == "starting"  # then a thread of `listen` ends the process
signals.listen(starting=starting)
print(os.getpid(), flush=True)
while starting or not signals.received():
    time.sleep(0.02)
print(signals.received(), flush=True)
os._exit(75)
"""
PARENT = (
    f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {RANK!r},"
    " sys.argv[1]]).wait()"
)
TORCHRUN = {"TORCHELASTIC_RUN_ID": "run"}
TOLD = {
    "starting": f"[rank 3] {signals.LAUNCHER_DEATH}: stopped at the start, with nothing to save\n",
    "training": f"{signals.LAUNCHER_DEATH}\n",
}


@pytest.mark.parametrize("phase", ["starting", "training"])
def test_a_rank_notices_that_its_launcher_was_killed(phase):
    launcher = start(PARENT, phase, environment=TORCHRUN)
    launcher.stdout.readline()
    launcher.kill()
    assert launcher.stdout.read() == TOLD[phase]  # to its end, which is the rank's


def test_a_rank_that_stops_does_not_outlive_its_launcher():
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SAVING!r}])"
    launcher = start(code, environment={**TORCHRUN, "RANK": "0"})
    assert launcher.stdout.readline() == "up\n"
    (rank,) = ranks_of(launcher)
    os.kill(rank, signal.SIGTERM)
    assert launcher.stdout.readline().startswith(WAITS.format("SIGTERM"))
    launcher.kill()
    died = f"[rank 0] {signals.LAUNCHER_DEATH}: ended at once, without a save\n"
    assert launcher.stdout.read() == died  # to its end, which is the rank's


def test_a_rank_that_comes_after_the_death_of_its_launcher_ends():
    process = start(RANK, "starting", environment={**TORCHRUN, signals.LAUNCHER: "999999999"})
    assert process.wait(60) == 75
    assert TOLD["starting"] in process.stdout.read()


def test_a_process_without_a_launcher_outlives_its_parent():
    parent = start(PARENT, "training")
    rank = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    time.sleep(0.5)  # in which a signal of the kernel would end it
    os.kill(rank, signal.SIGTERM)
    assert parent.stdout.read() == "SIGTERM\n"


def test_the_death_of_a_launcher_that_is_told_twice_is_one(monkeypatch):
    told = iter([signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1])
    ended = []
    monkeypatch.setattr(signals.signal, "sigwait", lambda numbers: next(told))
    monkeypatch.setattr(signals.signal, "pthread_sigmask", lambda how, numbers: None)
    monkeypatch.setattr(signals, "_launcher_has_died", lambda: True)
    monkeypatch.setattr(signals, "_first_signal", "")
    monkeypatch.setattr(signals, "record", lambda code: None)
    monkeypatch.setattr(signals, "_end_at_once", ended.append)
    with pytest.raises(StopIteration):
        signals._wait()
    assert signals.received() == signals.LAUNCHER_DEATH
    assert ended == []
