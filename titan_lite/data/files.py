"""Cut local files into pieces that can be read independently, and read their documents.

    files = local_files(data)
    for piece in cut_into_pieces(files):               # 1 MiB of a jsonl file, a row group, a file
        for position, raw in read_piece(piece, data):  # a line, table row or byte offset in a file
            text = text_of(raw, piece, position, data)          # or a BadDocument

A raw document is not parsed, so that a reader of one document in eight parses one in eight. Reading
does not raise: if a file cannot be read from some position on, the last document is there, and its
raw form is a ValueError with the reason.

Files are on disk or at a URL of fsspec, such as s3://corpus/*.jsonl.gz.
"""

import itertools
import json
import os
import posixpath
import stat
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from glob import glob, has_magic
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from titan_lite.config import ConfigError, Data
from titan_lite.config.errors import MachineError, error_because_of, is_of_machine
from titan_lite.data.bad_documents import EMPTY, BadDocument
from titan_lite.data.outputs import refuse_folder_of_run, without_outputs
from titan_lite.data.readers import (
    BLOCK,
    CONVERT,
    HTTP,
    NoText,
    TooLarge,
    file_system,
    info_at_url,
    is_url,
    lines,
    lines_between,
    list_names,
    open_file,
    without_query,
)
from titan_lite.data.servers import (
    RefusedError,
    may_pass,
    retried,
    serves_no_ranges,
    why_not_at_url,
)
from titan_lite.logging import logger
from titan_lite.text import error_line, without_secrets

TEXT_FORMATS = (".txt", ".jsonl", ".json")
COMPRESSIONS = (".gz", ".zst")  # parquet is compressed inside
PIECE = 2**20  # bytes of a jsonl file in a piece: few enough to skip, enough for a seek to pay
MAX_PIECES = 100_000  # of jsonl files; pieces of a larger corpus are larger, to keep the list short
TEXT_PER_COMPRESSED_BYTE = 4  # about
# what reading a damaged file raises
DAMAGED = (OSError, EOFError, ValueError, zlib.error)
# of these, what an undamaged file raises, too
UNREACHABLE = (FileNotFoundError, PermissionError, RefusedError)
LOCAL_URLS = ("file://", "local://")
_FIX = (
    f"use a file, a folder or a glob of {', '.join(TEXT_FORMATS)} (also {', '.join(COMPRESSIONS)})"
    ' or .parquet files, such as path = "corpus/*.jsonl"'
)


@dataclass(frozen=True)
class Piece:
    """A part of a corpus: bytes of a jsonl file, a row group of a parquet file, or a file."""

    file: str
    name: str  # of the file, as in LocalFile
    size: int  # bytes, approximate
    # offsets in a jsonl file, an index of a row group and the next one, or of prepared documents;
    # end = -1: the end of the file
    start: int = 0
    end: int = -1
    first_row: int = 0  # of a row group in its file

    @property
    def format(self) -> str:
        return _format(self.file)[0]


class LocalFile(NamedTuple):
    """A file of a corpus, on disk or at a URL."""

    path: str
    # relative to the part of `data.path` without a pattern, however many files there are: documents
    # are held out by it
    name: str
    size: int  # bytes


def local_files(data: Data) -> list[LocalFile]:
    """Return the files at `data.path`, by path. Raises ConfigError."""
    where = f'{data.key("path")} = "{data.path}"'
    path = _path_on_disk(data.path)
    if path is None:
        found, is_folder = _at_url(data.path, where)
    else:
        found, is_folder = _on_disk(path, data.run_folder, where)
    files = sorted(file for file in found if _format(file.path)[0])
    others = [file.path for file in found if not _format(file.path)[0]]
    if others and not is_folder:
        suffix = "".join(Path(others[0]).suffixes)
        raise ConfigError(f'{where}: {others[0]}: unknown format "{suffix}"; {_FIX}; {CONVERT}')
    if others:
        suffixes = sorted({os.path.splitext(file)[1] for file in others})
        logger.info(
            f"{where}: {len(others)} files of other formats are left out ({list_names(suffixes)})"
        )
    if not files:
        raise ConfigError(
            f"{where}: none of the {len(found)} files in this folder can be read; {_FIX}; {CONVERT}"
        )
    return files


def _fixed_part(path: str) -> str:
    """Return the folder of a file, or the folders of a pattern before its first * ? or [."""
    parts = path.split("/")
    fixed = list(itertools.takewhile(lambda part: not has_magic(part), parts[:-1]))
    if fixed in ([], [""]):  # of a relative path, or of one at the root
        return "/" if path.startswith("/") else ""
    return "/".join(fixed)


def _path_on_disk(path: str) -> str | None:
    """Return the absolute path of what is on disk, also of file:// URLs; None for other URLs."""
    if not is_url(path):
        return os.path.abspath(path)
    if path.startswith(LOCAL_URLS):
        return LocalFileSystem._strip_protocol(path)
    return None


def _on_disk(path: str, run_folder: str, where: str) -> tuple[list[LocalFile], bool]:
    """Return (files, True for those of a folder, of which other formats are left out): the file,
    the files of the folder, or those that match the pattern at a path.

    Patterns are those of the standard library: fsspec's do not enter folders that are linked. What
    titan_lite has written is left out. Raises ConfigError.
    """
    is_folder = os.path.isdir(path)
    is_pattern = not is_folder and not os.path.isfile(path)
    found: Iterable[str] = [path]
    if is_folder:
        found = _not_hidden(list(_files_within(path, where)), path, where)
    elif is_pattern:
        found = glob(path, recursive=True)
        _refuse_unreadable_folders(path, where)
    folder = path if is_folder else _fixed_part(path)
    if is_folder or is_pattern:
        pattern = "*" if is_folder else os.path.basename(path)
        refuse_folder_of_run(folder, pattern, run_folder, where)
        found = without_outputs(found, folder, run_folder, where)
    files = []
    for file in found:
        try:
            status = os.stat(file)
        except OSError as error:
            raise _unreadable(where, file, error) from None
        if stat.S_ISREG(status.st_mode):
            name = os.path.relpath(file, folder).replace(os.sep, "/")
            files.append(LocalFile(file, name, status.st_size))
    if not files and not is_folder:
        raise ConfigError(f"{where}: no such file, and no file matches; {_FIX}")
    return files, is_folder


def _at_url(url: str, where: str) -> tuple[list[LocalFile], bool]:
    """Return what `_on_disk` returns, for a URL of fsspec. Raises ConfigError."""

    def look() -> tuple[AbstractFileSystem, str, dict[str, int], bool]:
        fs, path = file_system(url)
        return fs, path, *_files_at(fs, path)

    try:
        fs, path, found, is_folder = retried(look, url)
    except MachineError:
        raise
    except ImportError as error:
        raise ConfigError(
            f"{where} cannot be read: {error_line(error)}; install it where the run finds its"
            " packages, as `titan_lite[remote]` has it"
        ) from error
    except Exception as error:  # each library has errors of its own
        raise ConfigError(
            f"{where} cannot be read ({why_not_at_url(error)}); use a URL that can be read, or a"
            " copy on disk"
        ) from error
    if not found:
        raise ConfigError(f"{where}: no file matches; {_FIX}")
    folder = path if is_folder else _fixed_part(path)
    if is_folder or (has_magic(path) and "/." not in path):  # else it names the hidden ones
        found = {name: found[name] for name in _not_hidden(found, folder, where)}
    files = [
        LocalFile(fs.unstrip_protocol(file), _name_at_url(file, folder), size)
        for file, size in found.items()
    ]
    ((name, count),) = Counter(file.name for file in files).most_common(1) or [("", 0)]
    if count > 1:
        raise ConfigError(
            f"{where}: several files are documents of {name}: their URLs differ in the query alone,"
            " which is no part of a document's name; use one of them"
        )
    return files, is_folder


def _name_at_url(path: str, folder: str) -> str:
    """Return the name of a file in the corpus: its path from the folder on.

    Of http it is decoded and has no query: a signed URL has another signature in the next run, and
    a copy on disk has none. A space on disk is %20 there.
    """
    plain = without_query(path)
    name = posixpath.relpath(plain, without_query(folder) or ".")
    return unquote(name) if plain.startswith(HTTP) else without_secrets(name)


def _files_at(fs: AbstractFileSystem, path: str) -> tuple[dict[str, int], bool]:
    """Return (sizes of the files at a path, by path; True if it is a folder). Raises what the
    library of the file system does.
    """
    is_http = "http" in fs.protocol
    has_pattern = bool(set("*[") & set(path))
    if is_http and not has_pattern:  # fsspec would read a file to look whether it has links
        if _format(path)[0]:
            return {path: info_at_url(fs, path)["size"]}, False
        if "html" not in fs.info(path).get("mimetype", ""):
            return {path: 0}, False  # of no format that is read
    is_folder = fs.isdir(path)
    options: dict[str, Any] = {"detail": True}
    if is_http and (is_folder or has_pattern):
        # by default fsspec takes a folder that cannot be listed as an empty one
        options["on_error"] = _raise_if_it_may_pass
    entries = fs.find(path, **options) if is_folder else fs.glob(path, **options)
    found = {name: info["size"] for name, info in entries.items() if info["type"] == "file"}
    for name, size in found.items():
        if size is None and _format(name)[0]:  # a page of http has links without sizes
            found[name] = info_at_url(fs, name)["size"]
    return found, is_folder


def _raise_if_it_may_pass(error: Exception) -> None:
    if may_pass(error):
        raise error


def _not_hidden(files: Iterable[str], folder: str, where: str) -> list[str]:
    """Return the files without those whose name, or a folder on the way to them, begins with a dot.

    So do notebooks' checkpoints, deleted files, repositories and what macOS puts in archives. The
    patterns of the standard library do not find them either.
    """
    kept = []
    hidden = set()  # the first parts with a dot
    for file in files:
        parts = posixpath.relpath(file, folder or ".").split("/")
        if with_dot := [part for part in parts if part.startswith(".") and part != ".."]:
            hidden.add(with_dot[0])
        else:
            kept.append(file)
    if hidden:
        logger.info(
            f"{where}: hidden files and folders are left out ({list_names(sorted(hidden))})"
        )
    return kept


def _files_within(root: str, where: str) -> Iterator[str]:
    """Yield the files below a folder, each linked folder once.

    Raises ConfigError for a folder that cannot be read, unless it is hidden, or the one that a file
    system has at its root.
    """

    def refuse(error: OSError) -> None:
        parts = os.path.relpath(error.filename, root).split(os.sep)
        is_hidden = any(part.startswith(".") and part != "." for part in parts)
        if not is_hidden and parts != ["lost+found"]:
            raise _unreadable(where, error.filename, error)

    seen = set()
    for folder, subfolders, files in os.walk(root, onerror=refuse, followlinks=True):
        subfolders.sort()
        real = os.path.realpath(folder)
        if real in seen:
            subfolders.clear()
            continue
        seen.add(real)
        yield from (os.path.join(folder, file) for file in files)


def _refuse_unreadable_folders(pattern: str, where: str) -> None:
    """Raise ConfigError if a folder in which `glob` looks for the files of a pattern cannot be
    read: it takes that as an empty one.
    """
    parts = pattern.split("/")
    first = len(_fixed_part(pattern).split("/"))
    last = len(parts) if parts[-1] == "**" else len(parts) - 1
    for end in range(first, last + 1):
        folders = "/".join(parts[:end])
        if parts[end - 1] == "**":  # without files
            folders += "/"
        for folder in glob(folders, recursive=True):
            try:
                os.scandir(folder).close()
            except NotADirectoryError:
                continue
            except OSError as error:
                raise _unreadable(where, folder, error) from None


def size_of(file: str) -> int:
    """Return the present size of a file, in bytes. Raises ConfigError and MachineError."""
    if not is_url(file):
        try:
            return os.stat(file).st_size
        except OSError as error:
            raise error_because_of(error, f"{file} cannot be read: {error}") from error
    try:
        return retried(lambda: int(info_at_url(*file_system(file))["size"]), file)
    except MachineError:
        raise
    except Exception as error:  # each library has errors of its own
        raise ConfigError(f"{file} cannot be read: {why_not_at_url(error)}") from error


def _unreadable(where: str, path: str, error: OSError) -> ConfigError | MachineError:
    """Return the error for a file or folder of the corpus that cannot be read."""
    return error_because_of(
        error,
        f"{where}: {path} cannot be read: {error.strerror}; use a path without it, or make it"
        " readable",
    )


def cut_into_pieces(files: Sequence[LocalFile]) -> list[Piece]:
    """Return files in order, those of jsonl and parquet cut into pieces.

    The footer of each parquet file is read. Raises ConfigError.
    """
    step = max(PIECE, sum(size for _, _, size in files) // MAX_PIECES)
    pieces: list[Piece] = []
    for file, name, size in files:
        suffix, compression = _format(file)
        if suffix == ".jsonl" and not compression:
            for start in range(0, size, step):
                end = min(start + step, size)
                pieces.append(Piece(file, name, end - start, start, end))
        elif suffix == ".parquet":
            pieces += _row_groups(file, name, size)
        elif compression:
            pieces.append(Piece(file, name, size * TEXT_PER_COMPRESSED_BYTE))
        else:
            pieces.append(Piece(file, name, size))
    return pieces


def _row_groups(file: str, name: str, size: int) -> list[Piece]:
    from titan_lite.data.columns import row_groups

    try:
        with open_file(file) as opened:
            groups = row_groups(opened)
    except DAMAGED as error:
        _raise_if_unreachable(error, file)
        return [Piece(file, name, size)]  # reading it yields the error
    pieces = []
    first_row = 0
    for index, (group_size, rows) in enumerate(groups):
        pieces.append(Piece(file, name, group_size, index, index + 1, first_row))
        first_row += rows
    return pieces


def read_piece(piece: Piece, data: Data) -> Iterator[tuple[int, object]]:
    """Yield (position, raw) of its documents.

    Raises ConfigError if the file is not there, and MachineError if the machine fails.
    """
    next_position = piece.first_row if piece.format == ".parquet" else 1
    try:
        for position, raw in _documents(piece, data):
            yield position, raw
            next_position = position + 1
    except DAMAGED as error:
        _raise_if_unreachable(error, piece.file)
        yield next_position, ValueError(f"cannot be read from here on ({_described(error)})")


def _documents(piece: Piece, data: Data) -> Iterator[tuple[int, object]]:
    limit = data.max_document_mib * 2**20
    with open_file(piece.file) as file:
        match piece.format:
            case ".txt":
                yield 0, file.read(limit + 1)
            case ".jsonl" if piece.end >= 0:
                yield from lines_between(file, limit, piece.start, piece.end)
            case ".jsonl" | ".json":
                yield from lines(file, limit)
            case ".parquet":
                from titan_lite.data.columns import parquet_rows

                yield from parquet_rows(file, piece.start, piece.first_row, data.text_field)


def text_of(raw: object, piece: Piece, position: int, data: Data) -> str | BadDocument:
    """Return the text of a raw document, or a BadDocument with the reason why it has none."""
    try:
        if isinstance(raw, ValueError):
            raise raw
        limit = data.max_document_mib * 2**20
        if isinstance(raw, bytes):
            raw = _decoded(raw, limit)
            if piece.format in (".jsonl", ".json"):
                raw = _json_object(raw)
        if isinstance(raw, dict):
            raw = _field(raw, data.text_field)
        return _checked(raw, limit)
    except ValueError as error:
        why = str(error)
        instead = ""
        if isinstance(error, NoText):
            key = data.key("text_field")
            why = f'{key} = "{data.text_field}" {why}'
            instead = f'{key} = "{list_names([error.other])}"' if error.other else ""
        return BadDocument(without_secrets(piece.file), _location(piece, position), why, instead)


def _decoded(raw: bytes, limit: int) -> str:
    if len(raw) > limit:
        raise TooLarge(limit)
    try:
        return raw.decode().removeprefix("\ufeff")  # a quarter of the time of "utf-8-sig"
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start}: {error.reason})") from None


def _json_object(text: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg}, column {error.colno})") from None
    except RecursionError:
        raise ValueError("not JSON (nested too deeply)") from None
    except ValueError as error:  # a number of thousands of digits
        raise ValueError(f"not JSON ({str(error).partition(';')[0]})") from None
    if not isinstance(value, dict):
        kind = "null" if value is None else f"of type {type(value).__name__}"
        raise ValueError(f"not a JSON object, but {kind}")
    return value


def _field(fields: dict[str, object], name: str) -> object:
    """Return the field with the text.

    Raises NoText, which names the longest other text, if it is absent or null.
    """
    if fields.get(name) is not None:
        return fields[name]
    lengths = {other: len(value) for other, value in fields.items() if isinstance(value, str)}
    longest_first = sorted(lengths, key=lambda other: -lengths[other])
    why = "is null in" if name in fields else "is not a field of"
    other = longest_first[0] if longest_first and name not in fields else ""
    raise NoText(f"{why} it; its fields with text: {list_names(longest_first)}", other)


def _checked(text: object, limit: int) -> str:
    """Return a text that is not empty, not too large, and can be encoded.

    Raises ValueError for any other value.
    """
    if not isinstance(text, str):
        kind = "null" if text is None else f"of type {type(text).__name__}"
        raise NoText(f"is {kind}, not text")
    if not text:
        raise ValueError(EMPTY)
    if text.count("\0") * 4 > len(text):
        raise ValueError("not UTF-8 (more than a quarter of it is NUL characters, as in UTF-16)")
    try:
        size = len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"not UTF-8 (character {error.start}: {error.reason})") from None
    if size > limit:
        raise ValueError(f"{size / 2**20:.1f} MiB, more than data.max_document_mib = {limit >> 20}")
    return text


@lru_cache(1024)  # asked for each document
def _format(file: str) -> tuple[str, str]:
    """Split "a.json.gz" into (".json", ".gz"); ("", "") for an unknown format."""
    stem, last = os.path.splitext(without_query(file))
    if last in COMPRESSIONS:
        suffix = os.path.splitext(stem)[1]
        return (suffix, last) if suffix in TEXT_FORMATS else ("", "")
    return (last, "") if last in (*TEXT_FORMATS, ".parquet") else ("", "")


def _location(piece: Piece, position: int) -> str:
    """Return a position in words, such as "line 34".

    Of an offset in a jsonl file, the lines before it are counted.
    """
    match piece.format:
        case ".txt":
            return "whole"
        case ".parquet":
            return f"row {position}"
        case "":  # a shard of the hub
            return f"document {position}"
    if piece.end < 0:
        return f"line {position}"
    line = 1
    with open_file(piece.file) as file:
        while block := file.read(min(BLOCK, position - file.tell())):
            line += block.count(b"\n")
    return f"line {line}"


def _raise_if_unreachable(error: BaseException, file: str) -> None:
    """Raise ConfigError or MachineError for an error that is not in the content of the file."""
    is_elsewhere = isinstance(error, UNREACHABLE) or getattr(error, "errno", None) is not None
    if is_elsewhere or is_of_machine(error) or serves_no_ranges(error):
        raise error_because_of(error, f"{file} cannot be read: {error}") from error


def _described(error: BaseException) -> str:
    words = error_line(error)
    return words if type(error) is ValueError else f"{type(error).__name__}: {words}"
