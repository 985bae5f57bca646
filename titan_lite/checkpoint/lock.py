"""Lock the folder of a run, or of its steps, so that no other run writes there.

    lock = FolderLock(folder, 'checkpoint.folder = "checkpoint"', instead="another folder")
    lock.acquire()               # raises ConfigError if another run has it
    lock.is_held()               # False once the lock file is gone or replaced

The operating system frees the lock when the process ends, however it ends.
"""

import errno
import os
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock, Timeout

from titan_lite.config import ConfigError
from titan_lite.logging import logger

NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # of a file system without locks


class Inode(NamedTuple):
    """A file, whatever its path is. Its number stays in use while a process has it open."""

    device: int
    inode: int


class FolderLock:
    """The file `lock` of a folder, which one process holds until it ends.

    key: the beginning of errors. instead: what to use in place of a folder that cannot be written.
    """

    def __init__(self, folder: Path, key: str, instead: str):
        self.folder = folder
        self.key = key
        self.instead = instead
        self.path = folder / "lock"
        self.file_lock: FileLock | None = None  # of this process, once it has the lock
        self.locked_file: Inode | None = None

    def acquire(self) -> bool:
        """Acquire the lock, if this process does not have it; return False if the file system has
        no locks.

        Raises ConfigError if another run has it.
        """
        if self.locked_file is not None:
            return True
        file_lock = FileLock(self.path, blocking=False, fallback_to_soft=False)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file_lock.acquire()
        except Timeout:
            raise ConfigError(
                f"{self.key}: {self.folder} is in use by another run; end that run, or use another"
                " job.dump_folder"
            ) from None
        except OSError as error:
            if error.errno in NO_LOCKS:
                self.path.touch()  # by which the folder is known as one of a run
                logger.warning(
                    f"{self.folder} has no locks ({error.strerror}): a second run that writes there"
                    " is not detected"
                )
                return False
            raise ConfigError(
                f"{self.key}: {error.filename or self.folder}: {error.strerror}; use {self.instead}"
            ) from None
        self.file_lock = file_lock
        self.locked_file = self._inode()
        return True

    def is_held(self) -> bool:
        """Return False if the lock file of this process is gone or replaced; True also if this
        process has no lock.
        """
        return self.locked_file is None or self._inode() == self.locked_file

    def _inode(self) -> Inode | None:
        """Return the file that is at the path now."""
        try:
            status = os.stat(self.path)
        except OSError:
            return None
        return Inode(status.st_dev, status.st_ino)
