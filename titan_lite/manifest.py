"""What makes a step on disk whole: a list of its files, each with size and SHA-256, which is written last.

write(folder, step=50, files={"__0_0.distcp": digest(folder / "__0_0.distcp"), ...})     # manifest.json
files = check_sizes(folder, step=50)        # raises Damaged: a file is missing, cut short or foreign; reads no data
check_bytes(folder, files)                  # raises Damaged: a file was altered; reads all
"""

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NAME = "manifest.json"


class Damaged(ValueError):
    """A step that is not what was saved; the message begins with the file's name."""


def digest(path: Path) -> dict[str, Any]:
    """Size in bytes and SHA-256 of a file."""
    sha256, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            sha256.update(block)
            size += len(block)
    return {"sha256": sha256.hexdigest(), "size": size}


def sync(path: Path) -> None:
    """A file's content, or a folder's list of names, is on disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    sync(path)


def write(folder: Path, step: int, files: Mapping[str, Mapping[str, Any]]) -> None:
    write_text(folder / NAME, _text(step, files))


def _text(step: int, files: Mapping[str, Mapping[str, Any]]) -> str:
    """The manifest, with a SHA-256 of its own, so that an altered one is told from an altered file."""
    body = json.dumps({"files": files, "step": step}, indent=1, sort_keys=True)
    return f'{body[:-2]},\n "sha256": "{hashlib.sha256(body.encode()).hexdigest()}"\n}}\n'


def read(folder: Path, step: int) -> dict[str, dict[str, Any]]:
    """{name: {"sha256", "size"}} of the files that belong to the step. Raises Damaged."""
    try:
        if not stat.S_ISREG((folder / NAME).lstat().st_mode):
            raise Damaged(f"{NAME} is no file")
        text = (folder / NAME).read_text(encoding="utf-8")
        found = json.loads(text)
        written, files = found["step"], found["files"]
    except OSError as error:
        raise Damaged(f"{NAME}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise error if isinstance(error, Damaged) else Damaged(f"{NAME} is no manifest: {error}") from None
    if not isinstance(files, dict) or any(Path(name).name != name for name in files):
        raise Damaged(f"{NAME} is no manifest: it lists no files of this folder")
    if text != _text(written, files):
        raise Damaged(f"{NAME} was altered: its SHA-256 is not the one in it")
    if written != step:
        raise Damaged(f"{NAME} is of step {written}")
    return files


def check_sizes(folder: Path, step: int) -> dict[str, dict[str, Any]]:
    """The files as in `read`, after a look at their names and sizes. Raises Damaged."""
    files = read(folder, step)
    try:
        foreign = sorted(set(os.listdir(folder)) - set(files) - {NAME})
        if foreign:
            raise Damaged(f"{foreign[0]} is foreign: {NAME} does not list it")
        for name, expected in files.items():
            try:
                found = (folder / name).lstat()
            except FileNotFoundError:
                raise Damaged(f"{name} is missing") from None
            if not stat.S_ISREG(found.st_mode):
                raise Damaged(f"{name} is no file")
            if found.st_size != expected["size"]:
                raise Damaged(f"{name} has {found.st_size:,} bytes of {expected['size']:,}")
    except OSError as error:
        raise Damaged(f"{error.filename}: {error.strerror}") from None
    return files


def check_bytes(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises Damaged for the first of the files that is not what was written, to the bit."""
    for name, expected in files.items():
        try:
            found = digest(folder / name)
        except OSError as error:
            raise Damaged(f"{name}: {error.strerror}") from None
        if found != expected:
            raise Damaged(f"{name} was altered: its SHA-256 is not the one in {NAME}")
