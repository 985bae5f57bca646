"""Every format, compressed or not, and every kind of bad data, in each of them."""

import gzip

import pytest
from corpora import as_jsonl, as_parquet, documents, local

from titan_lite.config import ConfigError
from titan_lite.data.bad_documents import BadDocument
from titan_lite.data.documents import build_source
from titan_lite.data.files import read_piece
from titan_lite.data.listing import Listing

pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

TEXTS = [
    "first",
    'second, with "quotes"\nand lines\r\n',
    " third \u6f22\U0001f600",
    "\x00\x1f fourth",
    "5",
]


def test_lines_of_json_go_by_the_name_of_json_as_well(tmp_path):
    (tmp_path / "c4-train.00000.json.gz").write_bytes(gzip.compress(as_jsonl(TEXTS)))
    (tmp_path / "d.json").write_bytes(b"\xef\xbb\xbf" + as_jsonl(["after a byte order mark"]))
    assert documents(local(tmp_path)) == [*TEXTS, "after a byte order mark"]


def test_a_parquet_file_is_read_by_row_groups(tmp_path):
    (tmp_path / "a.parquet").write_bytes(as_parquet(pyarrow.array(TEXTS)))
    pieces = Listing(local(tmp_path)).pieces
    assert [(piece.start, piece.first_row) for piece in pieces] == [(0, 0), (1, 2), (2, 4)]
    assert list(read_piece(pieces[1], local(tmp_path))) == [
        (2, TEXTS[2].encode()),
        (3, TEXTS[3].encode()),
    ]


KINDS = [pyarrow.string(), pyarrow.large_string(), pyarrow.binary(), pyarrow.string_view()]
KINDS += [pyarrow.dictionary(pyarrow.int8(), kind) for kind in KINDS[:3]]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_kind_of_text_in_a_column_is_read(tmp_path, kind):
    texts = ["one", "", None, "two \u6f22", "two \u6f22", "x" * 300]
    column = pyarrow.array(texts)
    if pyarrow.types.is_dictionary(kind):
        column = column.dictionary_encode()
    (tmp_path / "a.parquet").write_bytes(as_parquet(column.cast(kind)))
    found = documents(local(tmp_path))
    assert [text for text in found if isinstance(text, str)] == [text for text in texts if text]
    bad = [text for text in found if not isinstance(text, str)]
    assert [(document.location, document.reason.split()[-1]) for document in bad] == [
        ("row 1", "empty"),
        ("row 2", "text"),
    ]


def test_a_text_in_a_column_that_is_not_utf8_is_one_bad_document(tmp_path):
    raw = pyarrow.array([b"good one", b"\xff\xfe", b"good two"], pyarrow.binary())
    column = pyarrow.StringArray.from_buffers(3, *raw.buffers()[1:])
    (tmp_path / "a.parquet").write_bytes(as_parquet(column))
    first, bad, last = documents(local(tmp_path))
    assert (first, last) == ("good one", "good two")
    assert "a.parquet, row 1: not UTF-8 (byte 0" in str(bad)


def test_a_wrong_column_says_which_one_has_text(tmp_path):
    parquet.write_table(pyarrow.table({"id": [1], "body": ["x"]}), tmp_path / "a.parquet")
    [bad] = documents(local(tmp_path))
    assert bad.instead == 'data.text_field = "body"'


# Bad data

GOOD = ["good one", "good two"]
LARGE = "x" * (2**20 + 1)


def lines(*more):
    return as_jsonl(GOOD[:1]) + b"".join(more) + as_jsonl(GOOD[1:])


CASES = [  # what is wrong; file; its bytes; where, and what is said; how many of GOOD are left
    (
        "corrupt line",
        "a.jsonl",
        lines(b'{"text": "x\n'),
        "line 2",
        "not JSON (Invalid control character at, column 12)",
        2,
    ),
    ("deep line", "a.jsonl", lines(b"[" * 100_000 + b"\n"), "line 2", "nested too deeply", 2),
    ("no object", "a.jsonl", lines(b"5\n"), "line 2", "not a JSON object, but of type int", 2),
    ("bad UTF-8", "a.jsonl", lines(b'{"text": "\xff"}\n'), "line 2", "not UTF-8 (byte 10", 2),
    (
        "half a pair",
        "a.jsonl",
        lines(b'{"text": "\\ud800"}\n'),
        "line 2",
        "not UTF-8 (character 0: surrogates",
        2,
    ),
    ("empty", "a.jsonl", lines(b'{"text": ""}\n'), "line 2", "empty", 2),
    (
        "missing",
        "a.jsonl",
        lines(b'{"body": "x"}\n'),
        "line 2",
        '"text" is not a field of it; its fields with text: body',
        2,
    ),
    (
        "null",
        "a.jsonl",
        lines(b'{"text": null}\n'),
        "line 2",
        '"text" is null in it; its fields with text: none',
        2,
    ),
    (
        "a number",
        "a.jsonl",
        lines(b'{"text": 5}\n'),
        "line 2",
        '"text" is of type int, not text',
        2,
    ),
    (
        "large",
        "a.jsonl",
        lines(b'{"text": "' + LARGE.encode() + b'"}\n'),
        "line 2",
        "more than data.max_document_mib = 1",
        2,
    ),
    ("a file cut short", "a.jsonl", lines()[:-5], "line 2", "not JSON", 1),
    ("bad UTF-8", "a.txt", b"fine \xc3(", "whole", "not UTF-8 (byte 5", 0),
    ("UTF-16", "a.txt", "caf\u00e9".encode("utf-16-le")[:6], "whole", "NUL characters, as in", 0),
    (
        "cut short",
        "a.parquet",
        as_parquet(pyarrow.array(GOOD))[:-20],
        "row 0",
        "cannot be read from here on (ArrowInvalid: Parquet magic",
        0,
    ),
    (
        "no column",
        "a.parquet",
        as_parquet(pyarrow.array(GOOD)).replace(b"text", b"body"),
        "row 0",
        '"text" is no column',
        0,
    ),
    (
        "numbers",
        "a.parquet",
        as_parquet(pyarrow.array([1, 2])),
        "row 0",
        '"text" is a column of int64, not of text',
        0,
    ),
]


@pytest.mark.parametrize(
    ("name", "content", "place", "reason", "left"),
    [case[1:] for case in CASES],
    ids=[" ".join(case[:2]) for case in CASES],
)
def test_bad_data_is_named_with_its_place_and_nothing_else_is_lost(
    tmp_path, name, content, place, reason, left
):
    (tmp_path / name).write_bytes(content)
    (tmp_path / "b.jsonl").write_bytes(as_jsonl(["of another file"]))
    data = local(tmp_path, max_document_mib=1)
    found = documents(data)
    [bad] = [document for document in found if isinstance(document, BadDocument)]
    assert (bad.file, bad.location) == (str(tmp_path / name), place)
    assert reason in bad.reason
    assert str(bad) == f"{tmp_path / name}, {place}: {bad.reason}"
    assert "\n" not in str(bad)
    assert [document for document in found if document is not bad] == [
        *GOOD[:left],
        "of another file",
    ]


def test_a_document_of_50_mb_is_read_where_the_recipe_allows_it(tmp_path):
    large = "a line and another one \u6f22\n" * (50 * 2**20 // 27)
    (tmp_path / "a.jsonl").write_bytes(as_jsonl(["before", large, "after"]))
    before, bad, after = documents(local(tmp_path))
    assert (before, after) == ("before", "after")
    assert "line 2: more than data.max_document_mib = 32" in str(bad)
    assert documents(local(tmp_path, max_document_mib=64)) == ["before", large, "after"]


def test_what_the_machine_cannot_read_is_an_error_whatever_the_recipe_says(tmp_path):
    """It is not the document that is bad, and another rank may be able to."""
    (tmp_path / "a.jsonl").write_bytes(as_jsonl(["x"]))
    data = local(tmp_path, on_bad_document="skip")
    source = build_source(data, split="train", seed=0)
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"a.jsonl cannot be read: \[Errno 2\]"):
        next(source.documents(0, lambda ordinal: True))
