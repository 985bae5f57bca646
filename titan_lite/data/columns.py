"""Read the texts in a column of parquet and Arrow files, in batches of rows.

    with open_file("a.parquet") as file:
        for row, raw in parquet_rows(file, row_group=0, first_row=0, field="text"):
            ...

`raw` is a text's bytes, None, or a ValueError with the reason why the column has no texts. pyarrow
is called, and not the builders of `datasets`, which call it too: of an Arrow file they refuse all
rows of a batch if the bytes of one text are not UTF-8, they expand patterns in the names of files,
leave a lock file in the user's cache for each, and decode with threads, which a forked loader
process should not start.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

import pyarrow
from pyarrow import parquet

from titan_lite.data.readers import NoText, no_column

ROWS_AT_ONCE = 1000
# types of texts as types of bytes: bytes that are not UTF-8 then make one bad document
TEXTS_AS_BYTES = {
    pyarrow.string(): pyarrow.binary(),
    pyarrow.large_string(): pyarrow.large_binary(),
    pyarrow.string_view(): pyarrow.binary_view(),
}
TYPES_OF_BYTES = set(TEXTS_AS_BYTES.values())


def row_groups(file: BinaryIO) -> list[tuple[int, int]]:
    """Return (bytes, rows) of each row group of a parquet file.

    Raises ValueError or OSError for a damaged one.
    """
    with _damage_is_a_value_error():
        metadata = parquet.read_metadata(file)
        groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
        return [(group.total_byte_size, group.num_rows) for group in groups]


def parquet_rows(
    file: BinaryIO, row_group: int, first_row: int, field: str
) -> Iterator[tuple[int, object]]:
    """Yield (row, raw) of a row group whose first row has number `first_row`.

    Raises ValueError or OSError.
    """
    with _damage_is_a_value_error():
        opened = parquet.ParquetFile(file)
        if wrong := _wrong_column(opened.schema_arrow, field):
            yield first_row, wrong
            return
        batches = opened.iter_batches(
            ROWS_AT_ONCE, row_groups=[row_group], columns=[field], use_threads=False
        )
        yield from _rows((batch.column(field) for batch in batches), first_row)


def arrow_rows(file: BinaryIO, field: str) -> Iterator[tuple[int, object]]:
    """Yield (row, raw) of an Arrow file, or of one or several streams. Raises ValueError or
    OSError.
    """
    with _damage_is_a_value_error():
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        first_row = 0
        for reader in [pyarrow.ipc.open_file(file)] if is_file else _streams(file):
            if wrong := _wrong_column(reader.schema, field):
                yield first_row, wrong
                return
            batches = _batches_of_file(reader) if is_file else _batches_of_stream(reader, file)
            for row, raw in _rows((batch.column(field) for batch in batches), first_row):
                yield row, raw
                first_row = row + 1


def _batches_of_file(reader: pyarrow.RecordBatchFileReader) -> Iterator[pyarrow.RecordBatch]:
    return (reader.get_batch(index) for index in range(reader.num_record_batches))


def _streams(file: BinaryIO) -> Iterator[pyarrow.RecordBatchStreamReader]:
    """Yield a reader of each stream, which must be read to its end: cat makes a file of several."""
    while True:
        yield pyarrow.ipc.open_stream(file)
        if not file.read(1):
            return
        file.seek(-1, os.SEEK_CUR)


def _batches_of_stream(
    reader: pyarrow.RecordBatchStreamReader, file: BinaryIO
) -> Iterator[pyarrow.RecordBatch]:
    """Yield the batches of a stream. Raises ValueError if it has no mark of its end: pyarrow takes
    a stream that is cut between two batches as complete.
    """
    position = file.tell()
    for batch in reader:
        yield batch
        position = file.tell()
    if file.tell() == position:
        raise ValueError("the stream has no mark of its end: the file is cut short")


@contextmanager
def _damage_is_a_value_error() -> Iterator[None]:
    try:
        yield
    except pyarrow.ArrowException as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _rows(columns: Iterator[pyarrow.Array], first_row: int) -> Iterator[tuple[int, object]]:
    for column in columns:
        column = _as_bytes(column)
        column.validate(full=True)  # a damaged file may have offsets out of bounds
        for row, value in enumerate(column, start=first_row):
            yield row, value.as_py()
        first_row += len(column)


def _as_bytes(column: pyarrow.Array) -> pyarrow.Array:
    if isinstance(column, pyarrow.DictionaryArray):
        return pyarrow.DictionaryArray.from_arrays(column.indices, _as_bytes(column.dictionary))
    return column.view(TEXTS_AS_BYTES.get(column.type, column.type))


def _wrong_column(schema: pyarrow.Schema, field: str) -> NoText | None:
    """Return the reason why a column has no texts, or None if it has texts."""
    texts = [name for name, kind in zip(schema.names, schema.types, strict=True) if _is_text(kind)]
    if schema.names.count(field) != 1:
        return no_column(field, schema.names, texts)
    if field not in texts:
        instead = no_column(field, schema.names, texts).instead
        kind = str(schema.field(field).type)[:100]
        return NoText(f'data.text_field = "{field}" is a column of {kind}, not of text', instead)
    return None


def _is_text(kind: pyarrow.DataType) -> bool:
    if pyarrow.types.is_dictionary(kind):
        kind = kind.value_type
    return kind in TEXTS_AS_BYTES or kind in TYPES_OF_BYTES
