"""Read the texts in a column of parquet files, in batches of rows.

    with open_file("a.parquet") as file:
        for row, raw in parquet_rows(file, row_group=0, first_row=0, field="text"):
            ...

`raw` is a text's bytes, None, or a ValueError with the reason why the column has no texts. pyarrow
is called, and not the builder of `datasets`, which calls it too: that expands patterns in the names
of files, leaves a lock file in the user's cache for each, and decodes with threads, which a forked
loader process should not start.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

import pyarrow
from pyarrow import parquet

from titan_lite.data.readers import NoText, list_names

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
    other = texts[0] if texts else ""
    if schema.names.count(field) != 1:
        what = "several columns" if field in schema.names else "no column"
        return NoText(f"is {what} of it; its columns: {list_names(schema.names)}", other)
    if field not in texts:
        kind = str(schema.field(field).type)[:100]
        return NoText(f"is a column of {kind}, not of text", other)
    return None


def _is_text(kind: pyarrow.DataType) -> bool:
    if pyarrow.types.is_dictionary(kind):
        kind = kind.value_type
    return kind in TEXTS_AS_BYTES or kind in TYPES_OF_BYTES
