"""Read the documents of text formats one after the other, from a file on disk or at a URL.

    with open_file("s3://corpus/a.jsonl.gz") as file:
        for number, raw in lines(file, limit=2**25):      # or lines_between
            ...

`raw` is the document as it is in the file, or a ValueError with the reason why it cannot be read. A
line above the limit of bytes is such an error, and the next one is read. The name of a file decides
how it is decompressed.
"""

import io
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, BinaryIO, TypeVar

import fsspec.asyn
from fsspec import AbstractFileSystem
from fsspec.compression import compr, register_compression
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import infer_compression

from titan_lite.config.errors import MachineError
from titan_lite.data import servers
from titan_lite.data.servers import RefusedError, retried, serves_no_ranges, why_not_at_url
from titan_lite.text import first_names, one_line

BLOCK = 2**20  # bytes that are read at once where nothing in them is kept
HTTP = ("http://", "https://")
# what a damaged file at a URL raises; anything else is of the server or the way to it
DAMAGED_AT_URL = (EOFError, ValueError, zlib.error)
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
CONVERT = (
    'convert other formats, as with datasets.load_dataset("csv", data_files="a.csv", split="train")'
    '.to_parquet("a.parquet")'
)
MAX_NAMES_SHOWN = 20
MAX_CHARACTERS_SHOWN = 800  # of all names

T = TypeVar("T")


class NoText(ValueError):
    """The reason why a document has no text in its field, such as "is null"; whoever knows the key
    of the field names it.
    """

    def __init__(self, why: str, other: str = ""):
        """other: a field that has one, if known."""
        super().__init__(why)
        self.other = other


class TooLarge(ValueError):
    """A document above the limit of bytes."""

    def __init__(self, limit: int):
        super().__init__(f"more than data.max_document_mib = {limit >> 20}")


def list_names(names: Sequence[str]) -> str:
    """Return names from a file in one line of some hundred characters."""
    return one_line(first_names(names, MAX_NAMES_SHOWN), MAX_CHARACTERS_SHOWN) or "none"


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
    if not url.startswith(HTTP):
        return url_to_fs(url)
    from aiohttp import ClientTimeout  # here, since few runs need it

    limits = ClientTimeout(
        total=None, sock_connect=servers.CONNECT_LIMIT, sock_read=servers.ANSWER_LIMIT
    )
    client: dict[str, Any] = {"timeout": limits, "headers": {"Accept-Encoding": "identity"}}
    if infer_compression(without_query(url)):  # some say of an a.gz that they have compressed it
        client["auto_decompress"] = False
    return url_to_fs(url, client_kwargs=client)


def info_at_url(fs: AbstractFileSystem, path: str) -> dict[str, Any]:
    """Return what a file system of fsspec says of a file. Raises ValueError if its size is not
    known.
    """
    info = fs.info(path)
    if info["size"] is None and "http" in fs.protocol and infer_compression(without_query(path)):
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
    return int(size) if size and encoding == infer_compression(without_query(path)) else None


@contextmanager
def open_file(file: str) -> Iterator[BinaryIO]:
    """Open a file, on disk or at a URL, for reading its bytes, decompressed.

    Where a URL cannot be reached, opening and reading raise MachineError or RefusedError.
    """
    if not is_url(file):
        compression = infer_compression(file)
        with LocalFileSystem().open(file, "rb", compression=compression) as on_disk:
            yield on_disk
        return
    with ExitStack() as files:
        opened: BinaryIO = files.enter_context(open_at_url(file))
        if compression := infer_compression(without_query(file)):
            opened = files.enter_context(compr[compression](opened, mode="r"))
        yield opened


def open_at_url(url: str, block_size: int | None = None) -> io.BufferedReader:
    """Open a file at a URL for reading its bytes as they are there. Raises MachineError and
    RefusedError.

    block_size: bytes that a server is asked for beyond those that are read; None: as its library
    has it, some MiB.
    """
    return io.BufferedReader(_FileAtUrl(url, block_size), block_size or BLOCK // 8)


class _FileAtUrl(io.RawIOBase):
    """A file at a URL.

    After an error that may pass, and an answer that ends early, it is opened again and read on from
    the byte that was reached. Raises MachineError if that fails for a while (servers.retried), what
    a damaged file raises, and RefusedError for any other error of its library.
    """

    def __init__(self, url: str, block_size: int | None):
        self.url = url
        self.block_size = block_size
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
        fs, path = file_system(self.url)
        options = {}
        if "http" in fs.protocol and infer_compression(without_query(path)):
            info = info_at_url(fs, path)
            if info.get("partial", True):  # the server has ranges
                options["size"] = info["size"]
        self.file = fs.open(path, "rb", self.block_size, **options)
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


register_compression("zstd", _all_frames, "zst", force=True)


def lines(file: BinaryIO, limit: int) -> Iterator[tuple[int, bytes | ValueError]]:
    """Yield (number, line) of the lines that are not blank. Raises ValueError for a JSON array."""
    number = 0
    while line := file.readline(limit + 1):
        number += 1
        if number == 1 and line.removeprefix(BYTE_ORDER_MARK).lstrip()[:1] == b"[":
            raise ValueError(f"a JSON array, and not an object a line: {CONVERT}")
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
