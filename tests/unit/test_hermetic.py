"""What protects a user's machine from the tests: they end in time with all their processes, and leave
nothing behind.
"""

import os
import re
import subprocess
import sys
import time

import pytest
from tiny import ROOT


def run_tests(folder, source):
    """Run the tests of `source` in a session of its own, with conftest.py."""
    (folder / "test_inner.py").write_text(source)
    options = ["-c", ROOT / "pyproject.toml", "--rootdir", folder, "-p", "conftest", "-q"]
    paths = [str(ROOT), str(ROOT / "tests"), *filter(None, sys.path)]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-p", "no:cacheprovider", folder],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,  # most of it imports torch, which takes long on a busy machine
    )


# Each test ends its time itself, once it hangs.
HANGING = """
import os, signal, time
import pytest
from commands import Job
from ranks import run_ranks

def hang(test):
    print("never printed", flush=True)
    if os.environ["RANK"] == "0":  # both run: they have met
        os.kill(test, signal.SIGALRM)
    time.sleep({seconds})

@pytest.mark.timeout(300)
def test_ranks():
    run_ranks(2, hang, os.getpid())

class Hanging(Job):
    @property
    def output(self):
        text = super().output
        if "two run" in text:
            signal.raise_signal(signal.SIGALRM)
        return text

@pytest.mark.timeout(200)
def test_orphan(tmp_path):
    line = "setsid sleep {seconds} & echo two run; exec sleep {seconds}"
    job = Hanging(tmp_path / "log", "sh", "-c", line)
    job.until("never")

def test_others_run():
    pass
"""


@pytest.mark.slow
def test_a_test_that_hangs_fails_with_its_stack_and_its_processes_end(tmp_path):
    seconds = f"{3600 + time.time() % 1:.6f}"  # by which the processes are known
    done = run_tests(tmp_path, HANGING.format(seconds=seconds))
    assert "2 failed, 1 passed" in done.stdout, done.stdout
    assert re.findall(r"Timeout \(>(.*?)s\)", done.stdout)[:2] == ["300.0", "200.0"]
    assert "job.until" in done.stdout
    assert subprocess.run(["pgrep", "-f", seconds], stdout=subprocess.DEVNULL).returncode == 1


LEAVING = """
from pathlib import Path

def test_in_the_current_folder():
    Path("outputs.txt").touch()

def test_at_home():
    Path("~/.left").expanduser().touch()

def test_nothing(tmp_path):
    (tmp_path / "file").touch()
"""


@pytest.mark.slow
def test_what_a_test_leaves_is_named(tmp_path):
    done = run_tests(tmp_path, LEAVING)
    assert "3 passed, 2 errors" in done.stdout, done.stdout
    assert re.findall(r"left outside of tmp_path: \S+/(\S+/\S+)", done.stdout)[:2] == [
        "empty/outputs.txt",
        "home/.left",
    ]
