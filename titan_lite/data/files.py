"""Cut local files into pieces that can be read independently; read raw documents from a piece, and text from a raw document.

    for piece in local_pieces(data):                            # 1 MiB of a jsonl file, a row group, or a whole file
        for place, raw in read_piece(piece, data):              # place: line, row or byte offset in the file
            text = text_of(raw, piece, place, data)             # or a BadDocument, which names file and line

A raw document is not parsed, so that a reader of one document in eight parses one in eight. Reading does not raise: if a file
cannot be read from some place on, the last document is there, and its raw form is a ValueError with the reason.

Reading any file needs at most MEMORY times data.max_document_mib, and 128 MiB for the window of a zstd file: a larger document is
bad before it is decoded. A dictionary of parquet needs most, and a line of JSON, whose objects take up to thirty times its bytes.
"""

import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from glob import glob
from pathlib import Path
from typing import Any

from titan_lite.config import ConfigError, Data
from titan_lite.config.row import one_line
from titan_lite.data.bad_documents import BadDocument
from titan_lite.data.readers import (
    NoText,
    TooLarge,
    elements,
    is_array,
    lines,
    open_bytes,
    records,
    shown,
)
from titan_lite.logging import logger

FORMATS = (".txt", ".jsonl", ".json", ".csv", ".parquet", ".arrow")
PIECE = 2**20  # bytes of a jsonl file in a piece: few enough to skip, enough for a seek to pay
MEMORY = 48  # times data.max_document_mib; measured by tests
MOST_PIECES = 100_000  # in a corpus; a larger corpus has larger pieces, to keep the list short
_FIX = (
    f"use a file, a folder or a glob of {', '.join(FORMATS)} files (all but the last two also .gz and .zst), "
    'such as path = "corpus/*.jsonl"'
)


@dataclass(frozen=True)
class Piece:
    """Bytes `start` to `end` of a jsonl file, row group `start` of a parquet file, or a whole file (end = -1)."""

    file: str
    name: str  # relative to the corpus; documents are held out by it
    size: int  # bytes, approximate
    start: int = 0
    end: int = -1
    first: int = 0  # first row of a row group in its file

    @property
    def format(self) -> str:
        return _format(self.file)[0]


def local_files(data: Data) -> list[tuple[str, str, int]]:
    """Return (path, name relative to the folder, bytes) of the files at `data.path`, sorted by path. Raises ConfigError."""
    wrong, path = f'{data.key("path")} = "{data.path}"', os.path.abspath(data.path)
    if os.path.isdir(path):
        root = path
        found = sorted(_files_within(path))
        files = [file for file in found if _format(file)[0] and os.path.isfile(file)]
        if len(files) < len(found):
            logger.info(f"{wrong}: {len(found) - len(files)} files of other formats are left out")
        if not files:
            raise ConfigError(
                f"{wrong}: none of the {len(found)} files in this folder can be read; {_FIX}"
            )
    else:
        files = (
            [path]
            if os.path.isfile(path)
            else sorted(filter(os.path.isfile, glob(path, recursive=True)))
        )
        if not files and os.path.exists(path):
            raise ConfigError(
                f"{wrong} is {kind_of_file(path)}, not a file that can be read again; {_FIX}"
            )
        if not files:
            raise ConfigError(f"{wrong}: no such file, and no file matches; {_FIX}")
        for file in files:
            if not _format(file)[0]:
                raise ConfigError(
                    f'{wrong}: {file}: unknown format "{"".join(Path(file).suffixes)}"; {_FIX}'
                )
        root = os.path.commonpath([os.path.dirname(file) for file in files])
    return [
        (file, os.path.relpath(file, root).replace(os.sep, "/"), os.path.getsize(file))
        for file in files
    ]


def kind_of_file(path: str | os.PathLike) -> str:
    """Return the kind of a file system entry, such as "a folder"."""
    mode = os.stat(path).st_mode
    kinds = {
        stat.S_ISDIR: "a folder",
        stat.S_ISFIFO: "a pipe",
        stat.S_ISSOCK: "a socket",
        stat.S_ISREG: "a file",
    }
    return next((words for is_kind, words in kinds.items() if is_kind(mode)), "a device")


def _files_within(root: str) -> Iterator[str]:
    """Yield the files below a folder, each linked folder once."""
    seen = set()
    for folder, subfolders, files in os.walk(root, followlinks=True):
        subfolders.sort()
        if (real := os.path.realpath(folder)) in seen:
            subfolders.clear()
            continue
        seen.add(real)
        yield from (os.path.join(folder, file) for file in files)


def local_pieces(data: Data) -> list[Piece]:
    """Return the files at `data.path` in order, jsonl and parquet files cut into pieces. Raises ConfigError."""
    files = local_files(data)
    step = max(PIECE, sum(size for *_, size in files) // MOST_PIECES)
    pieces: list[Piece] = []
    for file, name, size in files:
        match _format(file):
            case ".jsonl", "":
                pieces += [
                    Piece(file, name, min(step, size - at), at, min(at + step, size))
                    for at in range(0, size, step)
                ]
            case ".parquet", _:
                pieces += _row_groups(file, name, size, data)
            case _, compression:
                pieces.append(
                    Piece(file, name, size * 4 if compression else size)
                )  # about its size as text
    return pieces


def read_piece(piece: Piece, data: Data) -> Iterator[tuple[int, Any]]:
    """Yield (place, raw) of its documents. Raises ConfigError if the machine fails, and not the file."""
    place = piece.first - 1 if piece.format in (".parquet", ".arrow") else 0
    try:
        for place, raw in _documents(piece, data):
            yield place, raw
    except Exception as error:  # pyarrow alone raises ten kinds
        yield (
            place + 1,
            ValueError(f"cannot be read from here on ({_of_the_file(error, piece.file)})"),
        )


def _documents(piece: Piece, data: Data) -> Iterator[tuple[int, Any]]:
    limit = data.max_document_mib * 2**20
    suffix, compression = _format(piece.file)
    if suffix in (".parquet", ".arrow"):
        from titan_lite.data.columns import arrow_rows, parquet_rows

        if suffix == ".arrow":
            yield from arrow_rows(piece.file, data.text_field, limit)
        else:
            yield from parquet_rows(piece.file, piece.start, piece.first, data.text_field, limit)
        return
    with open_bytes(piece.file, compression) as file:
        if suffix == ".txt":
            yield 0, file.read(limit + 1)
        elif suffix == ".csv":
            yield from records(file, limit, data.text_field)
        elif suffix == ".json" and is_array(file):
            yield from elements(file, limit)
        else:
            yield from lines(file, limit, piece.start, piece.end)


def _row_groups(file: str, name: str, size: int, data: Data) -> list[Piece]:
    from titan_lite.data.columns import row_groups

    try:
        groups = row_groups(file, data.max_document_mib * 2**20)
    except Exception as error:
        _of_the_file(error, file)
        return [Piece(file, name, size)]  # reading it yields the error
    pieces, first = [], 0
    for index, (size, rows) in enumerate(groups):
        pieces.append(Piece(file, name, size, index, index + 1, first))
        first += rows
    return pieces


def text_of(raw: Any, piece: Piece, place: int, data: Data) -> str | BadDocument:
    """Return the text of a raw document, or a BadDocument with the reason why it has none."""
    try:
        return _parse(raw, data, is_json=piece.format in (".jsonl", ".json"))
    except ValueError as error:
        # in a mixture the key has another name, which readers do not know
        why, instead = (
            words.replace("data.text_field", data.key("text_field"))
            for words in (str(error), getattr(error, "instead", ""))
        )
        return BadDocument(piece.file, _in_words(piece, place), why, instead)


def _parse(raw: Any, data: Data, is_json: bool) -> str:
    """Return the text of bytes, a line of JSON, an example with fields, or a value. Raises ValueError with the reason if none."""
    limit, field = data.max_document_mib * 2**20, data.text_field
    if isinstance(raw, ValueError):
        raise raw
    if isinstance(raw, bytes):
        if len(raw) > limit:
            raise TooLarge(limit)
        try:
            raw = raw.decode().removeprefix("\ufeff")  # a quarter of the time of "utf-8-sig"
            raw = json.loads(raw) if is_json else raw
        except UnicodeDecodeError as error:
            raise ValueError(f"not UTF-8 (byte {error.start}: {error.reason})") from None
        except json.JSONDecodeError as error:
            raise ValueError(f"not JSON ({error.msg}, column {error.colno})") from None
        except RecursionError:
            raise ValueError("not JSON (nested too deeply)") from None
        except ValueError as error:  # a number of thousands of digits
            raise ValueError(f"not JSON ({str(error).partition(';')[0]})") from None
        if is_json and not isinstance(raw, dict):
            raise ValueError(
                f"not a JSON object, but {'null' if raw is None else f'of type {type(raw).__name__}'}"
            )
    if isinstance(raw, dict):
        if raw.get(field) is None:
            others = sorted(
                (name for name, value in raw.items() if isinstance(value, str)),
                key=lambda name: -len(raw[name]),
            )
            why = "is null in" if field in raw else "is not a field of"
            instead = (
                f'data.text_field = "{shown(others[:1])}"' if others and field not in raw else ""
            )
            raise NoText(
                f'data.text_field = "{field}" {why} it; its fields with text: {shown(others)}',
                instead,
            )
        raw = raw[field]
    if not isinstance(raw, str):
        kind = "null" if raw is None else f"of type {type(raw).__name__}"
        raise ValueError(f'data.text_field = "{field}" is {kind}, not text')
    try:
        size = len(raw) if raw.isascii() else len(raw.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"not UTF-8 (character {error.start}: {error.reason})") from None
    if not raw:
        raise ValueError("empty")
    if size > limit:
        raise ValueError(
            f"{size / 2**20:.1f} MiB, more than data.max_document_mib = {data.max_document_mib}"
        )
    return raw


@lru_cache(1024)  # asked for each document
def _format(file: str) -> tuple[str, str]:
    """Split "a.json.gz" into (".json", ".gz"); ("", "") for an unknown format."""
    stem, compression = os.path.splitext(file)
    if compression not in (".gz", ".zst"):
        stem, compression = file, ""
    suffix = os.path.splitext(stem)[1]
    known = FORMATS[:4] if compression else FORMATS  # the last two have compression inside
    return (suffix, compression) if suffix in known else ("", "")


def _in_words(piece: Piece, place: int) -> str:
    """Return a place in words, such as "line 34"; an offset in a jsonl file is converted by counting the lines before it."""
    match piece.format:
        case ".txt":
            return "whole"
        case ".parquet" | ".arrow":
            return f"row {place}"
        case "":  # a shard of the hub
            return f"document {place}"
    if piece.end >= 0:
        with open(piece.file, "rb") as file:
            offset, place = place, 1
            while block := file.read(min(PIECE, offset - file.tell())):
                place += block.count(b"\n")
    return f"line {place}"


def _of_the_file(error: BaseException, file: str) -> str:
    """Return the error in one line. Raises ConfigError if the operating system cannot read the file."""
    if getattr(error, "errno", None) is not None:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    words = one_line(" ".join(str(error).split()), 300)
    return words if type(error) is ValueError else f"{type(error).__name__}: {words}"
