"""Read the documents of text formats one after the other with bounded memory: reading stops before a document exceeds the limit.

    with open_bytes("a.jsonl.gz", ".gz") as file:
        for place, raw in lines(file, limit=2**25):            # or elements(file, limit), records(file, limit, field)
            ...

`raw` is the document as it is in the file, or a ValueError with the reason why it cannot be read. A document that is too large is
yielded as soon as that is known, and skipped in blocks before the next one. limit: bytes of a document with all of its fields.
"""

import csv
import io
import math
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

BLOCK = 2**20  # bytes that are decompressed at once
MOST_BLANK = (
    2**20
)  # consecutive blank lines; more are no text, and a gigabyte of them takes a minute
MOST_TOKENS = 2**22  # brackets and quotes in an element of an array; they take some seconds


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
    """Return the reason why a file has no usable column `field`. texts: the columns with text, if known."""
    what = "several columns" if field in names else "no column"
    instead = (
        "one of these as data.text_field"
        if texts is None
        else f'data.text_field = "{shown(texts[:1])}"'
        if texts
        else ""
    )
    return NoText(
        f'data.text_field = "{field}" is {what} of it; its columns: {shown(names)}', instead
    )


class _Gunzipped(io.RawIOBase):
    """The content of a gzip file with any number of members; of a damaged file, the content before the damage."""

    def __init__(self, file: str):
        self._file = io.FileIO(file)
        self._input, self._begun, self._inflate = b"", False, zlib.decompressobj(wbits=31)

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        while True:
            if not self._input:
                self._input = self._file.read(2**15)
                if not self._input:
                    if self._begun:
                        raise EOFError("the file ends before the compressed data does")
                    return 0
            if not self._begun:  # between members there may be zeros
                self._input = self._input.lstrip(b"\0")
                if not self._input:
                    continue
                self._begun = True
            output = self._inflate.decompress(self._input, len(buffer))
            self._input = self._inflate.unconsumed_tail
            if self._inflate.eof:
                self._input, self._begun = self._inflate.unused_data, False
                self._inflate = zlib.decompressobj(wbits=31)
            if output:
                buffer[: len(output)] = output
                return len(output)


def open_bytes(file: str, compression: str) -> io.BufferedReader:
    """Open a file for reading, with decompression in blocks."""
    if compression == ".gz":
        return io.BufferedReader(_Gunzipped(file), BLOCK)
    if compression == ".zst":
        import pyarrow

        return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.OSFile(file), "zstd"), BLOCK)
    return io.BufferedReader(io.FileIO(file), 2**17)  # some documents


def lines(
    file: io.BufferedReader, limit: int, start: int = 0, end: int = -1
) -> Iterator[tuple[int, bytes | ValueError]]:
    """Yield (number, line) of lines that are not blank; with an end, (offset, line) of those that begin between start and end."""
    place, stop = (1, math.inf) if end < 0 else (_first_line(file, start, end), end)
    blank = 0
    while place < stop and (line := file.readline(limit + 1)):
        length, whole = len(line), len(line) <= limit or line.endswith(b"\n")
        blank = blank + 1 if length <= limit and line.isspace() else 0
        if blank > MOST_BLANK:
            raise ValueError(f"{MOST_BLANK:,} blank lines")
        if length > limit:
            line = b""
            yield place, TooLarge(limit)
        elif not blank:
            yield place, line
        while not whole:
            rest = file.readline(BLOCK)
            length += len(rest)
            whole = not rest or rest.endswith(b"\n")
        place += length if end >= 0 else 1


def _first_line(file: io.BufferedReader, start: int, end: int) -> int:
    """Seek to the first line that begins between start and end, and return its offset; at least `end` if there is none."""
    offset = max(0, start - 1)
    file.seek(offset)
    skipped = b"" if start else b"\n"  # the rest of the line in which the previous piece ends
    while offset < end and not skipped.endswith(b"\n"):
        skipped = file.readline(min(BLOCK, end - offset))
        if not skipped:  # the file has become shorter
            return end
        offset += len(skipped)
    return offset


_MARK = b"\xef\xbb\xbf"  # UTF-8's byte order mark
_SPACES = re.compile(rb"[ \t\r\n]*")
_UP_TO_END = re.compile(rb'[^"\[\]{},]*')  # the end of an element that is not nested
_NESTED = re.compile(rb'[^"\[\]{}]*')


def is_array(file: io.BufferedReader) -> bool:
    """Return True if a JSON array begins here, False if JSON lines do. Consumes nothing."""
    return file.peek(BLOCK).removeprefix(_MARK).lstrip()[:1] == b"["


def elements(file: io.BufferedReader, limit: int) -> Iterator[tuple[int, bytes | ValueError]]:
    """Yield (number, JSON) of the elements of an array. Nothing is decoded; only strings and brackets are matched.

    Raises ValueError if it is not an array, or not complete.
    """
    block, at = b"", 0

    def read_on() -> None:
        nonlocal block, at
        block, at = file.read1(BLOCK), 0
        if not block:
            raise ValueError("the file ends within the array")

    def next_byte() -> bytes:
        """Return the next byte that is not a space."""
        nonlocal at
        while (at := _SPACES.match(block, at).end()) == len(block):  # type: ignore[union-attr]
            read_on()
        return block[at : at + 1]

    read_on()
    block = block.removeprefix(_MARK)
    if next_byte() != b"[":
        raise ValueError("no array")
    at += 1
    number, closed = 0, next_byte() == b"]"
    at += closed
    while not closed:
        next_byte()
        number += 1
        parts: list[bytes] = []
        begin, size, depth, tokens, inside, large = at, 0, 0, 0, False, False
        while True:
            start, escapes = at, 0
            if inside:
                at = len(block) if (found := block.find(b'"', at)) < 0 else found
                escapes = at - start - len(block[start:at].rstrip(b"\\"))  # backslashes before it
            else:
                at = (_NESTED if depth else _UP_TO_END).match(block, at).end()  # type: ignore[union-attr]
            byte = block[at : at + 1]
            tokens += 1
            if tokens > MOST_TOKENS:
                raise ValueError(f"an element of more than {MOST_TOKENS:,} brackets and quotes")
            if not byte:
                size += len(block) - begin
                if size <= limit:
                    parts.append(block[begin:])
                elif not large:
                    large, parts = True, []
                    yield number, TooLarge(limit)
                read_on()
                begin, at = 0, escapes % 2  # skip the character that the last backslash escapes
            elif byte == b'"':
                inside, at = not inside or escapes % 2 == 1, at + 1
            elif byte in b"[{":
                depth, at = depth + 1, at + 1
            elif depth:
                depth, at = depth - 1, at + 1
            else:
                break
        if size + at - begin > limit and not large:
            yield number, TooLarge(limit)
        elif not large:
            yield number, b"".join([*parts, block[begin:at]])
        if byte == b"}":
            raise ValueError("a } where , or ] should follow")
        closed, at = byte == b"]", at + 1
    while block:
        if block[at:].strip():
            raise ValueError("there is more after the end of the array")
        block, at = file.read1(BLOCK), 0


_LINE_END = re.compile(r"\r\n?|\n")
_QUOTE_OR_LINE_END = re.compile(r'"|\r\n?|\n')


class _Lines:
    """The lines of a csv file, for csv.reader; raises TooLarge when a record exceeds the limit."""

    def __init__(self, file: io.BufferedReader, limit: int):
        self._text = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")
        self._limit, self._count, self._left, self._quoted, self._cut = (
            limit,
            0,
            limit,
            False,
            False,
        )
        self._ahead, self._at = (
            "",
            0,
        )  # text that was read ahead, and the position of the next line in it

    def begin(self) -> int:
        """Skip the rest of a record that was too large, and return the number of the first line of the next record."""
        quotes = 0
        while self._cut and (block := self._text.read(BLOCK)):
            at = 0
            while self._cut and at < len(block):
                found = _QUOTE_OR_LINE_END.search(block, at) if not self._quoted else None
                at = (
                    (found.end() if found else len(block))
                    if not self._quoted
                    else block.find('"', at) + 1 or len(block) + 1
                )
                if found and found[0] != '"':
                    self._cut = False
                elif found or (self._quoted and at <= len(block)):
                    self._quoted, quotes = not self._quoted, quotes + 1
            if quotes > MOST_TOKENS:
                raise ValueError(f"a record of more than {MOST_TOKENS:,} quotes")
            self._ahead, self._at = ("", 0) if self._cut else (block, at)
            self._count += block.count("\n", 0, at)
        self._left, self._quoted, self._cut = self._limit, False, False
        return self._count + 1

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        size, line = self._left + 1, ""
        if self._ahead:
            found = _LINE_END.search(self._ahead, self._at)
            end = min(self._at + size, found.end() if found else len(self._ahead))
            line, self._at = self._ahead[self._at : end], end
            if end == len(self._ahead):
                self._ahead = ""
        if len(line) < size and line[-1:] not in ("\r", "\n"):
            line += self._text.readline(size - len(line))
        if not line:
            raise StopIteration
        whole = line[-1] in "\r\n"
        self._count += whole
        self._left -= len(line)
        self._quoted ^= line.count('"') % 2 == 1
        if self._left < 0:
            self._cut = self._quoted or not whole
            raise TooLarge(self._limit)
        return line


def records(
    file: io.BufferedReader, limit: int, field: str
) -> Iterator[tuple[int, str | ValueError]]:
    """Yield (line, text) of the records of a csv file, whose first one names the columns. Raises ValueError if all is blank."""
    csv.field_size_limit(limit)
    fed = _Lines(file, limit)
    # strict: otherwise a quote that is never closed makes one document of the rest of the file
    rows = csv.reader(fed, strict=True)
    column, blank = -1, 0
    while True:
        line = fed.begin()
        try:
            row = next(rows, None)
        except (csv.Error, TooLarge) as error:
            yield line, error if isinstance(error, TooLarge) else ValueError(str(error))
            if column < 0:
                return
            continue
        if row is None:
            return
        blank = 0 if row else blank + 1
        if blank > MOST_BLANK:
            raise ValueError(f"{MOST_BLANK:,} blank lines")
        if not row:
            continue
        if column >= 0:
            short = f'data.text_field = "{field}" is column {column + 1}, and this record has {len(row)}'
            yield line, row[column] if column < len(row) else NoText(short)
        elif row.count(field) == 1:
            column = row.index(field)
        elif any("\0" in name for name in row):
            yield line, ValueError("not UTF-8 (its columns have NUL characters, as UTF-16 has)")
            return
        else:
            yield line, no_column(field, row)
            return
