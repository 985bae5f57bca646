"""Read the documents of text formats one after the other, from a file on disk or at a URL,
compressed or not.

    with open_file("s3://corpus/a.jsonl.gz") as file:
        for number, raw in lines(file, limit=2**25):      # or elements(file), records(file, limit, field)
            ...

`raw` is the document as it is in the file, or a ValueError with the reason why it cannot be read. A
line or record above the limit of bytes is such an error, and the next one is read.
"""

import csv
import io
import json
import re
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any, BinaryIO

from fsspec.compression import register_compression
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

BLOCK = 2**20  # bytes that are read at once where nothing in them is kept
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
SPACES = re.compile(r"[ \t\r\n]*")  # those of JSON


class NoText(ValueError):
    """The reason why a document has no text. instead: a setting with which it has one, if known."""

    def __init__(self, why: str, instead: str = ""):
        super().__init__(why)
        self.instead = instead


class TooLarge(ValueError):
    """A document above the limit of bytes."""

    def __init__(self, limit: int):
        super().__init__(f"more than data.max_document_mib = {limit >> 20}")


def shown(names: Sequence[str]) -> str:
    """Return names from a file in one line of some hundred characters."""
    short = [
        name if len(name) <= 40 and name.isprintable() else ascii(name[:40]) for name in names[:20]
    ]
    return ", ".join(short + ["..."] * (len(names) > 20)) or "none"


def no_column(field: str, names: Sequence[str], texts: Sequence[str] | None = None) -> NoText:
    """Return the reason why a file has no usable column `field`.

    texts: columns with text, if known.
    """
    what = "several columns" if field in names else "no column"
    why = f'data.text_field = "{field}" is {what} of it; its columns: {shown(names)}'
    if texts is None:
        return NoText(why, "one of these as data.text_field")
    return NoText(why, f'data.text_field = "{shown(texts[:1])}"' if texts else "")


def is_url(path: str) -> bool:
    return "://" in path


@contextmanager
def open_file(file: str) -> Iterator[Any]:
    """Open a file, on disk or at a URL, for reading bytes.

    Its name decides how it is decompressed.
    """
    fs, path = url_to_fs(file) if is_url(file) else (LocalFileSystem(), file)
    with fs.open(path, "rb", compression="infer") as opened:
        # a file that is not compressed may lack `readline(size)`
        yield opened if hasattr(opened, "peek") else io.BufferedReader(opened, BLOCK // 8)


def _all_frames(file: BinaryIO, mode: str = "rb") -> BinaryIO:
    """Decompress zst.

    With the package zstandard, fsspec ends after the first frame or where a file is cut short.
    """
    import pyarrow

    return io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"), BLOCK // 16)


def _only_member(file: BinaryIO, mode: str = "rb") -> IO[bytes]:
    """Decompress a zip of one file.

    fsspec reads the first of several, and is silent about the others.
    """
    archive = zipfile.ZipFile(file)
    names = archive.namelist()
    if len(names) != 1:
        raise ValueError(f"a zip of {len(names)} files, which path = zip://*::FILE reads")
    return archive.open(names[0])


register_compression("zstd", _all_frames, "zst", force=True)
register_compression("zip", _only_member, "zip", force=True)


def lines(
    file: BinaryIO, limit: int, start: int = 0, end: int | None = None
) -> Iterator[tuple[int, bytes | ValueError]]:
    """Yield (number, line) of lines that are not blank.

    With an end, yield (offset, line) of those that begin between the offsets start and end.
    """
    position = 1 if end is None else _first_line(file, start, end)
    while (end is None or position < end) and (line := file.readline(limit + 1)):
        length = len(line)
        if length > limit:
            yield position, TooLarge(limit)
        elif not line.isspace():
            yield position, line
        while length > limit and line and not line.endswith(b"\n"):
            line = file.readline(BLOCK)  # the rest of a line that is too large
            length += len(line)
        position += 1 if end is None else length


def _first_line(file: BinaryIO, start: int, end: int) -> int:
    """Seek to the first line that begins from start on, and return its offset; at least `end` if
    none does before.
    """
    if start == 0:
        return 0
    file.seek(start - 1)
    position = start - 1
    while position < end and (rest := file.readline(BLOCK)):
        position += len(rest)
        if rest.endswith(b"\n"):
            return position
    return end


def is_array(file: BinaryIO) -> bool:
    """Return True if the file is a JSON array, False if it has lines of JSON."""
    return file.read(BLOCK).removeprefix(BYTE_ORDER_MARK).lstrip()[:1] == b"["


def elements(file: BinaryIO) -> Iterator[tuple[int, bytes | ValueError]]:
    """Yield (number, JSON) of the elements of an array, which is read as a whole.

    The JSON builder of `datasets` is not used: it turns all texts into JSON, with quotes and
    escapes, if one of them is a number, and ends at a byte that is not UTF-8. Raises ValueError
    where the array is not JSON or not complete.
    """
    # a byte that is not UTF-8 is kept: only the element that has it is a bad document
    text = file.read().removeprefix(BYTE_ORDER_MARK).decode(errors="surrogateescape")
    decoder = json.JSONDecoder()
    position = end = _next_token(text, text.index("[") + 1)
    more = not text.startswith("]", end)
    number = 0
    while more:
        number += 1
        try:
            _, end = decoder.raw_decode(text, position)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"not an array in JSON: {error}") from None
        end = _next_token(text, end)
        yield number, text[position:end].encode(errors="surrogateescape")
        separator = text[end : end + 1]
        if separator not in (",", "]"):  # "": the file ends
            raise ValueError(f"not an array in JSON: {separator!r} where , or ] should follow")
        more = separator == ","
        position = _next_token(text, end + 1)
    if _next_token(text, end + 1) < len(text):
        raise ValueError("not an array in JSON: there is more after its end")


def _next_token(text: str, position: int) -> int:
    """Return the position of the next character of JSON that is not a space."""
    spaces = SPACES.match(text, position)
    assert spaces is not None  # it matches nothing, too
    return spaces.end()


class _RecordLines:
    """The lines of a csv file, for csv.reader.

    Raises TooLarge, after all its lines, for a record above the limit.
    """

    def __init__(self, file: BinaryIO, limit: int):
        # csv.reader wants line ends as they are; bytes that are not UTF-8 are found in the text of
        # their record
        self._text = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")
        self._limit = limit  # characters of a record
        self.count = 0  # lines read

    def begin_record(self) -> None:
        self._size = 0  # characters read of the record
        self._quoted = False  # whether the record continues in the next line

    def __iter__(self) -> "_RecordLines":
        return self

    def __next__(self) -> str:
        line = self._next_line()
        if not line:
            raise StopIteration
        if self._size > self._limit:
            while self._quoted and self._next_line():
                pass
            raise TooLarge(self._limit)
        return line

    def _next_line(self) -> str:
        line = self._text.readline()
        self.count += 1
        self._size += len(line)
        if line.count('"') % 2:
            self._quoted = not self._quoted
        return line


def records(file: BinaryIO, limit: int, field: str) -> Iterator[tuple[int, str | ValueError]]:
    """Yield (line, text) of the records of a csv file, whose first one names the columns."""
    csv.field_size_limit(limit)
    record_lines = _RecordLines(file, limit)
    # strict: otherwise a quote that is never closed makes one document of the rest of the file
    reader = csv.reader(record_lines, strict=True)
    column = None
    while True:
        line = record_lines.count + 1
        record_lines.begin_record()
        try:
            record = next(reader, None)
        except (csv.Error, TooLarge) as error:
            yield line, error if isinstance(error, TooLarge) else ValueError(str(error))
            if column is None:
                return
            continue
        if record is None:
            return
        if not record:  # a blank line
            continue
        if column is not None:
            yield line, _text_of_record(record, column, field)
        elif record.count(field) == 1:
            column = record.index(field)
        elif any("\0" in name for name in record):
            yield line, ValueError("not UTF-8 (its columns have NUL characters, as UTF-16 has)")
            return
        else:
            yield line, no_column(field, record)
            return


def _text_of_record(record: list[str], column: int, field: str) -> str | NoText:
    if column < len(record):
        return record[column]
    place = f'data.text_field = "{field}" is column {column + 1}'
    return NoText(f"{place}, and this record has {len(record)}")
