"""Hash the contents of files: small files completely, large ones in samples.

    contents = contents_of(["corpus/a.jsonl", "s3://corpus/b.parquet"], "corpus")
    contents["corpus/a.jsonl"].sha256            # the same for every copy of the file

While the stamp of a file (size, times, inode) stays the same, its hash is remembered: in the
process, and where hashing takes long in a file for each corpus and host, below $XDG_CACHE_HOME or
~/.cache. One process of a host hashes then, and the others wait for it, but not for ever.
"""

import hashlib
import json
import os
import platform
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from filelock import FileLock, Timeout

from titan_lite.config import ConfigError
from titan_lite.config.errors import MachineError, error_because_of
from titan_lite.data.readers import (
    DAMAGED_AT_URL,
    file_system,
    info_at_url,
    is_url,
    open_at_url,
)
from titan_lite.data.servers import retried, serves_no_ranges, why_not_at_url
from titan_lite.environment import cache_folder
from titan_lite.logging import logger
from titan_lite.manifest import MAX_WHOLE, sampled_sha256
from titan_lite.text import without_secrets

HASH_DIGITS = 16  # of a SHA-256 that are kept: steps have those of all files
COST_OF_FILE = 2**14  # bytes that are hashed in the time in which a file is opened
REMEMBER_FROM = 2**27  # bytes to hash, which take less than a second; more are remembered on disk
THREADS_FROM = 1000  # files
THREADS = 8  # since a shared file system has a latency
# what a server sends with a file, and sends differently with another content
HTTP_STAMPS = ("ETag", "Content-MD5", "Digest", "Last-Modified")
UNKNOWN = "unknown"  # ends the stamp of a file whose server sends none of them
MAX_WAIT = 300  # seconds for the process that hashes, which may be stopped


class Content(NamedTuple):
    """The content of a file."""

    stamp: str  # of the file system; while it is the same, so is the content
    size: int  # bytes
    sha256: str  # its first HASH_DIGITS


_of_process: dict[str, Content] = {}  # by path
_reported: set[str] = set()  # corpora whose server sends no stamps


def contents_of(files: Iterable[str], corpus: str) -> dict[str, Content]:
    """Return the contents of files, by path or URL.

    corpus: the path that they were found at; their hashes are remembered together. Raises
    ConfigError.
    """
    stamps = {file: stamp_of(file) for file in files}
    unknown = [file for file in stamps if not _is_known(_of_process, file, stamps[file])]
    cost = sum(COST_OF_FILE + min(_size_in(stamps[file]), MAX_WHOLE) for file in unknown)
    lock = None
    if cost >= REMEMBER_FROM:
        path = _path_of_remembered(corpus)
        lock = _acquire_lock(path, corpus)
    if lock is None:
        _of_process.update(_hash_all(unknown, stamps))
        return {file: _of_process[file] for file in stamps}
    with lock:
        on_disk = read_remembered(path, corpus)
        masked = {file: without_secrets(file) for file in stamps}
        known = {
            file: on_disk[masked[file]]
            for file in unknown
            if _is_known(on_disk, masked[file], stamps[file])
        }
        rest = [file for file in unknown if file not in known]
        if rest:
            logger.info(
                f"{len(rest):,} files at {corpus} are new or were touched; their contents are"
                " hashed, to know them again"
            )
        _of_process.update(known | _hash_all(rest, stamps))
        contents = {file: _of_process[file] for file in stamps}
        to_remember = {masked[file]: content for file, content in contents.items()}
        if to_remember != on_disk:
            write_remembered(path, to_remember, corpus)
    return contents


class UnchangedFiles:
    """Files whose content must stay the same while they are read, again and again."""

    def __init__(self, files: Iterable[str], corpus: str):
        """corpus: as in `contents_of`. Raises ConfigError."""
        self.contents = contents_of(dict.fromkeys(files), corpus)
        unknown = [file for file, each in self.contents.items() if each.stamp.endswith(UNKNOWN)]
        if unknown and corpus not in _reported:
            _reported.add(corpus)
            logger.info(
                f"{corpus}: the server says neither by ETag nor by Last-Modified whether"
                f" {len(unknown):,} of {len(self.contents):,} files have changed: samples of a file"
                " are hashed each time that it is opened"
            )

    def check(self, *files: str) -> None:
        """Raise ConfigError if the content of a file has changed since it was first read.

        files: those to check; none: all. A file is hashed only if its stamp has changed, or if its
        server sends none.
        """
        for file in files or self.contents:
            before = self.contents[file]
            stamp = stamp_of(file)
            if stamp == before.stamp and not stamp.endswith(UNKNOWN):
                continue
            now = Content(stamp, _size_in(stamp), hash_of(file))
            if (now.size, now.sha256) != (before.size, before.sha256):
                size = f"{before.size:,} bytes"
                if now.size != before.size:
                    size = f"{now.size:,} bytes, and had {before.size:,}"
                raise ConfigError(
                    f"{file} was changed while the run reads it ({size}): use the file as it was"
                    " to go on from the newest step, or start with checkpoint.restart_data = true"
                )
            self.contents[file] = now


def stamp_of(file: str) -> str:
    """Return the size of a file in bytes, and its times: another stamp means that the file may have
    been written. Behind http it has what the server sends, or ends in UNKNOWN.

    Raises ConfigError and MachineError.

    The time of the last change is in it, which copying does not keep and no tool can set.
    """
    if is_url(file):
        return _stamp_at_url(file)
    try:
        status = os.stat(file)
    except (OSError, ValueError) as error:
        raise error_because_of(error, f"{file} cannot be read: {error}") from error
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}"


def _stamp_at_url(url: str) -> str:
    def ask() -> str:
        fs, path = file_system(url)
        info = info_at_url(fs, path)
        if "http" not in fs.protocol:
            return f"{info['size']} {fs.ukey(path)}"
        # fsspec takes files behind http as files that never change
        stamps = [str(info[name]) for name in HTTP_STAMPS if info.get(name)]
        return f"{info['size']} {' '.join(stamps) or UNKNOWN}"

    try:
        return retried(ask, url)
    except MachineError:
        raise
    except Exception as error:  # each library has errors of its own
        raise ConfigError(f"{url} cannot be read: {why_not_at_url(error)}") from error


def _size_in(stamp: str) -> int:
    return int(stamp.partition(" ")[0])


def _is_known(contents: Mapping[str, Content], file: str, stamp: str) -> bool:
    if file not in contents or stamp.endswith(UNKNOWN):
        return False
    return contents[file].stamp == stamp


def _hash_all(files: list[str], stamps: Mapping[str, str]) -> dict[str, Content]:
    if len(files) < THREADS_FROM:
        hashes = [hash_of(file) for file in files]
    else:
        with ThreadPoolExecutor(THREADS) as threads:
            hashes = list(threads.map(hash_of, files))
    return {
        file: Content(stamps[file], _size_in(stamps[file]), sha256)
        for file, sha256 in zip(files, hashes, strict=True)
    }


def hash_of(file: str) -> str:
    """Return the hash of a file's content, or of its samples.

    Raises ConfigError and MachineError.
    """
    try:
        if not is_url(file):
            with open(file, "rb", buffering=0) as opened:
                return sampled_sha256(cast(BinaryIO, opened))[:HASH_DIGITS]
        with open_at_url(file) as opened:
            return sampled_sha256(cast(BinaryIO, opened))[:HASH_DIGITS]
    except (OSError, *DAMAGED_AT_URL) as error:
        fix = (
            "; use a server that serves ranges, or a copy on disk"
            if serves_no_ranges(error)
            else ""
        )
        raise error_because_of(error, f"{file} cannot be read: {error}{fix}") from error


# Contents that are remembered on disk


def _path_of_remembered(corpus: str) -> Path:
    """Return the file of this host with the contents of a corpus, relative if there is no home."""
    name = f"{platform.node()} {corpus if is_url(corpus) else os.path.abspath(corpus)}"
    return cache_folder() / f"{hashlib.sha256(os.fsencode(name)).hexdigest()[:16]}.json"


def _acquire_lock(path: Path, corpus: str) -> AbstractContextManager | None:
    """Return the lock of this file, held until its context ends; None if it cannot be had."""
    try:
        if not path.is_absolute():
            raise OSError("this user has no home folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        return FileLock(f"{path}.lock", fallback_to_soft=False).acquire(timeout=MAX_WAIT)
    except Timeout:
        logger.warning(
            f"another process of this host has hashed the files at {corpus} for more than"
            f" {MAX_WAIT} s, or is stopped: they are hashed here, too, and not remembered for the"
            f" next start ({path}.lock)"
        )
    except OSError as error:
        _say_not_remembered(corpus, error)
    return None


def read_remembered(path: Path, corpus: str) -> dict[str, Content]:
    """Return remembered contents; none if there are none, or no valid ones."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        return {
            file: Content(str(stamp), int(size), str(sha))
            for file, (stamp, size, sha) in entries.items()
        }
    except FileNotFoundError:
        return {}
    except OSError as error:
        _say_not_remembered(corpus, error)
        return {}
    except (ValueError, TypeError, AttributeError):
        return {}


def write_remembered(path: Path, contents: Mapping[str, Content], corpus: str) -> None:
    """Remember contents; without room or permission a line of the log says that they are not."""
    unfinished = path.with_suffix(".unfinished")
    try:
        unfinished.write_text(json.dumps(contents), encoding="utf-8")
        unfinished.rename(path)
    except OSError as error:
        _say_not_remembered(corpus, error)


def _say_not_remembered(corpus: str, error: OSError) -> None:
    logger.info(f"hashes of {corpus} are not remembered for the next start: {error}")
