"""Lock the folder of a run, or of its steps, so that no other run writes there.

    lock = FolderLock(folder, 'checkpoint.folder = "checkpoint"', instead="another folder")
    lock.acquire()               # raises ConfigError if another run has it
    lock.acquire(run="http://node0:29510")       # shared by the groups of that run
    lock.shared_name             # the same in all of these, if they see the same file
    lock.is_held()               # False once the lock file is gone or replaced

The operating system frees a lock when the process ends, however it ends.
"""

import errno
import fcntl
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from titan_lite import manifest
from titan_lite.config import ConfigError
from titan_lite.config.errors import error_because_of
from titan_lite.logging import logger

NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # of a file system without locks
SECONDS_TO_SHARE = 5.0  # in which the first group of a run names the run in the file


class _LockedFile:
    """A file that this process may lock, and has open while it does.

    A process that it forks, such as a worker of a data loader, closes the file: else it would keep
    the lock of a process that has ended.
    """

    def __init__(self, path: Path):
        self.path = path
        self.file: int | None = None
        os.register_at_fork(after_in_child=self.release)

    def lock(self) -> None:
        """Raises BlockingIOError if another process has locked the file, and OSError."""
        file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            raise
        self.file = file

    def release(self) -> None:
        if self.file is not None:
            os.close(self.file)
            self.file = None


class FolderLock(_LockedFile):
    """The file `lock` of a folder, which one process holds until it ends, or one of each group of a
    run.

    key: the beginning of errors. instead: what to use in place of a folder that cannot be written.
    """

    def __init__(self, folder: Path, key: str, instead: str):
        super().__init__(folder / "lock")
        self.folder = folder
        self.key = key
        self.instead = instead
        self.is_alone = True  # no other group of the run had the lock
        self.shared_name = ""  # what the first group of the run has written into the file

    def acquire(self, run: str = "") -> bool:
        """Acquire the lock, if this process does not have it; return False if the file system has
        no locks.

        run: a name of the run, if other processes of it share the lock. Raises ConfigError if
        another run has it, and MachineError.
        """
        if self.file is not None:
            return True
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if run:
                self._share(run)
            else:
                self.lock()
        except BlockingIOError:
            raise ConfigError(
                f"{self.key}: {self.folder} is in use by another run; end that run, or use another"
                " job.dump_folder"
            ) from None
        except OSError as error:
            if error.errno in NO_LOCKS:
                logger.warning(
                    f"{self.folder} has no locks ({error.strerror}): a second run that writes there"
                    " is not detected"
                )
                return False
            raise error_because_of(
                error,
                f"{self.key}: {error.filename or self.folder}: {error.strerror}; use"
                f" {self.instead}",
            ) from None
        return True

    def _share(self, run: str) -> None:
        """Acquire the lock together with other groups of the run, whose name is in the file, and a
        random one beside it. Raises BlockingIOError and OSError.
        """
        own_name = f"{run} {uuid.uuid4().hex}"
        file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        deadline = time.monotonic() + SECONDS_TO_SHARE
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.is_alone = False
            else:
                self.is_alone = True
                self.shared_name = own_name
                os.ftruncate(file, 0)
                os.pwrite(file, own_name.encode(), 0)
                fcntl.flock(file, fcntl.LOCK_SH)
                break
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                self.shared_name = os.pread(file, 2 * len(own_name), 0).decode(errors="replace")
                if self.shared_name.rpartition(" ")[0] == run:
                    break
            if time.monotonic() > deadline:
                os.close(file)
                raise BlockingIOError
            time.sleep(0.1)
        self.file = file

    def is_held(self) -> bool:
        """Return False if the lock file of this process is gone or replaced; True also if this
        process has no lock.
        """
        if self.file is None:
            return True
        try:
            return os.path.samestat(os.fstat(self.file), os.stat(self.path))
        except OSError:
            return False


class StepHold(_LockedFile):
    """A step of another run that this one begins from, and which that run does not delete until
    this process ends or releases it. Several runs may hold a step; nothing is written.
    """

    def __init__(self, step: Path):
        super().__init__(step / manifest.NAME)

    def acquire(self) -> bool:
        """Return False if the step is not there, is being deleted, or cannot be locked."""
        try:
            file = os.open(self.path, os.O_RDONLY)
        except OSError:
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            return False
        self.file = file
        return True


@contextmanager
def not_held(step: Path) -> Iterator[bool]:
    """Return a context in which no run can begin to hold a step; False if one does.

    A file system without locks knows of none. Raises OSError.
    """
    file = os.open(step / manifest.NAME, os.O_RDWR)
    try:
        is_free = True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            is_free = error.errno in NO_LOCKS
        yield is_free
    finally:
        os.close(file)


class SaveLock(_LockedFile):
    """The file `saving` of a folder, which a replica group has locked while it writes a step
    there. So others know that it lives.

    A file that cannot be locked is as if nobody had locked it.
    """

    def __init__(self, folder: Path):
        super().__init__(folder / "saving")

    def acquire(self) -> None:
        """Lock the file, unless another group has."""
        if self.file is None:
            with suppress(OSError):
                self.lock()

    def is_held_by_another(self) -> bool:
        """Return True if another group is writing a step."""
        if self.file is not None or not self.path.exists():
            return False
        try:
            self.lock()
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.release()
        return False
