"""One run writes to a folder, and notices where it is removed: taken again, or left to the run that has it since."""

import fcntl
import shutil
import subprocess
import sys
from contextlib import contextmanager

import pytest

from titan_lite.checkpoint import lock as module
from titan_lite.checkpoint.lock import FolderLock
from titan_lite.config import ConfigError

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


def test_as_long_as_nothing_happens_nothing_is_done(lock):
    file = lock.file
    assert not lock.hold()
    assert lock.file is file
    with another(lock.folder) as how:
        assert how == "refused"


@pytest.mark.parametrize("gone", ["lock", "checkpoint", "out"])
def test_what_was_removed_is_made_and_taken_again(gone, lock, tmp_path):
    path = next(path for path in (lock.path, *lock.path.parents) if path.name == gone)
    path.unlink() if path.is_file() else shutil.rmtree(path)
    assert not lock.is_held()
    assert lock.hold()
    assert lock.is_held()
    assert not lock.hold()
    with another(lock.folder) as how:
        assert how == "refused"


def test_a_folder_that_another_run_has_taken_is_left_to_it(lock, tmp_path):
    shutil.rmtree(tmp_path / "out")
    with another(lock.folder) as how:
        assert how == "taken"
        for _ in range(2):  # also when it is asked again
            with pytest.raises(ConfigError) as refused:
                lock.hold()
            assert not lock.is_held()
    assert str(refused.value) == (
        f'checkpoint.folder = "checkpoint": {lock.folder} was removed while this run wrote to it, and now belongs to process '
        "7 on x; this run ends and writes nothing more; use another job.dump_folder to start again"
    )
    with pytest.raises(ConfigError):
        lock.hold()  # whose run has ended, but has left its steps
    assert lock.path.read_text() == "process 7 on x"


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
    assert not lock.hold()
    assert not lock.folder.exists()


def test_on_a_file_system_that_numbers_one_file_twice_nothing_is_taken_for_removed(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(module, "is_open", lambda file, path: False)
    lock = FolderLock(tmp_path, "key")
    assert lock.take()
    assert lock.is_held()
    assert not lock.hold()
