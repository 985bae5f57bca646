"""One run writes to a folder, and notices where it is removed."""

import fcntl
import shutil
import subprocess
import sys
from contextlib import contextmanager

import pytest

from titan_lite.checkpoint import lock as module
from titan_lite.checkpoint.lock import FolderLock

ANOTHER = (
    "import fcntl, os, sys; os.makedirs(sys.argv[1], exist_ok=True); f = open(sys.argv[1] + '/lock', 'a+')\n"
    "try: fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
    "except OSError: print('refused', flush=True); sys.exit()\n"
    "f.write('process 7 on x'); f.flush(); print('taken', flush=True); input()"
)


@contextmanager
def another(folder):
    """Within: another process that tries to take the folder; how that went."""
    with subprocess.Popen(
        [sys.executable, "-c", ANOTHER, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process.stdout.readline().strip()
        process.kill()


@pytest.fixture
def lock(tmp_path):
    lock = FolderLock(tmp_path / "out/checkpoint", 'checkpoint.folder = "checkpoint"')
    assert lock.take()
    return lock


def test_a_second_process_is_refused_until_the_lock_is_removed(lock, tmp_path):
    with another(lock.folder) as how:
        assert how == "refused"
    assert lock.is_held()
    shutil.rmtree(tmp_path / "out")
    assert not lock.is_held()
    with another(lock.folder) as how:
        assert how == "taken"
        assert not lock.is_held()


def test_a_lock_that_is_removed_while_it_is_taken_is_taken_again(tmp_path, monkeypatch):
    lock, times = FolderLock(tmp_path, "key"), []

    def removed_meanwhile(file, how):
        times.append(file)
        if len(times) == 1:
            lock.path.unlink()
        fcntl.lockf(file, how)

    monkeypatch.setattr(
        module,
        "fcntl",
        type("Fcntl", (), {**vars(fcntl), "lockf": staticmethod(removed_meanwhile)}),
    )
    assert lock.take()
    assert len(times) == 2
    assert lock.is_held()


def test_who_has_not_taken_it_has_nothing_to_lose(tmp_path):
    lock = FolderLock(tmp_path / "nowhere", "key")
    assert lock.is_held()
    assert not lock.folder.exists()


def test_on_a_file_system_that_numbers_one_file_twice_nothing_is_taken_for_removed(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(module, "is_open", lambda file, path: False)
    lock = FolderLock(tmp_path, "key")
    assert lock.take()
    assert lock.is_held()
