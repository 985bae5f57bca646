"""Find and end what a test that failed has left running: commands, their ranks, and those that lost
their parent.

    before = descendants()                  # of the session: daemons of a fixture, the forkserver
    end_descendants(before, item.nodeid)    # all others

Linux alone lists the children of a process; elsewhere nothing is found.
"""

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import hermetic


def descendants() -> set[int]:
    """Return the ids of all processes that this one has started, and they."""
    found: set[int] = set()
    parents = [os.getpid()]
    while parents:
        parent = parents.pop()
        with suppress(OSError):  # it has ended meanwhile
            for task in os.scandir(f"/proc/{parent}/task"):
                children = Path(task.path, "children").read_text().split()
                parents += map(int, children)
                found |= {int(child) for child in children}
    return found


def end_descendants(before: set[int], test: str) -> None:
    """Kill the descendants that are not in `before`, and processes of `test` without a parent.

    The session's own stay: multiprocessing's servers, and Inductor's workers.
    """
    kept = before | {
        resource_tracker._resource_tracker._pid,
        forkserver._forkserver._forkserver_pid,
    }
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:  # until all have ended, and none has just started another
        left = {
            pid for pid in descendants() | _orphans(test) if pid not in kept and _is_killed(pid)
        }
        if not left:
            return
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def runs(pid: int) -> bool:
    """Return True if the process has not ended. One that its parent has not waited for has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until_ended(processes: Iterable[int]) -> None:
    """Wait for the end of processes that have been killed: the kernel may take a moment."""
    deadline = time.monotonic() + 60
    while any(map(runs, processes)):
        assert time.monotonic() < deadline, "a process goes on"
        time.sleep(0.01)


def _orphans(test: str) -> set[int]:
    """Return processes that have the environment of `test` in this session."""
    marks = {f"HOME={hermetic.HOME}".encode(), f"PYTEST_CURRENT_TEST={test} (call)".encode()}
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else ()):
        with suppress(OSError):  # it has ended, or is another user's
            if marks <= set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")):
                found.add(int(pid))
    return found


def _is_killed(pid: int) -> bool:
    """Return True if the process runs, and serves this test alone."""
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
        return runs(pid) and b"torch/_inductor/compile_worker" not in words
    return False
