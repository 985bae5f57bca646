"""Parquet: every kind of text; a bad row is one bad document; damage in one line."""

import io
import random

import pytest

from titan_lite.config import Data
from titan_lite.data.bad_documents import BadDocument
from titan_lite.data.files import read_piece, text_of
from titan_lite.data.listing import Listing

pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")


def documents(path):
    data = Data(dataset="local", path=str(path), max_document_mib=1)
    pieces = Listing(data).pieces
    return [
        text_of(raw, piece, place, data)
        for piece in pieces
        for place, raw in read_piece(piece, data)
    ]


TEXTS = ["one", "", None, "two \u6f22", "two \u6f22", "x" * 300]
KINDS = [pyarrow.string(), pyarrow.large_string(), pyarrow.binary(), pyarrow.string_view()]
KINDS += [pyarrow.dictionary(pyarrow.int8(), kind) for kind in KINDS[:3]]


def parquet_file(column):
    out = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": column}), out, row_group_size=4)
    return out.getvalue()


def column(kind):
    plain = pyarrow.array(TEXTS, pyarrow.string())
    return (
        plain.dictionary_encode().cast(kind)
        if pyarrow.types.is_dictionary(kind)
        else plain.cast(kind)
    )


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_kind_of_text_is_read(tmp_path, kind):
    (tmp_path / "a.parquet").write_bytes(parquet_file(column(kind)))
    found = documents(tmp_path / "a.parquet")
    assert [text for text in found if isinstance(text, str)] == [text for text in TEXTS if text]
    bad = [text for text in found if not isinstance(text, str)]
    assert [(document.location, document.reason.split()[-1]) for document in bad] == [
        ("row 1", "empty"),
        ("row 2", "text"),
    ]


def test_a_text_that_is_not_utf8_is_one_bad_document(tmp_path):
    raw = pyarrow.array([b"good one", b"\xff\xfe", b"good two"], pyarrow.binary())
    (tmp_path / "a.parquet").write_bytes(
        parquet_file(pyarrow.StringArray.from_buffers(3, *raw.buffers()[1:]))
    )
    first, bad, last = documents(tmp_path / "a.parquet")
    assert (first, last) == ("good one", "good two")
    assert "a.parquet, row 1: not UTF-8 (byte 0" in str(bad)


def test_a_wrong_column_says_which_one_has_text(tmp_path):
    parquet.write_table(pyarrow.table({"id": [1], "body": ["x"]}), tmp_path / "a.parquet")
    [bad] = documents(tmp_path / "a.parquet")
    assert bad.instead == 'data.text_field = "body"'


def test_damaged_bytes_are_documents_or_told_in_one_line(tmp_path):
    rng = random.Random(0)
    whole = parquet_file(column(KINDS[0]))
    for _ in range(100):
        content = bytearray(whole)
        for _ in range(3):
            content[rng.randrange(len(content))] = rng.randrange(256)
        length = rng.choice([len(content), rng.randrange(len(content))])
        (tmp_path / "a.parquet").write_bytes(content[:length])
        for document in documents(tmp_path / "a.parquet"):
            assert isinstance(document, str | BadDocument)
            if isinstance(document, BadDocument):
                assert str(document).isprintable(), str(document)
                assert len(str(document)) < 2000
