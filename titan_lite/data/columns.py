"""Read the documents of parquet and Arrow files with bounded memory: sizes are checked before anything is decoded.

    for row, raw in parquet_rows("a.parquet", group=0, first=0, field="text", limit=2**25): ...

`raw` is a text's bytes, None, or a ValueError with the reason why it cannot be read. limit: bytes of a document. Both formats
decode many rows at once, and a small file can expand to much: a string of a thousand rows is stored once, and compressed. So
sizes are read from the headers of pages and buffers, which the decoder follows (a footer may be wrong), and a string of many rows
is not repeated in memory. What is decoded at once has at most PAGES x limit bytes.
"""

import itertools
import os
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import numpy as np
import pyarrow
from pyarrow import compute

from titan_lite.data.readers import BLOCK, NoText, TooLarge, no_column

PAGES = 8  # a decompressed page (parquet) or batch (Arrow) has at most PAGES x limit bytes
FOOTER = 8  # a parquet file's footer, which takes a hundred times its size in memory, has at most limit / FOOTER bytes
_ROWS = 1024  # decoded at once
_BYTES = {pyarrow.string(): pyarrow.binary(), pyarrow.large_string(): pyarrow.large_binary()}
_BYTES |= {pyarrow.string_view(): pyarrow.binary_view()}
_DELTA = (
    6,
    7,
)  # parquet encodings that decode all lengths at once: DELTA_LENGTH_BYTE_ARRAY, DELTA_BYTE_ARRAY
_DELTA_BYTE_ARRAY = 7


def row_groups(file: str, limit: int) -> list[tuple[int, int]]:
    """Return (bytes, rows) of each row group of a parquet file, from its footer. Raises ValueError or an error of pyarrow."""
    with _open_parquet(file, limit) as opened:
        groups = (
            opened.metadata.row_group(index) for index in range(opened.metadata.num_row_groups)
        )
        return [(max(0, group.total_byte_size), max(0, group.num_rows)) for group in groups]


def parquet_rows(
    file: str, group: int, first: int, field: str, limit: int
) -> Iterator[tuple[int, Any]]:
    """Yield (row, raw) of a row group whose first row has number `first`. Raises ValueError or an error of pyarrow."""
    with _open_parquet(file, limit) as opened:
        metadata, schema = opened.metadata, opened.schema_arrow
    if wrong := _wrong_column(schema, field):
        yield first, wrong
        return
    at_once, shares = _ROWS, False
    with open(file, "rb") as source:
        columns = metadata.row_group(group)
        for column in map(columns.column, range(columns.num_columns)):
            if column.path_in_schema == field or column.path_in_schema.startswith(f"{field}."):
                for values, encoding in _pages(source, column, limit):
                    # At most two pages at once. In DELTA_BYTE_ARRAY, one byte may repeat the previous string.
                    at_once = (
                        min(at_once, 1 if encoding == _DELTA_BYTE_ARRAY else max(1, values))
                        if encoding >= 0
                        else at_once
                    )
                    shares |= encoding < 0
    with _open_parquet(
        file, limit, metadata=metadata, read_dictionary=[field] if shares else None
    ) as opened:
        for batch in opened.iter_batches(
            at_once, row_groups=[group], columns=[field], use_threads=False
        ):
            yield from _values(batch.column(field), first, limit)
            first += len(batch)


def _open_parquet(file: str, limit: int, **how: Any) -> Any:
    from pyarrow import parquet

    with open(file, "rb") as source:
        source.seek(max(0, os.fstat(source.fileno()).st_size - 8))
        footer, magic = int.from_bytes(source.read(4), "little"), source.read()
    if magic == b"PAR1" and footer > limit // FOOTER:
        raise ValueError(
            f"a footer of {footer / 2**20:.1f} MiB, more than 1/{FOOTER} of data.max_document_mib = {limit >> 20}; "
            f"use {(footer * FOOTER >> 20) + 1}"
        )
    # without a buffer size, a column is read at once
    return parquet.ParquetFile(file, buffer_size=BLOCK, pre_buffer=False, **how)


def _pages(source: BinaryIO, column: Any, limit: int) -> Iterator[tuple[int, int]]:
    """Yield (values, encoding; -1: a dictionary) of a column's pages. Raises ValueError if one is too large to decode."""
    at, seen = column.data_page_offset, 0
    if column.has_dictionary_page and 0 < column.dictionary_page_offset < at:
        at = column.dictionary_page_offset
    end = (
        at + column.total_compressed_size + 100
    )  # columns of an early writer have some bytes more than the footer says
    most = PAGES * limit
    while seen < column.num_values and 0 <= at < end:
        source.seek(at)
        header = _struct(source)
        size, compressed = header.get(2, -1), header.get(3, -1)
        dictionary, v1, v2 = header.get(7), header.get(5), header.get(8)
        about = dictionary or v1 or v2 or {}
        values = about.get(1, 0)
        encoding = -1 if dictionary else about.get(4 if v2 else 2, 0)
        # in memory: 16 bytes for each entry of a dictionary, 4 for each length
        beside = values * (16 if dictionary else 4 if encoding in _DELTA else 0)
        if min(size, compressed, values) < 0:
            raise ValueError("a page of negative size")
        if (largest := max(size, compressed, beside)) > most:
            raise ValueError(
                f"a page of {largest / 2**20:.0f} MiB, more than {PAGES} x data.max_document_mib = {limit >> 20}; "
                f"use {(largest // PAGES >> 20) + 1}"
            )
        seen += 0 if dictionary else values
        if about:
            yield values, encoding
        at = source.tell() + compressed


def _struct(source: BinaryIO) -> dict[int, Any]:
    """Return the 32-bit integers and the structs of a struct in Thrift's compact protocol. Raises ValueError, EOFError."""

    def byte() -> int:
        if not (one := source.read(1)):
            raise EOFError("the file ends within a page's header")
        return one[0]

    def number() -> int:
        value = shift = 0
        while (part := byte()) & 128:
            value, shift = value | (part & 127) << shift, shift + 7
            if shift > 63:
                raise ValueError("a page's header has a number of more than 64 bits")
        return value | part << shift

    def value(kind: int, within: bool = False) -> Any:
        if kind in (1, 2):  # a boolean; only in a list it has a byte of its own
            return byte() if within else None
        if kind == 3:
            return byte()
        if kind in (4, 5, 6):
            zigzag = number() & 0xFFFFFFFF
            return (zigzag >> 1) ^ -(zigzag & 1)
        if kind == 7:
            return source.seek(8, os.SEEK_CUR)
        if kind == 8:
            return source.seek(min(number(), 2**31), os.SEEK_CUR)
        if kind in (9, 10):
            head = byte()
            count = number() if head >> 4 == 15 else head >> 4
            for _ in range(count):
                value(head & 15, within=True)
            return None
        if kind == 11:
            kinds = byte() if (count := number()) else 0
            for _ in range(count):
                value(kinds >> 4, within=True)
                value(kinds & 15, within=True)
            return None
        if kind == 12:
            return struct()
        raise ValueError("a page's header is damaged")

    def struct() -> dict[int, Any]:
        fields: dict[int, Any] = {}
        name = 0
        while head := byte():
            zigzag = 0 if head >> 4 else number()
            name = name + (head >> 4) if head >> 4 else (zigzag >> 1) ^ -(zigzag & 1)
            found = value(kind := head & 15)
            if kind in (5, 12):  # the decoder ignores a field of another type
                fields[name] = found
        return fields

    return struct()


def arrow_rows(file: str, field: str, limit: int) -> Iterator[tuple[int, Any]]:
    """Yield (row, raw) of an Arrow file or stream. Raises ValueError or an error of pyarrow."""
    with pyarrow.memory_map(file) as source, pyarrow.memory_map(file) as ahead:
        if source.read(6) == b"ARROW1":  # a file is a stream with a footer, which is not trusted
            source.seek(8)
            ahead.seek(8)
        else:
            source.seek(0)
        messages, row = _checked(ahead, limit), 0
        next(messages, None)  # the schema
        # another byte order would be converted all at once
        options = pyarrow.ipc.IpcReadOptions(ensure_native_endian=False, use_threads=False)
        reader = pyarrow.ipc.open_stream(source, options=options)
        if wrong := _wrong_column(reader.schema, field):
            yield row, wrong
            return
        while True:
            for kind in messages:
                if kind == "record batch":
                    break
            try:
                batch = reader.read_next_batch()
            except StopIteration:
                return
            yield from _values(batch.column(field), row, limit)
            row += len(batch)


def _checked(source: Any, limit: int) -> Iterator[str]:
    """Yield the kind of each message of a stream. Raises ValueError if one is too large to decode."""
    dictionaries: dict[int, int] = {}
    for message in pyarrow.ipc.MessageReader.open_stream(source):
        size = 0
        if message.type in ("record batch", "dictionary"):
            table = _Flatbuffer(memoryview(message.metadata))
            header = table.table(table.root, 2)
            batch = table.table(header, 1) if message.type == "dictionary" else header
            size = _decompressed(table, batch, message.body)
            if message.type == "dictionary":
                name = table.number(header, 0, 8)
                is_delta = table.number(header, 2, 1)
                dictionaries[name] = max(size, len(message.body or b"")) + (
                    dictionaries.get(name, 0) if is_delta else 0
                )
                size = max(size, sum(dictionaries.values()))
        if size > PAGES * limit:
            raise ValueError(
                f"a {message.type} of {size / 2**20:.0f} MiB, more than {PAGES} x data.max_document_mib = {limit >> 20}; "
                f"use {(size // PAGES >> 20) + 1}"
            )
        yield message.type


def _decompressed(table: "_Flatbuffer", batch: int, body: Any) -> int:
    """Return the bytes of a record batch after decompression; 0 if it is not compressed."""
    if not table.field(batch, 3):
        return 0
    size, content = 0, memoryview(body)
    at, count = table.vector(batch, 2, width=16)
    for buffer in range(at, at + 16 * count, 16):
        begin, length = table.integer(buffer, 8), table.integer(buffer + 8, 8)
        if length >= 8 and 0 <= begin <= len(content) - 8:
            size += max(length, int.from_bytes(content[begin : begin + 8], "little", signed=True))
    return size


class _Flatbuffer:
    """Read positions and numbers of a flatbuffer, whose tables have numbered fields. Raises ValueError if out of bounds."""

    def __init__(self, data: memoryview):
        self.data = data
        self.root = self.integer(0, 4)

    def integer(self, at: int, width: int) -> int:
        if not 0 <= at <= len(self.data) - width:
            raise ValueError("a message's header is damaged")
        return int.from_bytes(self.data[at : at + width], "little", signed=width > 2)

    def field(self, table: int, number: int) -> int:
        """Return the offset of a field; 0: it has its default."""
        vtable = table - self.integer(table, 4)
        slot = 4 + 2 * number
        offset = self.integer(vtable + slot, 2) if slot < self.integer(vtable, 2) else 0
        return table + offset if offset else 0

    def number(self, table: int, field: int, width: int) -> int:
        return self.integer(at, width) if (at := self.field(table, field)) else 0

    def table(self, table: int, field: int) -> int:
        if not (at := self.field(table, field)):
            raise ValueError("a message's header is damaged")
        return at + self.integer(at, 4)

    def vector(self, table: int, field: int, width: int) -> tuple[int, int]:
        """Return (offset of the first element, number of elements) of a vector whose elements have `width` bytes."""
        if not self.field(table, field):
            return 0, 0
        at = self.table(table, field)
        count = self.integer(at, 4)
        if not 0 <= count * width <= len(self.data):
            raise ValueError("a message's header is damaged")
        return at + 4, count


def _wrong_column(schema: Any, field: str) -> NoText | None:
    """Return the reason why a column has no texts, or None if it has texts."""
    texts = [name for name, kind in zip(schema.names, schema.types, strict=True) if _is_text(kind)]
    if schema.names.count(field) != 1:
        return no_column(field, schema.names, texts)
    if field not in texts:
        instead = no_column(field, schema.names, texts).instead
        return NoText(
            f'data.text_field = "{field}" is a column of {str(schema.field(field).type)[:100]}, not of text',
            instead,
        )
    return None


def _is_text(kind: Any) -> bool:
    of = pyarrow.types
    if of.is_dictionary(kind) or of.is_run_end_encoded(kind):
        return _is_text(kind.value_type)
    kind = kind.storage_type if isinstance(kind, pyarrow.BaseExtensionType) else kind
    return kind in _BYTES or kind in _BYTES.values() or of.is_fixed_size_binary(kind)


def _values(column: Any, first: int, limit: int) -> Iterator[tuple[int, Any]]:
    """Yield (row, bytes or None or a ValueError) one by one, so that a string of many rows is in memory once."""
    if isinstance(column, pyarrow.ExtensionArray):
        column = column.storage
    places: Iterable[int | None] = range(len(column))
    if pyarrow.types.is_dictionary(column.type):
        # from_arrays checks that indices are in the dictionary
        column = pyarrow.DictionaryArray.from_arrays(column.indices, _in_bytes(column.dictionary))
        column, places = column.dictionary, column.indices.to_pylist()
    elif pyarrow.types.is_run_end_encoded(column.type):
        column.validate(full=True)
        begins = itertools.pairwise([0, *column.run_ends.to_pylist()])
        places = (place for place, (begin, end) in enumerate(begins) for _ in range(end - begin))
        column = _in_bytes(column.values)
    else:
        column = _in_bytes(column)
    sizes = _sizes(column)
    for row, place in enumerate(places, start=first):
        size = None if place is None else sizes[place].as_py()
        yield (
            row,
            None if size is None else TooLarge(limit) if size > limit else column[place].as_py(),
        )


def _sizes(column: Any) -> Any:
    """Return the number of bytes of each value."""
    if column.type != pyarrow.binary_view():
        return compute.binary_length(column)
    begins = np.frombuffer(column.buffers()[1], dtype="<i4")[
        4 * column.offset :: 4
    ]  # a view has 16 bytes, first its length
    return compute.if_else(column.is_valid(), pyarrow.array(begins[: len(column)]), None)


def _in_bytes(column: Any) -> Any:
    """Return the column validated (a damaged file may have offsets out of bounds), as bytes (a string may not be UTF-8)."""
    if column.type in _BYTES:
        column = column.view(_BYTES[column.type])
    column.validate(full=True)
    return column
