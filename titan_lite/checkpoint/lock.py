"""The lock of a checkpoint folder: one run writes there, and notices where the folder is removed under it.

lock = FolderLock(folder, 'checkpoint.folder = "checkpoint"')
lock.take()                  # ConfigError: another run has it
lock.is_held()               # False once the file is gone, or another one is in its place
if lock.hold(): ...          # it was gone, and has been taken again; ConfigError: another run has been there since
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


class FolderTaken(ConfigError):
    """The folder that a run writes to has become another run's; raised on all ranks."""

    everywhere = True


class FolderLock:
    """The file `lock` of a folder, which one process holds until it ends. key: begins errors."""

    def __init__(self, folder: Path, key: str):
        self.folder, self.key, self.path = folder, key, folder / "lock"
        self.file: IO[str] | None = None  # where this process has taken it
        self.watched = True  # False on a file system that gives one file several numbers

    def take(self, tries: int = 3) -> bool:
        """False where the file system has no locks. Raises ConfigError."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = self.path.open("a+", encoding="utf-8")
        except OSError as error:
            works = "name a job.dump_folder or checkpoint.folder that can be written, or set checkpoint.enable = false"
            raise ConfigError(f"{self.key}: {error.filename}: {error.strerror}; {works}") from None
        try:
            # POSIX's lock and not BSD's, which a data loader's process would inherit and hold after this one was killed.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                logger.warning(f"{self.folder} has no locks ({error.strerror}): a second run that writes there is not noticed")
                self.file = file
                return False
            file.seek(0)
            holder = file.read().strip() or "another process"
            works = "end that run, or name another job.dump_folder"
            raise ConfigError(f"{self.key}: {self.folder} is in use by {holder}; {works}") from None
        self.watched = is_open(file, self.path)
        if not self.watched and tries > 1:  # removed since it was opened
            return self.take(tries - 1)
        with suppress(OSError):  # on a full disk a second run is refused all the same, and told less of this one
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
        self.file = file
        return True

    def is_held(self) -> bool:
        """True also where this process has not taken it."""
        return self.file is None or not self.watched or is_open(self.file, self.path)

    def hold(self) -> bool:
        """Take it again where its file is gone; True where that was so. Raises ConfigError where another run has been there."""
        if self.is_held():
            return False
        gone = f"{self.folder} was removed while this run wrote to it"
        if os.path.lexists(self.path):
            with suppress(OSError):
                gone += f", and is by now that of {self.path.read_text(encoding='utf-8', errors='replace')[:200].strip()}"
            works = "name another job.dump_folder to start again"
            raise ConfigError(f"{self.key}: {gone}; this run ends, and leaves it alone; {works}")
        self.take()
        return True
