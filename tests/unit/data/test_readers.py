"""Text formats: what is too large, cut short or damaged, compressed files, and files at a URL."""

import gzip
import io
import json
import os
import random
import socket

import fsspec
import pytest
from corpora import as_jsonl, as_parquet, documents, local
from identified import identify

from titan_lite.config import ConfigError
from titan_lite.data.bad_documents import BadDocument
from titan_lite.data.documents import build_source, check_data
from titan_lite.data.files import local_files
from titan_lite.data.readers import lines
from titan_lite.data.source_identity import digest_of

pyarrow = pytest.importorskip("pyarrow")


def read(function, content, *arguments):
    return list(function(io.BufferedReader(io.BytesIO(content)), *arguments))


# Lines


@pytest.mark.parametrize("large", [b" " * 60, b"x" * 2**21])
def test_a_line_that_is_too_large_is_told(large):
    found = read(lines, large + b"{}\n{}\n", 50)
    assert [str(raw) for _, raw in found] == ["more than data.max_document_mib = 0", "b'{}\\n'"]


@pytest.mark.parametrize("name", ["a.json", "b.json.gz"])
@pytest.mark.parametrize("indent", [None, 1])
def test_a_json_array_is_one_bad_document_that_says_how_to_convert_it(tmp_path, name, indent):
    content = (
        b"\xef\xbb\xbf" + json.dumps([{"text": text} for text in GOOD], indent=indent).encode()
    )
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    [bad] = documents(local(tmp_path))
    assert f"{name}, line 1: cannot be read from here on (a JSON array, and not" in str(bad)
    assert 'datasets.load_dataset("' in bad.reason


def test_where_nothing_can_be_read_one_epoch_tells(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"a" * 2**21))
    data = local(tmp_path, on_bad_document="skip", max_document_mib=1)
    source = build_source(data, split="train", seed=0)
    with pytest.raises(
        ConfigError, match=r"a.jsonl.gz, line 1: more than .* no other document can be read"
    ):
        for _ in source.documents(0, lambda ordinal: True):
            pass


# Compressed files

GOOD = ["first", "second \u6f22", "third"]


COMPRESS = {
    ".gz": gzip.compress,
    ".zst": lambda content: pyarrow.compress(content, codec="zstd", asbytes=True),
}


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("kind", ["jsonl", "json", "txt"])
def test_a_compressed_file_has_the_documents_of_the_plain_one(tmp_path, suffix, kind):
    contents = {
        "jsonl": [as_jsonl(GOOD[:1]), as_jsonl(GOOD[1:])],
        "json": [as_jsonl(GOOD[:2]), as_jsonl(GOOD[2:])],
        "txt": ["\n".join(GOOD).encode()],
    }
    # several streams in one file, as pigz and cat make them
    (tmp_path / f"a.{kind}{suffix}").write_bytes(b"".join(map(COMPRESS[suffix], contents[kind])))
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
    assert len(before) > 500
    assert f"line {len(before) + 1}: cannot be read from here on (" in str(bad)
    assert "\n" not in str(bad)


# Files at a URL


def test_a_folder_a_file_and_a_pattern_at_a_url_are_read_as_on_disk(tmp_path):
    memory = fsspec.filesystem("memory")
    for name, content in (
        ("a.jsonl", as_jsonl(["one", "two"])),
        ("part/b.jsonl.gz", gzip.compress(as_jsonl(["three"]))),
        ("part/c.json", as_jsonl(["four"])),
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


# What is no file


def test_what_is_no_file_is_refused_and_not_opened(tmp_path):
    os.mkfifo(tmp_path / "a.jsonl")
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(tmp_path / "b.jsonl"))
        for path in ("a.jsonl", "b.jsonl", "/dev/zero"):
            with pytest.raises(ConfigError, match="no such file, and no file matches"):
                check_data(local(tmp_path / path))
    (tmp_path / "c.jsonl").write_text('{"text": "x"}\n')
    assert [name for _, name, _ in local_files(local(tmp_path))] == ["c.jsonl"]


# Damage


REAL = {
    "a.txt": b"text",
    "a.jsonl": as_jsonl(GOOD),
    "a.parquet": as_parquet(pyarrow.array(GOOD)),
}
REAL |= {f"a.jsonl{suffix}": compress(as_jsonl(GOOD)) for suffix, compress in COMPRESS.items()}


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
