"""Read the documents of text formats one after the other, from a file on disk or at a URL.

    with open_file("s3://corpus/a.jsonl.gz") as file:
        for number, raw in lines(file, limit=2**25):      # or elements, records, lines_between
            ...

`raw` is the document as it is in the file, or a ValueError with the reason why it cannot be read. A
line or record above the limit of bytes is such an error, and the next one is read. The name of a
file decides how it is decompressed.
"""

import csv
import io
import json
import lzma
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import IO, Any, BinaryIO, TypeVar, cast

import fsspec.asyn
from fsspec import AbstractFileSystem
from fsspec.compression import compr, register_compression
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import infer_compression

from titan_lite.config.errors import MachineError
from titan_lite.data import servers
from titan_lite.data.servers import RefusedError, retried, serves_no_ranges, why_not_at_url
from titan_lite.text import error_line

BLOCK = 2**20  # bytes that are read at once where nothing in them is kept
HTTP = ("http://", "https://")
# what a damaged file at a URL raises; anything else is of the server or the way to it
DAMAGED_AT_URL = (EOFError, ValueError, zlib.error, lzma.LZMAError, zipfile.BadZipFile)
REMOTE = ("s3fs", "gcsfs", "adlfs")  # packages of the extra `remote`
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
JSON_DECODER = json.JSONDecoder()
JSON_SPACES = re.compile(r"[ \t\r\n]*")
MAX_NAMES_SHOWN = 20
MAX_NAME_SHOWN = 40  # characters

T = TypeVar("T")


class NoText(ValueError):
    """The reason why a document has no text."""

    def __init__(self, why: str, instead: str = ""):
        """instead: a setting with which it has one, if known."""
        super().__init__(why)
        self.instead = instead


class TooLarge(ValueError):
    """A document above the limit of bytes."""

    def __init__(self, limit: int):
        super().__init__(f"more than data.max_document_mib = {limit >> 20}")


def list_names(names: Sequence[str]) -> str:
    """Return names from a file in one line of some hundred characters."""
    words = []
    for name in names[:MAX_NAMES_SHOWN]:
        is_fine = len(name) <= MAX_NAME_SHOWN and name.isprintable()
        words.append(name if is_fine else ascii(name[:MAX_NAME_SHOWN]))
    if len(names) > MAX_NAMES_SHOWN:
        words.append("...")
    return ", ".join(words) or "none"


def no_column(field: str, names: Sequence[str], texts: Sequence[str] | None = None) -> NoText:
    """Return the reason why a file has no usable column `field`.

    texts: columns with text, if known.
    """
    what = "several columns" if field in names else "no column"
    why = f'data.text_field = "{field}" is {what} of it; its columns: {list_names(names)}'
    if texts is None:
        return NoText(why, "one of these as data.text_field")
    return NoText(why, f'data.text_field = "{list_names(texts[:1])}"' if texts else "")


def is_url(path: str) -> bool:
    return "://" in path


def without_query(path: str) -> str:
    """Return the part of a URL of http that ends in the file's name; other paths as they are."""
    return path.partition("?")[0] if path.startswith(HTTP) else path


def file_system(url: str) -> tuple[AbstractFileSystem, str]:
    """Return the file system of a URL, and the path there. Raises what its library does.

    A server of http that does not answer is an error after servers.ANSWER_LIMIT seconds, and sends
    files as they are: their sizes are those of what is read.
    """
    options: dict[str, dict[str, Any]] = {}
    for protocol in ("http", "https"):
        if f"{protocol}://" in url:
            from aiohttp import ClientTimeout  # here, since few runs need it

            limits = ClientTimeout(
                total=None, sock_connect=servers.CONNECT_LIMIT, sock_read=servers.ANSWER_LIMIT
            )
            headers = {"Accept-Encoding": "identity"}
            client = {"timeout": limits, "headers": headers}
            if infer_compression(_name_in(url)):  # some say of an a.gz that they have compressed it
                client["auto_decompress"] = False
            options[protocol] = {"client_kwargs": client}
    return url_to_fs(url, **options)


def info_at_url(fs: AbstractFileSystem, path: str) -> dict[str, Any]:
    """Return what a file system of fsspec says of a file. Raises ValueError if its size is not
    known.
    """
    info = fs.info(path)
    if info["size"] is None and "http" in fs.protocol and infer_compression(_name_in(path)):
        info["size"] = fsspec.asyn.sync(fs.loop, _size_of_encoded, fs, path)
    if info["size"] is None:
        raise ValueError("the server does not say its size; use another server, or a copy on disk")
    return info


async def _size_of_encoded(fs: Any, path: str) -> int | None:  # noqa: ANN401 fsspec's for http
    """Return the size of a compressed file of which a server says that it has compressed it, as
    Content-Encoding: gzip for a.gz; fsspec does not take the size that it says then.
    """
    session = await fs.set_session()
    async with session.head(fs.encode_url(path), allow_redirects=True) as answer:
        answer.raise_for_status()
        encoding = answer.headers.get("Content-Encoding", "").removeprefix("x-")
        size = answer.headers.get("Content-Length")
    return int(size) if size and encoding == infer_compression(_name_in(path)) else None


@contextmanager
def open_file(file: str) -> Iterator[BinaryIO]:
    """Open a file, on disk or at a URL, for reading its bytes, decompressed.

    Where a URL cannot be reached, opening and reading raise MachineError or RefusedError.
    """
    if not is_url(file):
        compression = infer_compression(file)
        with LocalFileSystem().open(file, "rb", compression=compression) as on_disk:
            yield _buffered(on_disk)
        return
    with ExitStack() as files:
        opened: IO[bytes] = files.enter_context(open_at_url(file))
        if compression := infer_compression(_name_in(file)):
            opened = files.enter_context(compr[compression](opened, mode="r"))
        yield _buffered(opened)


def open_at_url(url: str) -> io.BufferedReader:
    """Open a file at a URL for reading its bytes as they are there. Raises MachineError and
    RefusedError.
    """
    return io.BufferedReader(_FileAtUrl(url), BLOCK // 8)


def _name_in(url: str) -> str:
    """Return the part of a URL that ends in the file's name."""
    return without_query(url.partition("::")[0])


def _buffered(file: IO[bytes]) -> BinaryIO:
    """Return a file that has `readline(size)`, which one that is not compressed may lack."""
    has_lines = hasattr(file, "peek")
    return cast(BinaryIO, file if has_lines else io.BufferedReader(cast(Any, file), BLOCK // 8))


class _FileAtUrl(io.RawIOBase):
    """A file at a URL.

    After an error that may pass, and an answer that ends early, it is opened again and read on from
    the byte that was reached. Raises MachineError if that fails for a while (servers.retried), what
    a damaged file raises, and RefusedError for any other error of its library.
    """

    def __init__(self, url: str):
        self.url = url
        self.file: Any = None  # fsspec's; None: to be opened
        self.position = 0  # bytes
        self.size: int | None = None  # bytes, if known
        self._do(lambda file: None)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_CUR:  # the file may have been opened again
            offset, whence = self.position + offset, io.SEEK_SET
        self._do(lambda file: file.seek(offset, whence))
        return self.position

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401 io's
        read = self._do(lambda file: self._read(file, len(buffer)))
        buffer[: len(read)] = read
        return len(read)

    def _read(self, file: BinaryIO, size: int) -> bytes:
        read = file.read(size)
        if not read and self.size is not None and file.tell() < self.size:
            raise ConnectionError(f"the server ends at byte {file.tell():,} of {self.size:,}")
        return read

    def _do(self, action: Callable[[Any], T]) -> T:
        """Return what an action on the file returns, after which its position is this one's."""

        def attempt() -> T:
            if self.file is None:
                self._open()
            try:
                done = action(self.file)
                self.position = self.file.tell()
            except Exception:
                self._drop()
                raise
            return done

        try:
            return retried(attempt, self.url)
        except (*DAMAGED_AT_URL, MachineError):
            raise
        except Exception as error:  # each library has errors of its own
            raise RefusedError(why_not_at_url(error)) from error

    def _open(self) -> None:
        """Open the file at the position."""
        # kept: that of a zip closes the zip when nothing refers to it
        self.fs, path = file_system(self.url)
        options = {}
        if "http" in self.fs.protocol and infer_compression(_name_in(path)):
            info = info_at_url(self.fs, path)
            if info.get("partial", True):  # the server has ranges
                options["size"] = info["size"]
        self.file = self.fs.open(path, "rb", **options)
        self.size = getattr(self.file, "size", None)
        if self.position:
            try:
                self.file.seek(self.position)
            except ValueError as error:
                if not serves_no_ranges(error):
                    raise
                while before := self.position - self.file.tell():
                    if not self.file.read(min(before, BLOCK)):
                        raise ConnectionError(
                            f"the server ends at byte {self.file.tell():,}"
                        ) from None

    def _drop(self) -> None:
        file, self.file = self.file, None
        if file is not None:
            with suppress(Exception):  # of a connection that is lost
                file.close()

    def close(self) -> None:
        self._drop()
        super().close()


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
    try:
        return archive.open(names[0])
    except RuntimeError as error:  # encrypted, or compressed in a way that Python does not know
        raise ValueError(error_line(error)) from None


register_compression("zstd", _all_frames, "zst", force=True)
register_compression("zip", _only_member, "zip", force=True)


# Lines


def lines(file: BinaryIO, limit: int) -> Iterator[tuple[int, bytes | ValueError]]:
    """Yield (number, line) of the lines that are not blank."""
    number = 0
    while line := file.readline(limit + 1):
        number += 1
        if len(line) > limit:
            yield number, TooLarge(limit)
            _skip_rest(file, line)
        elif not line.isspace():
            yield number, line


def lines_between(
    file: BinaryIO, limit: int, start: int, end: int
) -> Iterator[tuple[int, bytes | ValueError]]:
    """Yield (offset, line) of the lines that begin between the offsets `start` and `end`."""
    offset = _seek_line(file, start, end)
    while offset < end and (line := file.readline(limit + 1)):
        if len(line) > limit:
            yield offset, TooLarge(limit)
            offset += _skip_rest(file, line)
        elif not line.isspace():
            yield offset, line
        offset += len(line)


def _skip_rest(file: BinaryIO, line: bytes) -> int:
    """Skip the rest of a line that is too large, and return its bytes."""
    skipped = 0
    while line and not line.endswith(b"\n"):
        line = file.readline(BLOCK)
        skipped += len(line)
    return skipped


def _seek_line(file: BinaryIO, start: int, end: int) -> int:
    """Seek to the first line that begins from `start` on, and return its offset.

    It is at least `end` if no line begins before.
    """
    if start == 0:
        return 0
    file.seek(start - 1)
    offset = start - 1
    while offset < end and (rest := file.readline(BLOCK)):
        offset += len(rest)
        if rest.endswith(b"\n"):
            return offset
    return end


# Elements of a JSON array


def is_array(file: BinaryIO) -> bool:
    """Return True if the file is a JSON array, False if it has lines of JSON."""
    return file.read(BLOCK).removeprefix(BYTE_ORDER_MARK).lstrip()[:1] == b"["


def elements(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield (number, JSON) of the elements of an array, which is read into memory.

    The JSON builder of `datasets` is not used: it turns all texts into JSON, with quotes and
    escapes, if one of them is a number, and ends at a byte that is not UTF-8. Raises ValueError
    where the array is not JSON or not complete.
    """
    # a byte that is not UTF-8 is kept: only the element that has it is a bad document
    text = file.read().removeprefix(BYTE_ORDER_MARK).decode(errors="surrogateescape")
    position = _skip_spaces(text, text.index("[") + 1)
    if text[position : position + 1] == "]":  # an empty array
        _check_end(text, position)
        return
    number = 0
    while True:
        number += 1
        end = _end_of_element(text, position)
        yield number, text[position:end].encode(errors="surrogateescape")
        separator = text[end : end + 1]
        if separator == "]":
            _check_end(text, end)
            return
        if separator != ",":  # "": the file ends
            raise ValueError(f"not an array in JSON: {separator!r} where , or ] should follow")
        position = _skip_spaces(text, end + 1)


def _end_of_element(text: str, position: int) -> int:
    """Return the position of what follows the JSON value at `position` and its spaces."""
    try:
        _, end = JSON_DECODER.raw_decode(text, position)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not an array in JSON: {error}") from None
    return _skip_spaces(text, end)


def _check_end(text: str, position: int) -> None:
    """Raise ValueError if there is more after the ] at `position`."""
    if _skip_spaces(text, position + 1) < len(text):
        raise ValueError("not an array in JSON: there is more after its end")


def _skip_spaces(text: str, position: int) -> int:
    """Return the position of the next character that is not a space of JSON."""
    spaces = JSON_SPACES.match(text, position)
    assert spaces is not None  # it matches nothing, too
    return spaces.end()


# Records of a csv file


class _RecordLines(Iterator[str]):
    """The lines of a csv file, for csv.reader.

    Raises TooLarge, after all its lines, for a record above the limit.
    """

    def __init__(self, file: BinaryIO, limit: int):
        # csv.reader wants line ends as they are; bytes that are not UTF-8 are found in the text of
        # their record
        self.text = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")
        self.limit = limit  # characters of a record
        self.count = 0  # lines read
        self.size = 0  # characters read of the current record
        self.is_quoted = False  # whether it continues in the next line

    def begin_record(self) -> None:
        self.size = 0
        self.is_quoted = False

    def __next__(self) -> str:
        line = self._next_line()
        if not line:
            raise StopIteration
        if self.size > self.limit:
            while self.is_quoted and self._next_line():
                pass
            raise TooLarge(self.limit)
        return line

    def _next_line(self) -> str:
        line = self.text.readline()
        self.count += 1
        self.size += len(line)
        if line.count('"') % 2:
            self.is_quoted = not self.is_quoted
        return line


def records(file: BinaryIO, limit: int, field: str) -> Iterator[tuple[int, str | ValueError]]:
    """Yield (line, text) of the records of a csv file, whose first one names the columns."""
    csv.field_size_limit(limit)
    record_lines = _RecordLines(file, limit)
    # strict: otherwise a quote that is never closed makes one document of the rest of the file
    reader = csv.reader(record_lines, strict=True)
    header: list[str] = []
    while True:
        line = record_lines.count + 1
        record_lines.begin_record()
        try:
            record = next(reader, None)
        except (csv.Error, TooLarge) as error:
            yield line, error if isinstance(error, TooLarge) else ValueError(str(error))
            if not header:
                return
            continue
        if record is None:
            return
        if not record:  # a blank line
            continue
        if header:
            yield line, _text_of_record(record, header, field)
            continue
        if wrong := _wrong_header(record, field):
            yield line, wrong
            return
        header = record


def _wrong_header(names: list[str], field: str) -> ValueError | None:
    """Return the reason why the columns of a csv file have no text, or None."""
    if names.count(field) == 1:
        return None
    if any("\0" in name for name in names):
        return ValueError("not UTF-8 (its columns have NUL characters, as UTF-16 has)")
    return no_column(field, names)


def _text_of_record(record: list[str], header: list[str], field: str) -> str | ValueError:
    if len(record) > len(header):  # such as a text with a comma and without quotes
        return ValueError(
            f"this record has {len(record)} fields, and the first one, which names them,"
            f" {len(header)}: a text with a comma needs quotes"
        )
    column = header.index(field)
    if column < len(record):
        return record[column]
    return NoText(
        f'data.text_field = "{field}" is column {column + 1}, and this record has {len(record)}'
    )
