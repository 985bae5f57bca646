"""One run writes to a folder: the second is refused, and a killed one leaves the lock free."""

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from titan_lite.checkpoint import lock as module
from titan_lite.checkpoint.lock import FolderLock, SaveLock
from titan_lite.config import ConfigError

ANOTHER = """
import os, sys, time
from pathlib import Path
from titan_lite.checkpoint.lock import FolderLock

lock = FolderLock(Path(sys.argv[1]), "key", "another")
lock.acquire()
if os.fork() == 0:  # a worker, as of a data loader
    print("taken", flush=True)
time.sleep(600)
"""


@contextmanager
def another_run(folder):
    """Return a context with another process, which has the lock, and which has forked a worker."""
    command = [sys.executable, "-c", ANOTHER, folder]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0) as process:
        assert process.stdout.readline() == "taken\n"
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def is_free(folder):
    with (folder / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_the_second_run_in_a_folder_is_refused_in_one_line(tmp_path):
    lock = FolderLock(tmp_path, 'checkpoint.folder = "checkpoint"', "another folder")
    with another_run(tmp_path), pytest.raises(ConfigError) as refused:
        lock.acquire()
    assert (
        str(refused.value)
        == f'checkpoint.folder = "checkpoint": {tmp_path} is in use by another run; end that run,'
        " or use another job.dump_folder"
    )


def test_a_killed_run_leaves_the_lock_free_although_a_worker_of_it_lives(tmp_path):
    with another_run(tmp_path) as process:
        process.kill()
        process.wait()
        assert FolderLock(tmp_path, "key", "another folder").acquire()


@pytest.mark.parametrize("gone", ["lock", "checkpoint", "out"])
def test_a_removed_folder_is_noticed_and_nothing_is_made_there(gone, tmp_path):
    lock = FolderLock(tmp_path / "out/checkpoint", "key", "another folder")
    assert lock.acquire()
    assert lock.is_held()
    assert not is_free(lock.folder)
    path = next(path for path in (lock.path, *lock.path.parents) if path.name == gone)
    path.unlink() if path.is_file() else shutil.rmtree(path)
    assert not lock.is_held()
    lock.folder.mkdir(parents=True, exist_ok=True)
    lock.path.touch()  # of another run
    assert not lock.is_held()


def test_a_run_that_has_not_taken_the_lock_makes_nothing(tmp_path):
    lock = FolderLock(tmp_path / "nowhere", "key", "another folder")
    assert lock.is_held()
    assert not lock.folder.exists()


def test_a_file_system_without_locks_is_said_and_the_run_goes_on(tmp_path, monkeypatch, caplog):
    def no_locks(*arguments):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    lock = FolderLock(tmp_path, "key", "another folder")
    assert not lock.acquire()
    assert lock.path.is_file()
    assert lock.is_held()


def shared(folder):
    return FolderLock(folder, "key", "another folder")


def test_groups_of_one_run_share_the_lock_and_know_which_came_first(tmp_path):
    first, second = shared(tmp_path), shared(tmp_path)
    assert first.acquire(run="http://node0:29510")
    assert second.acquire(run="http://node0:29510")
    assert first.is_alone
    assert not second.is_alone
    assert first.is_held()
    assert second.is_held()
    assert not is_free(tmp_path)


def test_groups_know_by_a_name_in_the_lock_whether_they_see_the_same_folder(tmp_path):
    """The same path may be on two disks."""
    locks = [shared(tmp_path / disk / "run") for disk in ("one", "one", "another")]
    for lock in locks:
        assert lock.acquire(run="http://node0:29510")
    first, second, another = (lock.shared_name for lock in locks)
    assert first == second != another
    assert first.startswith("http://node0:29510 ")


def test_a_folder_that_is_not_there_has_no_group_that_saves(tmp_path):
    lock = SaveLock(tmp_path / "none")
    lock.acquire()
    assert not lock.is_held_by_another()
    lock.release()


@pytest.mark.parametrize("run", ["", "http://node1:29510", "http://node0:2951"])
def test_another_run_is_refused_beside_groups(tmp_path, monkeypatch, run):
    monkeypatch.setattr(module, "SECONDS_TO_SHARE", 0.2)
    assert shared(tmp_path).acquire(run="http://node0:29510")
    with pytest.raises(ConfigError, match="is in use by another run"):
        shared(tmp_path).acquire(run=run)


def test_groups_are_refused_beside_another_run(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SECONDS_TO_SHARE", 0.2)
    with another_run(tmp_path), pytest.raises(ConfigError, match="is in use by another run"):
        shared(tmp_path).acquire(run="http://node0:29510")
