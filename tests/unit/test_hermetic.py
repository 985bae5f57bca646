"""Tests have the same surroundings whatever a user has set, end in time with all their processes, and
leave nothing behind.
"""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from tiny import ROOT


def run_tests(folder, source, *, preexec_fn=None, **environment):
    """Run the tests of `source` in a session of its own, with conftest.py."""
    (folder / "test_inner.py").write_text(source)
    options = ["-c", ROOT / "pyproject.toml", "--rootdir", folder, "-p", "conftest", "-q"]
    paths = [str(ROOT), str(ROOT / "tests"), *filter(None, sys.path)]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-p", "no:cacheprovider", folder],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,  # most of it imports torch, which takes long on a busy machine
        preexec_fn=preexec_fn,
    )


HOSTILE = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "MASTER_ADDR": "elsewhere",
    "PET_NNODES": "2",
    "HF_HOME": "/nonexistent",
    "http_proxy": "http://127.0.0.1:9",
    "NO_COLOR": "1",
    "CONFIG_FILE": "none.toml",
    "OMP_NUM_THREADS": "3",
    "PYTHONWARNINGS": "error",
    "LC_ALL": "C",
    "HOME": "/dev/null",
}
SURROUNDINGS = """
import os, signal, subprocess, tempfile
import hermetic

CACHES = ["MPLCONFIGDIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH"]

def test_surroundings():
    expected = dict(os.environ)
    assert set(expected) - hermetic.KEPT == {
        name for name in expected if name.startswith(("PYTEST_", *hermetic.KEPT_PREFIXES))
    } | {*hermetic.FIXED, "HOME", "PYTHONUSERBASE", *CACHES} & {*expected}
    assert expected["OMP_NUM_THREADS"] == "1"
    assert os.listdir(expected["HOME"]) == os.listdir() == []
    assert tempfile.gettempdir() == expected["TMPDIR"]
    assert " " not in expected["TMPDIR"]
    assert os.umask(0o022) == 0o022
    of_child = subprocess.check_output(["grep", "-E", "^Sig(Blk|Ign)", "/proc/self/status"], text=True)
    assert [int(line.split()[1], 16) for line in of_child.splitlines()] == [0, 0]

def test_that_the_session_goes_on():
    for number in (signal.SIGHUP, signal.SIGINT):
        os.kill(os.getpid(), number)
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux's /proc")
def test_surroundings_are_the_same_whatever_the_user_has_set(tmp_path):
    def detached():
        os.umask(0o077)
        for number in (signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    temporary = tmp_path / "a folder"
    temporary.mkdir()
    done = run_tests(tmp_path, SURROUNDINGS, preexec_fn=detached, TMPDIR=str(temporary), **HOSTILE)
    assert (done.returncode, "2 passed" in done.stdout) == (0, True), done.stdout


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


# The end after limit and patience is put off until the test is stuck.
STUCK = """
import faulthandler
import conftest
import pytest

asked = []
dump_later = faulthandler.dump_traceback_later
faulthandler.dump_traceback_later = lambda *seconds, **options: asked.append((seconds, options))

@pytest.mark.timeout(400)
def test_in_a_library():
    [(seconds, options)] = asked
    assert seconds == (400 + conftest.PATIENCE,)
    dump_later(1, **options)
    sum(range(10**12))  # in C, which looks for no signal
"""


@pytest.mark.slow
def test_a_test_that_never_returns_to_python_ends_the_session_with_its_stack(tmp_path):
    done = run_tests(tmp_path, STUCK)
    assert done.returncode == 1
    assert re.search(
        r"Timeout \(0:00:01\)!\n.*\n  File .*test_inner.py\", line \d+ in test_in_a_library",
        done.stdout,
    )


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
