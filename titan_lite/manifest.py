"""Write files that are complete or absent, and read files so that an error names the file.

    publish(unfinished, folder)                     # rename what was filled under another name
    replace_text(folder / "experts.json", text)     # both, for a text
    content = read_json(folder / "state.json")      # raises CorruptFileError
    with fields_of("state.json"):                   # so do a missing key and one of a wrong type
        step = validated(NonNegativeInt, content, "step")

A manifest has size and SHA-256 of each file in the folder of a checkpoint's step, and is written
last:

    write(folder, step=50, files={"__0_0.distcp": digest(folder / "__0_0.distcp"), ...})
    files = check_step(folder, step=50)     # names and sizes; raises CorruptFileError
    check_bytes(folder, files)              # every byte; raises CorruptFileError
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypedDict, TypeVar

from pydantic import NonNegativeInt, TypeAdapter, ValidationError

from titan_lite import progress
from titan_lite.config.errors import ConfigError, MachineError, is_of_machine, shown
from titan_lite.text import error_line

NAME = "manifest.json"
BLOCK_BYTES = 4 * 2**20  # read at once to hash a file
MAX_WHOLE = 2**20  # bytes of a file of which `sampled_sha256` reads every one
SAMPLES = 16  # of a larger file, the first bytes and the last ones included
SAMPLE_BYTES = 2**14


T = TypeVar("T")


class FileDigest(TypedDict):
    """The entry of a file in a manifest."""

    size: int  # bytes
    sha256: str


class CorruptFileError(ConfigError):
    """An error: a file or step is not as it was saved. The message begins with the file's name."""


def is_inside(name: object) -> bool:
    """Return True for the name of a file that stays in the folder that it is joined to."""
    if not isinstance(name, str) or not name:
        return False
    return not Path(name).is_absolute() and ".." not in Path(name).parts


# Reading JSON


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that has an object. Raises CorruptFileError and MachineError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CorruptFileError(f"{path.name} is missing") from None
    except OSError as error:
        raise _unreadable(path, error) from None
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"{path.name} is not JSON: {error_line(error)}") from None
    if not isinstance(content, dict):
        raise CorruptFileError(f"{path.name} is not a JSON object")
    return content


@contextmanager
def fields_of(name: str) -> Iterator[None]:
    """Return a context that reads values of a file: one that is missing or of a wrong type raises
    CorruptFileError. name: the file's.
    """
    try:
        yield
    except ConfigError:
        raise
    except KeyError as error:
        raise CorruptFileError(f"{name} has no {error}") from None
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        raise CorruptFileError(f"{name} is not as it was written: {error_line(error)}") from None


def validated(kind: type[T], content: Any, key: str = "") -> T:  # noqa: ANN401 values of JSON
    """Return what was read from a JSON file, or the entry of this key, as a type, such as
    list[NonNegativeInt].

    Raises KeyError without the entry, and ValueError for the first value that is missing in it or
    not of its type and bounds.
    """
    place = [key] if key else []
    try:
        return TypeAdapter(kind).validate_json(
            json.dumps(content[key] if key else content), strict=True
        )
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, [*place, *first["loc"]])) or "it"
        value = "" if first["type"] == "missing" else f" = {shown(first['input'])}"
        words = first["msg"][:1].lower() + first["msg"][1:]
        raise ValueError(f"{where}{value}: {words}") from None


@dataclass
class _Digest:
    size: NonNegativeInt
    sha256: str


def digests_in(content: Mapping[str, Any]) -> dict[str, FileDigest]:
    """Return the entries of "files" that were read from a JSON file, by name. Raises KeyError
    without them, and ValueError for one that is not as it was written, or leads out of the folder.
    """
    entries = validated(dict[str, _Digest], content, "files")
    for name in entries:
        if not is_inside(name):
            raise ValueError(f"names the file {name}, outside of the folder")
    return {name: {"sha256": each.sha256, "size": each.size} for name, each in entries.items()}


# Writing


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(unfinished: Path, path: Path) -> None:
    """Rename a file, or a folder whose files are synced: if the machine stops, all of it exists or
    nothing.
    """
    sync(unfinished)
    unfinished.rename(path)
    sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a file, and wait until it is on disk."""
    path.write_text(text, encoding="utf-8")
    sync(path)


def replace_text(path: Path, text: str, *, durable: bool = False) -> None:
    """Write a file that others see complete, or as it was before. Raises OSError.

    durable: also if the machine stops, for which this waits for the disk.
    """
    unfinished = path.with_name(f"unfinished-{path.name}")
    if durable:
        write_text(unfinished, text)
        publish(unfinished, path)
    else:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)


# Manifests


def digest(path: Path) -> FileDigest:
    """Return size and SHA-256 of a file. Raises OSError."""
    sha256 = hashlib.sha256()
    size = 0
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            sha256.update(block)
            size += len(block)
            progress.beat()
    return {"sha256": sha256.hexdigest(), "size": size}


def sampled_sha256(file: BinaryIO) -> str:
    """Return a SHA-256 of a file's content: of all bytes of a small file, and of samples of a large
    one, at equal distances. It takes a few milliseconds for any size. Raises OSError.
    """
    sha256 = hashlib.sha256()
    size = file.seek(0, os.SEEK_END)
    if size <= MAX_WHOLE:
        file.seek(0)
        sha256.update(file.read(size))
    else:
        for sample in range(SAMPLES):
            file.seek(sample * (size - SAMPLE_BYTES) // (SAMPLES - 1))
            sha256.update(file.read(SAMPLE_BYTES))
    return sha256.hexdigest()


def sampled_digest(paths: Iterable[Path]) -> str:
    """Return a hash of the files' names, sizes and contents, as `sampled_sha256` reads them.

    Raises OSError.
    """
    sha256 = hashlib.sha256()
    for path in sorted(paths):
        with path.open("rb") as file:
            content = sampled_sha256(file)
        sha256.update(f"{path.name} {path.stat().st_size} {content}\n".encode())
    return sha256.hexdigest()


def write(folder: Path, step: int, files: Mapping[str, FileDigest]) -> None:
    """Write the manifest of a step."""
    content = {"step": step, "files": dict(sorted(files.items()))}
    write_text(folder / NAME, json.dumps(content, indent=1))  # no JSON without its last byte


def read(folder: Path, step: int | None) -> dict[str, FileDigest]:
    """Return the files of a step by name. step: None for any. Raises CorruptFileError."""
    content = read_json(folder / NAME)
    with fields_of(NAME):
        files = digests_in(content)
        saved_step = validated(NonNegativeInt, content, "step")
    if step not in (None, saved_step):
        raise CorruptFileError(f"{NAME} is of step {saved_step}")
    return files


def check_step(folder: Path, step: int | None) -> dict[str, FileDigest]:
    """Check that the files are there, with their sizes, and return them as `read` does.

    Raises CorruptFileError.
    """
    files = read(folder, step)
    check_sizes(folder, files)
    return files


def check_sizes(folder: Path, files: Mapping[str, FileDigest]) -> None:
    """Raise CorruptFileError for the first file that is missing or has another size."""
    for name, expected in files.items():
        with _reading(folder / name, name):
            size = (folder / name).stat().st_size
        if size != expected["size"]:
            raise CorruptFileError(f"{name} has {size:,} bytes of {expected['size']:,}")


def check_bytes(folder: Path, files: Mapping[str, FileDigest]) -> None:
    """Raise CorruptFileError for the first file whose bytes are not those written."""
    for name, expected in files.items():
        with _reading(folder / name, name):
            present = digest(folder / name)
        if present != expected:
            raise CorruptFileError(f"{name} was altered: its SHA-256 is not the one in {NAME}")


@contextmanager
def _reading(path: Path, name: str) -> Iterator[None]:
    """Return a context that reads a file: an OSError becomes a CorruptFileError, or a MachineError.

    name: the file's in the folder.
    """
    try:
        yield
    except FileNotFoundError:
        raise CorruptFileError(f"{name} is missing") from None
    except OSError as error:
        raise _unreadable(path, error, name) from None


def _unreadable(path: Path, error: OSError, name: str = "") -> CorruptFileError | MachineError:
    """Return the error for a file that is there and cannot be read. A disk or a network that fails
    does not make it another file. name: if not that of the path.
    """
    if is_of_machine(error):
        return MachineError(
            f"{path} cannot be read: {error.strerror}; start again when its disk or file system can"
            " be read, or move away what is damaged"
        )
    return CorruptFileError(f"{name or path.name}: {error.strerror}")
