"""Lock a checkpoint folder, so that only one run writes there, and detect that the folder was removed.

lock = FolderLock(folder, 'checkpoint.folder = "checkpoint"')
lock.take()                  # raises ConfigError if another run has it
lock.is_held()               # False once the lock file is gone or replaced
"""

import errno
import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import IO

from titan_lite.config import ConfigError
from titan_lite.logging import logger
from titan_lite.manifest import is_open


class FolderLock:
    """The file `lock` of a folder, which one process holds until it ends. key: the beginning of errors."""

    def __init__(self, folder: Path, key: str):
        self.folder, self.key, self.path = folder, key, folder / "lock"
        self.file: IO[str] | None = None  # open if this process has the lock
        self.watched = True  # False on a file system without stable file numbers

    def take(self, tries: int = 3) -> bool:
        """Take the lock; return False if the file system has no locks. Raises ConfigError if another run has it."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = self.path.open("a+", encoding="utf-8")
        except OSError as error:
            fix = "use a job.dump_folder or checkpoint.folder that can be written, or checkpoint.enable = false"
            raise ConfigError(f"{self.key}: {error.filename}: {error.strerror}; {fix}") from None
        try:
            # A POSIX lock: a BSD lock would be inherited by loader processes, and held after this process was killed.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                logger.warning(
                    f"{self.folder} has no locks ({error.strerror}): a second run that writes there is not detected"
                )
                self.file = file
                return False
            file.seek(0)
            holder = file.read().strip() or "another process"
            fix = "end that run, or use another job.dump_folder"
            raise ConfigError(f"{self.key}: {self.folder} is in use by {holder}; {fix}") from None
        self.watched = is_open(file, self.path)
        if not self.watched and tries > 1:  # removed since it was opened
            return self.take(tries - 1)
        with suppress(
            OSError
        ):  # on a full disk the lock has no description, but still refuses a second run
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
        self.file = file
        return True

    def is_held(self) -> bool:
        """Return False if the lock file of this process is gone or replaced; True also if this process has no lock."""
        return self.file is None or not self.watched or is_open(self.file, self.path)
