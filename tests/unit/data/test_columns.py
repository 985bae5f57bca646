"""Parquet and Arrow: every kind of text; a bad row is one bad document; damage in one line."""

import io
import random

import pytest

from titan_lite.config import Data
from titan_lite.data.bad_documents import BadDocument
from titan_lite.data.files import local_pieces, read_piece, text_of

pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")


def documents(path):
    data = Data(dataset="local", path=str(path), max_document_mib=1)
    pieces = local_pieces(data)
    return [
        text_of(raw, piece, place, data)
        for piece in pieces
        for place, raw in read_piece(piece, data)
    ]


TEXTS = ["one", "", None, "two \u6f22", "two \u6f22", "x" * 300]
KINDS = [pyarrow.string(), pyarrow.large_string(), pyarrow.binary(), pyarrow.string_view()]
KINDS += [pyarrow.dictionary(pyarrow.int8(), kind) for kind in KINDS[:3]]


def arrow(column, opened=pyarrow.ipc.new_file, **how):
    out = io.BytesIO()
    with opened(
        out, pyarrow.schema([("text", column.type)]), options=pyarrow.ipc.IpcWriteOptions(**how)
    ) as writer:
        writer.write_batch(pyarrow.record_batch([column], names=["text"]))
    return out.getvalue()


def parquet_file(column, **how):
    out = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": column}), out, **how)
    return out.getvalue()


def column(kind):
    plain = pyarrow.array(TEXTS, pyarrow.string())
    return (
        plain.dictionary_encode().cast(kind)
        if pyarrow.types.is_dictionary(kind)
        else plain.cast(kind)
    )


WRITERS = {
    "file.arrow": arrow,
    "compressed.arrow": lambda column: arrow(column, compression="zstd"),
    "stream.arrow": lambda column: arrow(column, pyarrow.ipc.new_stream, compression="lz4"),
    "a.parquet": lambda column: parquet_file(column, row_group_size=4),
}


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_text_is_read(tmp_path, kind, name):
    (tmp_path / name).write_bytes(WRITERS[name](column(kind)))
    found = documents(tmp_path / name)
    assert [text for text in found if isinstance(text, str)] == [text for text in TEXTS if text]
    bad = [text for text in found if not isinstance(text, str)]
    assert [(document.location, document.reason.split()[-1]) for document in bad] == [
        ("row 1", "empty"),
        ("row 2", "text"),
    ]


def test_streams_one_after_the_other_are_read(tmp_path):
    """As `cat a.arrow b.arrow` makes them."""
    parts = [
        arrow(pyarrow.array(texts, pyarrow.string()), pyarrow.ipc.new_stream)
        for texts in (["one"], [], ["two", ""])
    ]
    (tmp_path / "a.arrow").write_bytes(b"".join(parts))
    one, two, bad = documents(tmp_path / "a.arrow")
    assert (one, two, bad.location) == ("one", "two", "row 2")


@pytest.mark.parametrize("name", WRITERS)
def test_a_text_that_is_not_utf8_is_one_bad_document(tmp_path, name):
    raw = pyarrow.array([b"good one", b"\xff\xfe", b"good two"], pyarrow.binary())
    (tmp_path / name).write_bytes(
        WRITERS[name](pyarrow.StringArray.from_buffers(3, *raw.buffers()[1:]))
    )
    first, bad, last = documents(tmp_path / name)
    assert (first, last) == ("good one", "good two")
    assert f"{name}, row 1: not UTF-8 (byte 0" in str(bad)


def test_a_wrong_column_says_which_one_has_text(tmp_path):
    parquet.write_table(pyarrow.table({"id": [1], "body": ["x"]}), tmp_path / "a.parquet")
    [bad] = documents(tmp_path / "a.parquet")
    assert bad.instead == 'data.text_field = "body"'


@pytest.mark.parametrize("name", WRITERS)
def test_damaged_bytes_are_documents_or_told_in_one_line(tmp_path, name):
    rng = random.Random(name)
    whole = WRITERS[name](column(KINDS[0]))
    for _ in range(100):
        content = bytearray(whole)
        for _ in range(3):
            content[rng.randrange(len(content))] = rng.randrange(256)
        length = rng.choice([len(content), rng.randrange(len(content))])
        (tmp_path / name).write_bytes(content[:length])
        for document in documents(tmp_path / name):
            assert isinstance(document, str | BadDocument)
            if isinstance(document, BadDocument):
                assert str(document).isprintable(), str(document)
                assert len(str(document)) < 2000
