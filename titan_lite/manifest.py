"""Write files and folders that are complete or absent, and manifests: JSON with the size and
SHA-256 of each file of a folder.

publish(unfinished, folder)                                 # a folder that was filled under another name

write(folder, step=50, files={"__0_0.distcp": digest(folder / "__0_0.distcp"), ...})     # of a step, written last
files = check_step(folder, step=50)         # raises CorruptFileError: a file is missing, cut short or foreign; reads no data
check_bytes(folder, files)                  # raises CorruptFileError: a file was altered; reads all
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from titan_lite.outside import CorruptFileError, fields_of, read_object

NAME = "manifest.json"


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
    path.write_text(text, encoding="utf-8")
    sync(path)


def digest(path: Path, progress: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Return size in bytes and SHA-256 of a file. progress: called every 4 MiB. Raises OSError."""
    sha256 = hashlib.sha256()
    size = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            sha256.update(block)
            size += len(block)
            progress()
    return {"sha256": sha256.hexdigest(), "size": size}


def write(folder: Path, step: int, files: Mapping[str, Mapping[str, Any]]) -> None:
    content = {"step": step, "files": dict(sorted(files.items()))}
    write_text(folder / NAME, json.dumps(content, indent=1))  # no JSON without its last byte


def read(folder: Path, step: int | None) -> dict[str, dict[str, Any]]:
    """Return {name: {"sha256", "size"}} of the files of a step (None: of any step).

    Raises CorruptFileError.
    """
    content = read_object(folder / NAME)
    with fields_of(NAME):
        files = {
            name: {"sha256": entry["sha256"], "size": int(entry["size"])}
            for name, entry in content["files"].items()
        }
        saved = int(content["step"])
    if step not in (None, saved):
        raise CorruptFileError(f"{NAME} is of step {saved}")
    return files


def check_step(
    folder: Path, step: int | None, share: int = 0, shares: int = 1
) -> dict[str, dict[str, Any]]:
    """Check the names and sizes of all files in the folder, and return the files as in `read`.

    Raises CorruptFileError.

    share, shares: check only every `shares`-th file from number `share` on; the first share also
    has the names.
    """
    files = read(folder, step)
    try:
        foreign = [] if share else sorted(set(os.listdir(folder)) - set(files) - {NAME})
    except OSError as error:
        raise CorruptFileError(f"{error.filename}: {error.strerror}") from None
    if foreign:
        raise CorruptFileError(f"{foreign[0]} is foreign: {NAME} does not list it")
    check_sizes(folder, {name: files[name] for name in sorted(files)[share::shares]})
    return files


def check_sizes(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise CorruptFileError for the first file that is missing or has another size."""
    for name, expected in files.items():
        try:
            size = (folder / name).stat().st_size
        except FileNotFoundError:
            raise CorruptFileError(f"{name} is missing") from None
        except OSError as error:
            raise CorruptFileError(f"{name}: {error.strerror}") from None
        if size != expected["size"]:
            raise CorruptFileError(f"{name} has {size:,} bytes of {expected['size']:,}")


def check_bytes(
    folder: Path,
    files: Mapping[str, Mapping[str, Any]],
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Raise CorruptFileError for the first file whose bytes are not those written.

    progress: as in `digest`.
    """
    for name, expected in files.items():
        try:
            found = digest(folder / name, progress)
        except FileNotFoundError:
            raise CorruptFileError(f"{name} is missing") from None
        except OSError as error:
            raise CorruptFileError(f"{name}: {error.strerror}") from None
        if found != expected:
            raise CorruptFileError(f"{name} was altered: its SHA-256 is not the one in {NAME}")
