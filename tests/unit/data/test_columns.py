"""Parquet and Arrow: a small file that asks for much is a bad document; any bytes give documents or one line."""

import io

import pytest
from bombs import contents, write_and_measure
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_lite.config import Data
from titan_lite.data.bad_documents import BadDocument
from titan_lite.data.columns import _struct
from titan_lite.data.files import MEMORY, local_pieces, read_piece, text_of

pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
MIB = 2
BOMBS = {
    name: what
    for name, what in contents(MIB * 2**20).items()
    if name.endswith((".parquet", ".arrow"))
}


@pytest.fixture(scope="module")
def took(tmp_path_factory):
    return write_and_measure(BOMBS, tmp_path_factory.mktemp("bombs"), MIB)


@pytest.mark.parametrize("name", BOMBS)
def test_memory_stays_within_the_bound(took, name):
    assert took[name]["mib"] < MEMORY * MIB
    assert took[name]["good"] == BOMBS[name][1]
    assert bool(took[name]["bad"]) != bool(took[name]["good"])
    for bad in took[name]["bad"]:
        assert (
            f"more than data.max_document_mib = {MIB}" in bad
            or f"more than 8 x data.max_document_mib = {MIB}" in bad
        )
        assert ", row " in bad


def documents(path):
    data = Data("local", path=str(path), max_document_mib=1)
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


def column(kind):
    plain = pyarrow.array(TEXTS, pyarrow.string())
    return (
        plain.dictionary_encode().cast(kind)
        if pyarrow.types.is_dictionary(kind)
        else plain.cast(kind)
    )


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("opened", [pyarrow.ipc.new_file, pyarrow.ipc.new_stream])
def test_every_kind_of_text_is_read(tmp_path, kind, opened):
    for compression in (None, "zstd", "lz4"):
        (tmp_path / "a.arrow").write_bytes(arrow(column(kind), opened, compression=compression))
        found = documents(tmp_path / "a.arrow")
        assert [text for text in found if isinstance(text, str)] == [text for text in TEXTS if text]
        assert [
            (text.place, text.reason.split()[-1]) for text in found if not isinstance(text, str)
        ] == [
            ("row 1", "empty"),
            ("row 2", "text"),
        ]


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize(
    "encoding", ["PLAIN", "DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY", "RLE_DICTIONARY"]
)
def test_every_encoding_of_parquet_is_read(tmp_path, version, encoding):
    texts = [f"text {number % 50} " + "y" * (number % 70) for number in range(5000)]
    how = (
        {"use_dictionary": True}
        if "DICT" in encoding
        else {"use_dictionary": False, "column_encoding": {"text": encoding}}
    )
    path = tmp_path / "a.parquet"
    parquet.write_table(
        pyarrow.table({"text": texts}),
        path,
        data_page_size=4000,
        data_page_version=version,
        row_group_size=1500,
        **how,
    )
    assert documents(path) == texts


def test_a_header_that_says_two_sizes_is_read_as_the_decoder_does():
    """A repeated field has its last value of the right type."""
    as_text = bytes([0x18, 1]) + b"x"
    assert _struct(io.BytesIO(bytes([0x25, 0x54, 0x08, 0x04]) + as_text[1:] + b"\0")) == {2: 42}
    assert _struct(io.BytesIO(bytes([0x25, 0x54, 0x05, 0x04, 0x06, 0x00]))) == {2: 3}
    with pytest.raises(EOFError):
        _struct(io.BytesIO(b"\x25"))


def test_a_wrong_column_says_which_one_has_text(tmp_path):
    parquet.write_table(pyarrow.table({"id": [1], "body": ["x"]}), tmp_path / "a.parquet")
    [bad] = documents(tmp_path / "a.parquet")
    assert bad.instead == 'data.text_field = "body"'


REAL = {f"{kind}.arrow": arrow(column(kind), compression="zstd") for kind in KINDS} | {
    f"{number}.parquet": (
        lambda out, how: (
            parquet.write_table(pyarrow.table({"text": TEXTS}), out, **how),
            out.getvalue(),
        )[1]
    )(io.BytesIO(), how)
    for number, how in enumerate(
        [{}, {"use_dictionary": False}, {"data_page_version": "2.0", "compression": "zstd"}]
        + [
            {"use_dictionary": False, "column_encoding": {"text": name}}
            for name in ("DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY")
        ]
    )
}


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
@settings(max_examples=150)
@given(data=st.data())
def test_any_bytes_are_documents_or_told(tmp_path_factory, suffix, data):
    content = bytearray(
        data.draw(st.sampled_from([real for name, real in REAL.items() if name.endswith(suffix)]))
    )
    for at, byte in data.draw(
        st.lists(st.tuples(st.integers(0, len(content) - 1), st.integers(0, 255)), max_size=6)
    ):
        content[at] = byte
    cut = data.draw(st.sampled_from([0, 0, 0, 1, 9, 100, len(content)]))
    path = tmp_path_factory.getbasetemp() / f"fuzz{suffix}"
    path.write_bytes(
        bytes(content[: len(content) - cut]) + data.draw(st.sampled_from([b"", b"PAR1", b"ARROW1"]))
    )
    for document in documents(path):
        assert isinstance(document, str | BadDocument)
        if isinstance(document, BadDocument):
            assert str(document).isprintable(), str(document)
            assert len(str(document)) < 2000


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
@settings(max_examples=5000)
@given(data=st.data())
def test_any_bytes_for_longer(tmp_path_factory, suffix, data):
    test_any_bytes_are_documents_or_told.hypothesis.inner_test(tmp_path_factory, suffix, data)
