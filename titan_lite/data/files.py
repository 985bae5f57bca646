"""Local files as pieces that can be read alone: which raw documents are in a piece, and what the text of one is.

    for piece in local_pieces(data):                            # 1 MiB of a jsonl file, a row group, or a whole file
        for place, raw in read_piece(piece, data):              # place: of a line, row or byte in its file
            text = text_of(raw, piece, place, data)             # or a BadDocument, which names file and line

A raw document is what can be had without parsing it, so that who wants one in eight parses one in eight. Reading never fails:
what cannot be read from some place on is one document there, whose raw form is a ValueError with the reason.
"""

import csv
import gzip
import io
import json
import math
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from glob import glob
from pathlib import Path
from typing import Any

from titan_lite.config import ConfigError, Data
from titan_lite.data.bad_documents import BadDocument
from titan_lite.logging import logger

FORMATS = (".txt", ".jsonl", ".json", ".csv", ".parquet", ".arrow")
PIECE = 2**20  # bytes of a jsonl file in a piece: little enough to skip over, enough to be worth a seek
MOST_PIECES = 100_000  # of a corpus; those of a larger one are larger, so that their list is no burden
_WORKS = (
    f"name a file, a folder or a glob of {', '.join(FORMATS)} files (all but the last two also .gz and .zst), "
    'such as path = "corpus/*.jsonl"'
)
# what reading raises; pyarrow's errors are of these
BROKEN = (OSError, EOFError, ValueError, NotImplementedError, RecursionError, zlib.error)


@dataclass(frozen=True)
class Piece:
    """Bytes `start` to `end` of a jsonl file, row group `start` of a parquet file, or a whole file (end = -1)."""

    file: str
    name: str  # of the file, relative to the corpus: by it documents are held out
    size: int  # bytes, roughly
    start: int = 0
    end: int = -1
    first: int = 0  # row of the file that a row group begins with

    @property
    def format(self) -> str:
        return _format(self.file)[0]


def local_files(data: Data) -> list[tuple[str, str, int]]:
    """(path, name, bytes) of the files at `data.path`, sorted by path; the name is relative to the folder. Raises ConfigError."""
    wrong, path = f'{data.key("path")} = "{data.path}"', os.path.abspath(data.path)
    if os.path.isdir(path):
        root = path
        found = sorted(_files_within(path))
        files = [file for file in found if _format(file)[0] and os.path.isfile(file)]
        if len(files) < len(found):
            logger.info(f"{wrong}: {len(found) - len(files)} files of other formats are left out")
        if not files:
            raise ConfigError(f"{wrong}: none of the {len(found)} files in this folder can be read; {_WORKS}")
    else:
        files = [path] if os.path.isfile(path) else sorted(filter(os.path.isfile, glob(path, recursive=True)))
        if not files:
            raise ConfigError(f"{wrong}: no such file, and no file matches; {_WORKS}")
        for file in files:
            if not _format(file)[0]:
                raise ConfigError(f'{wrong}: {file}: unknown format "{"".join(Path(file).suffixes)}"; {_WORKS}')
        root = os.path.commonpath([os.path.dirname(file) for file in files])
    return [(file, os.path.relpath(file, root).replace(os.sep, "/"), os.path.getsize(file)) for file in files]


def _files_within(root: str) -> Iterator[str]:
    """Also of folders that are linked, once each."""
    seen = set()
    for folder, subfolders, files in os.walk(root, followlinks=True):
        subfolders.sort()
        if (real := os.path.realpath(folder)) in seen:
            subfolders.clear()
            continue
        seen.add(real)
        yield from (os.path.join(folder, file) for file in files)


def local_pieces(data: Data) -> list[Piece]:
    """The files at `data.path` in order, cut where that makes them easier to reach."""
    files = local_files(data)
    step = max(PIECE, sum(size for *_, size in files) // MOST_PIECES)
    pieces: list[Piece] = []
    for file, name, size in files:
        match _format(file):
            case ".jsonl", "":
                pieces += [Piece(file, name, min(step, size - at), at, min(at + step, size)) for at in range(0, size, step)]
            case ".parquet", _:
                pieces += _row_groups(file, name, size)
            case _, compression:
                pieces.append(Piece(file, name, size * 4 if compression else size))  # as text about that much
    return pieces


def read_piece(piece: Piece, data: Data) -> Iterator[tuple[int, Any]]:
    """(place, raw) of its documents. Raises ConfigError where the machine, not the file, is at fault."""
    readers = {".txt": _txt, ".jsonl": _lines, ".json": _json, ".csv": _csv, ".parquet": _parquet, ".arrow": _arrow}
    place = piece.first - 1 if piece.format in (".parquet", ".arrow") else 0
    try:
        for place, raw in readers[piece.format](piece, data):
            yield place, raw
    except BROKEN as error:
        yield place + 1, ValueError(f"cannot be read from here on ({type(error).__name__}: {_of_the_file(error, piece.file)})")


def text_of(raw: Any, piece: Piece, place: int, data: Data) -> str | BadDocument:
    """The text of a raw document."""
    try:
        return _parse(raw, data, is_json=piece.format in (".jsonl", ".json"))
    except ValueError as error:
        return BadDocument(piece.file, _in_words(piece, place), str(error))


def _parse(raw: Any, data: Data, is_json: bool) -> str:
    """The text of bytes, a line of JSON, an example with fields, or a value. Raises ValueError: why it has none."""
    limit, field = data.max_document_mib * 2**20, data.text_field
    if isinstance(raw, ValueError):
        raise raw
    if isinstance(raw, bytes):
        if len(raw) > limit:
            raise ValueError(f"more than data.max_document_mib = {data.max_document_mib}")
        try:
            raw = raw.decode().removeprefix("\ufeff")  # four times as fast as "utf-8-sig"
            raw = json.loads(raw) if is_json else raw
        except UnicodeDecodeError as error:
            raise ValueError(f"not UTF-8 (byte {error.start}: {error.reason})") from None
        except json.JSONDecodeError as error:
            raise ValueError(f"not JSON ({error.msg}, column {error.colno})") from None
        except RecursionError:
            raise ValueError("not JSON (nested too deeply)") from None
        if is_json and not isinstance(raw, dict):
            raise ValueError(f"no JSON object, but a {type(raw).__name__}")
    if isinstance(raw, dict):
        if raw.get(field) is None:
            others = ", ".join(name for name, value in raw.items() if isinstance(value, str)) or "none"
            why = "is null in" if field in raw else "is not a field of"
            raise ValueError(f'{data.key("text_field")} = "{field}" {why} it; its fields with text: {others}')
        raw = raw[field]
    if not isinstance(raw, str):
        what = "null" if raw is None else f"a {type(raw).__name__}"
        raise ValueError(f'{data.key("text_field")} = "{field}" is {what} in it, not text')
    try:
        size = len(raw) if raw.isascii() else len(raw.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"not UTF-8 (character {error.start}: {error.reason})") from None
    if not raw:
        raise ValueError("empty")
    if size > limit:
        raise ValueError(f"{size / 2**20:.1f} MiB, more than data.max_document_mib = {data.max_document_mib}")
    return raw


@lru_cache(1024)  # asked for each document
def _format(file: str) -> tuple[str, str]:
    """("a.json.gz") -> (".json", ".gz"); empty: none of ours."""
    stem, compression = os.path.splitext(file)
    if compression not in (".gz", ".zst"):
        stem, compression = file, ""
    suffix = os.path.splitext(stem)[1]
    known = FORMATS[:4] if compression else FORMATS  # the last two compress what they hold themselves
    return (suffix, compression) if suffix in known else ("", "")


def _in_words(piece: Piece, place: int) -> str:
    """ "line 34" of a file with lines. In a piece of one a place is an offset: the lines before it are counted now."""
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
    """The error in one line; ConfigError where the machine says that it cannot read the file now."""
    if getattr(error, "errno", None) is not None:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    return " ".join(str(error).split())


def _open(file: str) -> Any:
    """Its bytes, decompressed."""
    compression = _format(file)[1]
    if compression == ".gz":
        return gzip.open(file)  # which gives all there is before the place where a file breaks off
    if compression == ".zst":
        import pyarrow

        return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.OSFile(file), "zstd"), PIECE)
    return open(file, "rb", buffering=2**17)  # some documents at a time


def _txt(piece: Piece, data: Data) -> Iterator[tuple[int, bytes]]:
    with _open(piece.file) as file:
        yield 0, file.read(data.max_document_mib * 2**20 + 1)


def _lines(piece: Piece, data: Data) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, cut where they are too long: by number, or by offset those that begin within a piece."""
    limit = data.max_document_mib * 2**20
    with _open(piece.file) as file:
        place, end = (1, math.inf) if piece.end < 0 else (_first_line(file, piece), piece.end)
        while place < end:
            line = file.readline(limit + 1)
            if not line:
                return
            if not line.isspace():
                yield place, line
            length, rest = len(line), line
            while len(line) > limit and rest and not rest.endswith(b"\n"):
                rest = file.readline(PIECE)
                length += len(rest)
            place += length if piece.end >= 0 else 1


def _first_line(file: Any, piece: Piece) -> int:
    """The offset of the first line that begins within the piece, where the file is read next; at or after its end: of none."""
    offset = max(0, piece.start - 1)
    file.seek(offset)
    skipped = b"" if piece.start else b"\n"  # up to the end of the line that the piece before ends in
    while offset < piece.end and not skipped.endswith(b"\n"):
        skipped = file.readline(min(PIECE, piece.end - offset))
        if not skipped:  # the file has become shorter
            return piece.end
        offset += len(skipped)
    return offset


def _json(piece: Piece, data: Data) -> Iterator[tuple[int, Any]]:
    """One array of objects, or lines as in jsonl, which goes by this name as well."""
    with _open(piece.file) as file:
        while (begin := file.read(1)).isspace() or begin in (b"\xef", b"\xbb", b"\xbf"):  # UTF-8's byte order mark
            pass
        if begin == b"[":
            yield from enumerate(json.loads((begin + file.read()).decode()), start=1)
            return
    yield from _lines(piece, data)


def _csv(piece: Piece, data: Data) -> Iterator[tuple[int, Any]]:
    csv.field_size_limit(data.max_document_mib * 2**20)
    with _open(piece.file) as file:
        # strict: or a quote that is never closed makes one document of all that follows
        rows = csv.reader(io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline=""), strict=True)
        header = next(rows, None)
        if header is not None and header.count(data.text_field) != 1:
            yield 1, _no_column(data, header)
            return
        while header is not None:
            line = rows.line_num + 1
            try:
                row = next(rows, None)
            except csv.Error as error:
                yield line, ValueError(str(error))
                continue
            if row is None:
                return
            if row:
                yield line, dict(zip(header, row, strict=False))


def _row_groups(file: str, name: str, size: int) -> list[Piece]:
    from pyarrow import parquet

    try:
        metadata = parquet.read_metadata(file)
    except BROKEN as error:
        _of_the_file(error, file)
        return [Piece(file, name, size)]  # whose reading tells
    pieces, first = [], 0
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        pieces.append(Piece(file, name, group.total_byte_size, index, index + 1, first))
        first += group.num_rows
    return pieces


def _parquet(piece: Piece, data: Data) -> Iterator[tuple[int, Any]]:
    from pyarrow import parquet

    with parquet.ParquetFile(piece.file) as file:
        batches = file.iter_batches(batch_size=1024, row_groups=[piece.start], columns=[data.text_field])
        yield from _rows(file.schema_arrow.names, batches, piece, data)


def _arrow(piece: Piece, data: Data) -> Iterator[tuple[int, Any]]:
    import pyarrow

    with pyarrow.memory_map(piece.file) as file:
        if file.read(6) == b"ARROW1":
            reader = pyarrow.ipc.open_file(file)
            batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
        else:
            file.seek(0)
            batches = reader = pyarrow.ipc.open_stream(file)
        yield from _rows(reader.schema.names, batches, piece, data)


def _rows(names: list[str], batches: Any, piece: Piece, data: Data) -> Iterator[tuple[int, Any]]:
    """(row, bytes of the text or None) of record batches; as bytes, since a string that is not UTF-8 would fail a whole batch."""
    import pyarrow

    row = piece.first
    if names.count(data.text_field) != 1:
        yield row, _no_column(data, names)
        return
    for batch in batches:
        column = batch.column(data.text_field)
        if as_bytes := {pyarrow.string(): pyarrow.binary(), pyarrow.large_string(): pyarrow.large_binary()}.get(column.type):
            column = column.view(as_bytes)
            column.validate(full=True)  # offsets of a damaged file would be read out of bounds
        try:
            values = column.cast(pyarrow.large_binary()).to_pylist()
        except pyarrow.ArrowNotImplementedError:
            yield row, ValueError(f'{data.key("text_field")} = "{data.text_field}" is a column of {column.type}, not of text')
            return
        yield from enumerate(values, start=row)
        row += len(values)


def _no_column(data: Data, names: list[str]) -> ValueError:
    what = "several columns" if data.text_field in names else "no column"
    said = f'{data.key("text_field")} = "{data.text_field}"'
    return ValueError(f"{said} is {what} of it; its columns: {', '.join(names) or 'none'}")
