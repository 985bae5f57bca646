"""Files that are whole or absent, and manifests: JSON with a SHA-256 of its own that lists size and SHA-256 of a folder's files.

write_whole(folder / "progress.json", text)                 # one file
publish(unfinished, folder)                                 # a folder that was filled under another name
write_sealed(folder / NAME, {"files": {...}, ...})
content = read_sealed(folder / NAME)                        # raises Damaged: a bit of it is another

write(folder, step=50, files={"__0_0.distcp": digest(folder / "__0_0.distcp"), ...})     # of a step, written last
files = check_step(folder, step=50)         # raises Damaged: a file is missing, cut short or foreign; reads no data
check_bytes(folder, files)                  # raises Damaged: a file was altered; reads all
"""

import hashlib
import json
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

NAME = "manifest.json"


class Damaged(ValueError):
    """A file or step that is not what was saved; the message begins with the file's name."""


def sync(path: Path) -> None:
    """A file's content, or a folder's list of names, is on disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(unfinished: Path, path: Path) -> None:
    """Give a file, or a folder whose files are synced, its name: whenever the machine stops, all of it is there or nothing."""
    sync(unfinished)
    unfinished.rename(path)
    sync(path.parent)


def is_open(file: IO[Any], path: Path) -> bool:
    """True where the path still leads to the open file, which another process may have removed or replaced."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False


def write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    sync(path)


def write_whole(path: Path, text: str) -> None:
    """Write a file, or put it in the place of the one before; until then it is called NAME.new."""
    unfinished = path.with_name(f"{path.name}.new")
    unfinished.write_text(text, encoding="utf-8")
    publish(unfinished, path)


def digest(path: Path, beat: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Size in bytes and SHA-256 of a file. beat: called every 4 MiB."""
    sha256, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            sha256.update(block)
            size += len(block)
            beat()
    return {"sha256": sha256.hexdigest(), "size": size}


def sealed(content: Mapping[str, Any]) -> str:
    """JSON of an object that is not empty, with a SHA-256 of its own, so that an altered one is told from altered files."""
    body = json.dumps(content, indent=1)
    return f'{body[:-2]},\n "sha256": "{hashlib.sha256(body.encode()).hexdigest()}"\n}}\n'


def write_sealed(path: Path, content: Mapping[str, Any]) -> None:
    write_text(path, sealed(content))


def write(folder: Path, step: int, files: Mapping[str, Mapping[str, Any]]) -> None:
    write_sealed(folder / NAME, {"files": dict(sorted(files.items())), "step": step})


def _size(path: Path) -> int:
    """Bytes of a file, which a link is not. Raises Damaged."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        raise Damaged(f"{path.name} is missing") from None
    except OSError as error:
        raise Damaged(f"{path.name}: {error.strerror}") from None
    if not stat.S_ISREG(found.st_mode):
        raise Damaged(f"{path.name} is no file")
    return found.st_size


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises Damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Damaged(f"{path.name}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{path.name} is no JSON: {error}") from None
    if not isinstance(content, dict):
        raise Damaged(f"{path.name} is no JSON object")
    return content


def read_sealed(path: Path) -> dict[str, Any]:
    """The object that was given to `write_sealed`. Raises Damaged."""
    _size(path)
    content = read_json(path)
    if content.pop("sha256", None) is None or path.read_text(encoding="utf-8") != sealed(content):
        raise Damaged(f"{path.name} was altered: its SHA-256 is not the one in it")
    return content


def read(folder: Path, step: int | None) -> dict[str, dict[str, Any]]:
    """{name: {"sha256", "size"}} of the files that belong to the step (None: whichever it is). Raises Damaged."""
    content = read_sealed(folder / NAME)
    files = content.get("files")
    if not isinstance(files, dict) or not all(_is_entry(name, entry) for name, entry in files.items()):
        raise Damaged(f"{NAME} is no manifest: it lists no files of this folder")
    if content.get("step") != step and step is not None:
        raise Damaged(f"{NAME} is of step {content.get('step')}")
    return files


def _is_entry(name: str, entry: Any) -> bool:
    return Path(name).name == name and name.isprintable() and isinstance(entry, dict) and entry.keys() == {"sha256", "size"}


def check_step(folder: Path, step: int | None) -> dict[str, dict[str, Any]]:
    """The files as in `read`, after a look at names and sizes of all that is in the folder. Raises Damaged."""
    files = read(folder, step)
    try:
        foreign = sorted(set(os.listdir(folder)) - set(files) - {NAME})
    except OSError as error:
        raise Damaged(f"{error.filename}: {error.strerror}") from None
    if foreign:
        raise Damaged(f"{foreign[0]} is foreign: {NAME} does not list it")
    for name, expected in files.items():
        size = _size(folder / name)
        if size != expected["size"]:
            raise Damaged(f"{name} has {size:,} bytes of {expected['size']:,}")
    return files


def check_bytes(folder: Path, files: Mapping[str, Mapping[str, Any]], beat: Callable[[], None] = lambda: None) -> None:
    """Raises Damaged for the first of the files that is not what was written, to the bit. beat: as in `digest`."""
    for name, expected in files.items():
        try:
            found = digest(folder / name, beat)
        except OSError as error:
            raise Damaged(f"{name}: {error.strerror}") from None
        if found != expected:
            raise Damaged(f"{name} was altered: its SHA-256 is not the one in {NAME}")
