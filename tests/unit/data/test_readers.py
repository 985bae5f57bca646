"""Text formats: what is too large, cut short or damaged, compressed files, and files at a URL."""

import bz2
import gzip
import io
import json
import lzma
import os
import random
import socket
import zipfile
from pathlib import Path

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_lite.config import ConfigError, Data, load_config
from titan_lite.data.bad_documents import BadDocument
from titan_lite.data.documents import build_source, check_data
from titan_lite.data.files import local_files, local_pieces, read_piece, text_of
from titan_lite.data.readers import elements, lines, records
from titan_lite.data.source_identity import digest_of, identify

pyarrow = pytest.importorskip("pyarrow")
ROOT = Path(__file__).parents[3]


def local(path, **more):
    return Data(
        dataset="local",
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


def read(function, content, *arguments):
    return list(function(io.BufferedReader(io.BytesIO(content)), *arguments))


def as_jsonl(texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


# Lines, elements, records


@given(st.lists(st.text('ab"\\\n[]{},\u6f22', max_size=12)))
def test_elements_are_those_of_the_array(texts):
    array = [{"text": text, "more": [[], {"a": texts}]} for text in texts]
    for indent in (None, 1):
        content = json.dumps(array, ensure_ascii=False, indent=indent).encode()
        found = read(elements, content)
        assert [json.loads(raw) for _, raw in found] == array
        assert [number for number, _ in found] == list(range(1, len(texts) + 1))


def test_a_bad_element_is_one_bad_document(tmp_path):
    """A number among the texts changes no other text, and a byte that is not UTF-8 does not end the
    file.
    """
    (tmp_path / "a.json").write_bytes(
        b'[{"text": "007"}, {"text": 5}, null, {"text": "\xff"}, {"text": "x"}, []]'
    )
    first, *bad, fifth, sixth = documents(local(tmp_path))
    assert (first, fifth) == ("007", "x")
    assert [str(document).partition("a.json, ")[2] for document in [*bad, sixth]] == [
        'line 2: data.text_field = "text" is of type int, not text',
        "line 3: not a JSON object, but null",
        "line 4: not UTF-8 (byte 10: invalid start byte)",
        "line 6: not a JSON object, but of type list",
    ]


@pytest.mark.parametrize(
    ("content", "count", "words"),
    [
        (b"[1, 2", 1, "delimiter|where , or ] should follow"),
        (b"[1}", 1, "'}' where"),
        (b"[1] 2", 1, "more after its end"),
        (b"[1,]", 1, "Expecting value"),
        (b'["a', 0, "Unterminated string"),
        (b"[", 0, "Expecting value"),
        (b"[]]", 0, "more after"),
    ],
)
def test_an_array_that_is_not_whole_gives_what_is_before(content, count, words):
    found = elements(io.BytesIO(content))
    assert len([next(found) for _ in range(count)]) == count
    with pytest.raises(ValueError, match=words):
        list(found)


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


def test_a_csv_has_texts_as_they_are_written():
    content = b'text,id\n007,1\n1e5,2\n"a\rlone CR",3\nnull,4\n\n"a ""quoted"", word",5\n'
    found = read(records, content, 99, "text")
    texts = ["007", "1e5", "a\rlone CR", "null", 'a "quoted", word']
    assert found == list(zip([2, 3, 4, 6, 8], texts, strict=True))


@pytest.mark.parametrize("large", [b" " * 60, b"x" * 2**21])
def test_a_line_that_is_too_large_is_told(large):
    found = read(lines, large + b"{}\n{}\n", 50)
    assert [str(raw) for _, raw in found] == ["more than data.max_document_mib = 0", "b'{}\\n'"]


def test_where_nothing_can_be_read_one_epoch_tells(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"a" * 2**21))
    source = build_source(local(tmp_path, on_bad_document="skip"), split="train", seed=0)
    with pytest.raises(
        ConfigError, match=r"a.jsonl.gz, line 1: more than .* no other document can be read"
    ):
        for _ in source.documents(0, lambda ordinal: True):
            pass


# Compressed files

GOOD = ["first", "second \u6f22", "third"]


def zipped(content):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a", content)
    return out.getvalue()


COMPRESS = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda content: pyarrow.compress(content, codec="zstd", asbytes=True),
    ".zip": zipped,
}


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("kind", ["jsonl", "json", "txt"])
def test_a_compressed_file_has_the_documents_of_the_plain_one(tmp_path, suffix, kind):
    contents = {
        "jsonl": [as_jsonl(GOOD[:1]), as_jsonl(GOOD[1:])],
        "json": [json.dumps([{"text": text} for text in GOOD]).encode()],
        "txt": ["\n".join(GOOD).encode()],
    }
    parts = contents[kind] if suffix != ".zip" else [b"".join(contents[kind])]
    # several streams in one file, as pigz and cat make them
    (tmp_path / f"a.{kind}{suffix}").write_bytes(b"".join(map(COMPRESS[suffix], parts)))
    assert documents(local(tmp_path)) == (["\n".join(GOOD)] if kind == "txt" else GOOD)


@pytest.mark.parametrize("suffix", COMPRESS)
def test_of_a_file_that_is_cut_short_the_documents_before_are_read_and_one_line_tells(
    tmp_path, suffix
):
    rng = random.Random(0)
    texts = ["".join(rng.choices("abcdefgh", k=1000)) for _ in range(1000)]
    content = COMPRESS[suffix](as_jsonl(texts))
    (tmp_path / f"a.jsonl{suffix}").write_bytes(content[: len(content) * 2 // 3])
    *before, bad = documents(local(tmp_path))
    assert before == texts[: len(before)]
    # bz2 decompresses blocks of 900 KB, and a zip is found by its end
    assert (len(before) > 500) == (suffix not in (".bz2", ".zip"))
    assert f"line {len(before) + 1}: cannot be read from here on (" in str(bad)
    assert "\n" not in str(bad)


# Files at a URL


def test_a_folder_a_file_and_a_pattern_at_a_url_are_read_as_on_disk(tmp_path):
    memory = fsspec.filesystem("memory")
    for name, content in (
        ("a.jsonl", as_jsonl(["one", "two"])),
        ("part/b.jsonl.gz", gzip.compress(as_jsonl(["three"]))),
        ("part/c.csv", b"text\nfour\n"),
        ("d.md", b"no document"),
    ):
        memory.pipe(f"/corpus/{name}", content)
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    for path in ("", "/a.jsonl", "/**/*.jsonl*", "/part/*"):
        here, there = local(f"{tmp_path}{path}"), local(f"memory://corpus{path}")
        assert documents(there) == documents(here)
        assert [file[1:] for file in local_files(there)] == [file[1:] for file in local_files(here)]
        assert digest_of(identify(there)) == digest_of(identify(here))
        check_data(there)
    with pytest.raises(ConfigError, match=r'data.path = "memory://corpus/x\*": no file matches'):
        check_data(local("memory://corpus/x*"))
    with pytest.raises(ConfigError, match=r'"nowhere://x" cannot be read \(ValueError|not known'):
        check_data(local("nowhere://x"))
    memory.rm("/corpus", recursive=True)


def test_a_url_in_a_recipe_stays_one():
    options = ["--data.dataset=local", "--data.path=s3://bucket/corpus/*.jsonl.gz"]
    config = load_config(ROOT / "train_configs/debug_model.toml", options)
    assert config.data.path == "s3://bucket/corpus/*.jsonl.gz"


def test_the_files_within_a_zip_are_read(tmp_path):
    with zipfile.ZipFile(tmp_path / "corpus.zip", "w") as archive:
        archive.writestr("a.txt", "one")
        archive.writestr("b.jsonl", as_jsonl(["two", ""]))
    (tmp_path / "corpus.jsonl.zip").write_bytes((tmp_path / "corpus.zip").read_bytes())
    [bad] = documents(local(tmp_path / "corpus.jsonl.zip"))
    assert "(a zip of 2 files, which path = zip://*::FILE reads)" in str(bad)
    within = local(f"zip://*::{tmp_path}/corpus.zip")
    assert [name for _, name, _ in local_files(within)] == ["a.txt", "b.jsonl"]
    one, two, empty = documents(within)
    assert (one, two) == ("one", "two")
    assert str(empty) == f"zip://b.jsonl::{tmp_path}/corpus.zip, line 2: empty"


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


# Damage


REAL = {
    "a.txt": b"text",
    "a.jsonl": as_jsonl(GOOD),
    "a.json": json.dumps([{"text": text} for text in GOOD]).encode(),
    "a.csv": 'id,text\n1,one\n2,"two ""quoted"", and\nlines"\n\n3,\u6f22\n'.encode(),
}
REAL |= {
    f"a.jsonl{suffix}": compress(as_jsonl(GOOD))
    for suffix, compress in COMPRESS.items()
    if suffix != ".zip"  # whose damage has too many kinds
}


@pytest.mark.parametrize("name", REAL)
def test_damaged_bytes_are_documents_or_told_in_one_line(tmp_path, name):
    rng = random.Random(name)
    for _ in range(50):
        content = bytearray(REAL[name])
        content[rng.randrange(len(content))] = rng.randrange(256)
        (tmp_path / name).write_bytes(
            content[: rng.choice([len(content), rng.randrange(len(content))])]
        )
        for document in documents(local(tmp_path)):
            assert isinstance(document, str | BadDocument)
            if isinstance(document, BadDocument):
                assert str(document).isprintable(), str(document)
                assert len(str(document)) < 2000
