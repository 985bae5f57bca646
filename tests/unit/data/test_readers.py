"""Text formats: a small file that asks for much is a bad document; any bytes give documents or one line."""

import gzip
import io
import json
import os
import socket
import zlib

import pytest
from bombs import contents, write_and_measure
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_lite.config import ConfigError, Data
from titan_lite.data.bad_documents import BadDocument
from titan_lite.data.dataset import build_source, check_data
from titan_lite.data.files import MEMORY, local_files, local_pieces, read_piece, text_of
from titan_lite.data.readers import elements, lines, open_bytes, records

pyarrow = pytest.importorskip("pyarrow")
WINDOW = 128  # MiB that a zstd file may ask for
MIB = 1


def local(path, **more):
    return Data(
        "local",
        path=str(path),
        **{"validation_fraction": 0.0, "shuffle": False, "max_document_mib": 1, **more},
    )


def documents(data):
    pieces = local_pieces(data)
    return [
        text_of(raw, piece, place, data)
        for piece in pieces
        for place, raw in read_piece(piece, data)
    ]


# Bombs

BOMBS = {
    name: what
    for name, what in contents(MIB * 2**20).items()
    if not name.endswith((".parquet", ".arrow"))
}


@pytest.fixture(scope="module")
def took(tmp_path_factory):
    return write_and_measure(BOMBS, tmp_path_factory.mktemp("bombs"), MIB)


@pytest.mark.parametrize("name", BOMBS)
def test_memory_stays_within_the_bound(took, name):
    assert took[name]["mib"] < MEMORY * MIB + (WINDOW if name.endswith(".zst") else 0)
    assert took[name]["good"] == BOMBS[name][1]
    assert all("\n" not in bad and len(bad) < 500 for bad in took[name]["bad"])
    assert took[name]["bad"] or name.startswith(("spaces", "wide", "fields", "escapes.jsonl"))


def test_reading_over_a_line_costs_little_more_than_decompressing(tmp_path):
    """In blocks: not line by line, nor eight kilobytes by eight."""
    import time

    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"a" * 2**24, 1) * 16)
    begun = time.process_time()
    with open_bytes(str(tmp_path / "a.jsonl.gz"), ".gz") as file:
        while file.read(2**20):
            pass
    decompressed = time.process_time() - begun
    begun = time.process_time()
    [bad] = documents(local(tmp_path))
    assert time.process_time() - begun < 3 * decompressed + 0.5
    assert "line 1: more than data.max_document_mib = 1" in str(bad)


def test_where_nothing_can_be_read_one_epoch_tells(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"a" * 2**21))
    source = build_source(local(tmp_path, on_bad_document="skip"), split="train", seed=0)
    with pytest.raises(
        ConfigError, match=r"a.jsonl.gz, line 1: more than .* no other document can be read"
    ):
        for _ in source.documents(0, lambda ordinal: True):
            pass


# What is cut off, and what comes after it


def read(function, content, *arguments):
    return list(function(io.BufferedReader(io.BytesIO(content)), *arguments))


@given(st.lists(st.text('ab"\\\n[]{},\u6f22', max_size=12)), st.integers(1, 9))
def test_elements_are_those_of_the_array_wherever_a_block_ends(texts, size):
    content = json.dumps(
        [{"text": text, "more": [[], {"a": texts}]} for text in texts], ensure_ascii=False
    ).encode()

    class Slow(io.BytesIO):
        def read1(self, count=-1, /):
            return self.read(size)

    found = list(elements(Slow(content), 2**20))
    assert [json.loads(raw)["text"] for _, raw in found] == texts
    assert [number for number, _ in found] == list(range(1, len(texts) + 1))


def test_an_element_that_is_too_large_is_one_bad_document():
    content = b'[{"a": "' + b'x\\"' * 30 + b'"}, {"b": 1}, ' + b"[" * 60 + b"]" * 60 + b", 5]"
    found = read(elements, content, 50)
    assert [number for number, _ in found] == [1, 2, 3, 4]
    assert [str(raw) for number, raw in found if number in (1, 3)] == [
        "more than data.max_document_mib = 0"
    ] * 2
    assert [raw.strip() for number, raw in found if number in (2, 4)] == [b'{"b": 1}', b"5"]


@pytest.mark.parametrize(
    ("content", "count", "words"),
    [
        (b"[1, 2", 1, "ends within"),
        (b"[1}", 1, "a } where"),
        (b"[1] 2", 1, "more after the end"),
        (b'["a', 0, "ends within"),
        (b'["a\\', 0, "ends within"),
        (b"[", 0, "ends within"),
        (b"[]]", 0, "more after"),
    ],
)
def test_an_array_that_is_not_whole_gives_what_is_before(content, count, words):
    found = elements(io.BufferedReader(io.BytesIO(content)), 100)
    assert len([next(found) for _ in range(count)]) == count
    with pytest.raises(ValueError, match=words):
        next(found)


@pytest.mark.parametrize("quote", ["", '"'])
def test_after_a_record_that_is_too_large_the_next_one_is_read(quote):
    large = "\n".join(["xy" * 5 + quote * 2] * 20) if quote else "xy" * 100
    content = f"id,text\n1,one\n2,{quote}{large}{quote}\n3,three\n4,four\n"
    found = read(records, content.encode(), 50, "text")
    assert [str(raw) for _, raw in found] == [
        "one",
        "more than data.max_document_mib = 0",
        "three",
        "four",
    ]
    assert [line for line, _ in found] == [2, 3, 23 if quote else 4, 24 if quote else 5]


def test_a_line_of_spaces_that_is_too_large_is_told():
    found = read(lines, b" " * 60 + b"{}\n{}\n", 50)
    assert [str(raw) for _, raw in found] == ["more than data.max_document_mib = 0", "b'{}\\n'"]


@pytest.mark.parametrize("parts", [[b"first\n", b"second\n"], [b"", b"first\n", b"", b"second\n"]])
def test_what_is_before_a_damage_of_gzip_is_read(tmp_path, parts):
    whole = b"".join(map(gzip.compress, parts)) + b"\0" * 99
    for damaged in (whole, whole + gzip.compress(os.urandom(999))[:-50], whole + b"x"):
        (tmp_path / "a").write_bytes(damaged)
        with open_bytes(str(tmp_path / "a"), ".gz") as file:
            assert [file.readline(), file.readline()] == [b"first\n", b"second\n"]
            if damaged != whole:
                with pytest.raises((EOFError, zlib.error), match=r"ends before|header"):
                    list(file)
            else:
                assert file.read() == b""


# What is no file


def test_what_is_no_file_is_called_by_its_kind_and_not_opened(tmp_path):
    os.mkfifo(tmp_path / "a.jsonl")
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(tmp_path / "b.jsonl"))
        for path, words in (
            (tmp_path / "a.jsonl", "is a pipe"),
            (tmp_path / "b.jsonl", "is a socket"),
            ("/dev/zero", "is a device"),
        ):
            with pytest.raises(ConfigError, match=words):
                check_data(local(tmp_path / path))
    (tmp_path / "c.jsonl").write_text('{"text": "x"}\n')
    assert [name for _, name, _ in local_files(local(tmp_path))] == ["c.jsonl"]


# Any bytes

NAMES = ["a.txt", "a.jsonl", "a.json", "a.csv"]
NAMES += [f"{name}{compression}" for name in NAMES for compression in (".gz", ".zst")]
TEXTS = ["one", 'two "quoted", and\nlines', "\u6f22", "x" * 300]
REAL = {
    ".txt": TEXTS[1].encode(),
    ".jsonl": "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in TEXTS).encode(),
    ".json": json.dumps([{"id": 1, "text": text} for text in TEXTS]).encode(),
    ".csv": 'id,text\n1,one\n2,"two ""quoted"", and\nlines"\n\n3,\u6f22\n'.encode(),
}


def packed(content, name):
    if name.endswith(".gz"):
        return gzip.compress(content, mtime=0)
    return (
        pyarrow.compress(content, codec="zstd", asbytes=True) if name.endswith(".zst") else content
    )


def mutated(content):
    """Strategy: cut short, with other bytes in some places, or with a part of it again in another place."""
    place = st.integers(0, len(content))
    change = st.tuples(place, place, st.binary(max_size=8))

    def apply(changes, cut):
        for at, end, put in changes:
            out = content[:at] + put + content[min(end, at + 8) if end > at else at :]
            yield out[: len(out) - cut]

    return st.builds(
        lambda changes, cut: (
            b"".join(apply(changes[:1], cut)) if changes else content[: len(content) - cut]
        ),
        st.lists(change, max_size=1),
        st.integers(0, 20),
    )


SPECIAL = st.lists(
    st.sampled_from(
        [
            b"[",
            b"]",
            b"{",
            b"}",
            b'"',
            b"\\",
            b",",
            b"\n",
            b"\r",
            b"text",
            b'{"text": "',
            b"\xff",
            b"\0",
            b" ",
            b"1e999",
        ]
    )
).map(b"".join)


def told(path, **more):
    """Documents of any file: texts, or what is wrong in one line."""
    data = local(path, **more)
    for document in documents(data):
        assert isinstance(document, str | BadDocument)
        if isinstance(document, BadDocument):
            assert str(document).isprintable(), str(document)
            assert len(str(document)) < 2000
    try:
        check_data(data)
    except ConfigError as error:
        assert "\n" not in str(error)  # noqa: PT017


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60)
@given(data=st.data())
def test_any_bytes_are_documents_or_told(tmp_path_factory, name, data):
    suffix = f".{name.split('.')[1]}"
    plain = data.draw(mutated(REAL[suffix]) | SPECIAL | st.binary(max_size=200), label="content")
    content = data.draw(
        st.sampled_from([packed(plain, name)]) | mutated(packed(REAL[suffix], name)), label="file"
    )
    folder = tmp_path_factory.getbasetemp() / "fuzz"
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    told(folder / name)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=3000)
@given(data=st.data())
def test_any_bytes_for_longer(tmp_path_factory, name, data):
    test_any_bytes_are_documents_or_told.hypothesis.inner_test(tmp_path_factory, name, data)
