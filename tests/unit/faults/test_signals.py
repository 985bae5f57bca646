"""What a signal leaves behind, in a process of its own."""

import subprocess
import sys

import pytest

SCRIPT = """
import os, signal
from titan_lite.faults import signals
signals.listen()
print([signals.received()])
for name in {names}:
    os.kill(os.getpid(), getattr(signal, name))
    signals._since -= {later}
    print(signals.received())
"""


def run(names, later=0):
    command = [sys.executable, "-c", SCRIPT.format(names=names, later=later)]
    environment = {"RANK": "3", "PYTHONPATH": ":".join(sys.path)}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_a_signal_is_noted(name):
    result = run([name])
    assert (result.returncode, result.stdout.split(), result.stderr) == (0, ["['']", name], "")


def test_another_one_changes_nothing_and_is_told_unless_it_comes_with_the_first():
    names = ["SIGUSR1", "SIGTERM", "SIGUSR1", "SIGINT"]
    result = run(names, later=6)
    assert (result.returncode, result.stdout.split()[1:]) == (0, ["SIGUSR1"] * 4)
    assert result.stderr.splitlines() == [f"[rank 3] {name}: already stopping, after SIGUSR1" for name in names[1:]]
    assert run(names).stderr == ""


def test_a_second_interrupt_ends_the_process():
    assert run(["SIGINT", "SIGINT"]).returncode == -2
