"""The identity of documents: what is the same corpus, and what differs from it; files that are
changed while they are read.
"""

import json
import logging
import os
import shutil
from itertools import islice

import pytest
from filelock import FileLock

from titan_lite.config import ConfigError, Data, DataSource
from titan_lite.data import contents, files
from titan_lite.data.contents import MAX_WHOLE, contents_of
from titan_lite.data.documents import build_source
from titan_lite.data.source_identity import (
    SourceIdentity,
    differences_in_words,
    digest_of,
    identify,
)


def local(path, **more):
    return Data(
        dataset="local", path=str(path), **{"validation_fraction": 0.0, "shuffle": False, **more}
    )


def write_jsonl(path, texts):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The folder of remembered hashes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(contents, "_of_process", {})
    monkeypatch.setattr(contents, "_reported", set())
    return tmp_path / "cache"


@pytest.fixture
def corpus(tmp_path):
    for name in ("a", "b", "part/c"):
        write_jsonl(tmp_path / f"corpus/{name}.jsonl", [f"{name} {n}" for n in range(20)])
    return tmp_path / "corpus"


def written_again(path, content):
    """Write as many bytes to a file, and set the time of before."""
    before = path.stat()
    assert len(content) == before.st_size
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


# The same corpus, or another


def test_a_copy_of_a_corpus_is_the_same_corpus(corpus, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(corpus, copy, copy_function=shutil.copyfile)
    os.utime(copy / "a.jsonl", (1, 1))
    assert digest_of(identify(local(copy))) == digest_of(identify(local(corpus)))
    (corpus / "b.jsonl").touch()
    assert digest_of(identify(local(copy))) == digest_of(identify(local(corpus)))
    assert differences_in_words(identify(local(copy)), identify(local(corpus))) == []


@pytest.mark.parametrize("lines", [20, 200_000])
@pytest.mark.parametrize("change", ["words replaced", "lines reversed", "first byte", "last line"])
def test_an_edit_at_equal_size_is_another_corpus(change, lines, corpus):
    path = corpus / "a.jsonl"
    write_jsonl(path, [f"words of {number:06}" for number in range(lines)])
    assert (path.stat().st_size > MAX_WHOLE) == (lines > 20)
    before = identify(local(corpus))
    content = path.read_bytes()
    after = {
        "words replaced": content.replace(b"words", b"other"),
        "lines reversed": b"".join(reversed(content.splitlines(keepends=True))),
        "first byte": b" " + content[1:],
        "last line": content[:-10] + content[-10:].replace(b"9", b"8"),
    }[change]
    written_again(path, after)
    now = identify(local(corpus))
    assert differences_in_words(before, now) == ["1 file was changed (a.jsonl)"]
    assert differences_in_words(before, before) == []


def test_what_differs_is_named_and_counted(corpus):
    before = identify(local(corpus))
    write_jsonl(corpus / "a.jsonl", ["another"])
    (corpus / "b.jsonl").rename(corpus / "d.jsonl")
    for name in range(5):
        write_jsonl(corpus / f"new {name}.jsonl", ["one"])
    assert differences_in_words(before, identify(local(corpus))) == [
        "1 file was changed (a.jsonl)",
        "6 files were added (d.jsonl, new 0.jsonl, new 1.jsonl, ...)",
        "1 file was removed (b.jsonl)",
    ]


def test_what_differs_is_named_with_its_source(corpus):
    one, other = DataSource(dataset="local", path=str(corpus)), DataSource(dataset="stdlib")
    before = identify(Data(sources=(one, other)))
    field = DataSource(dataset="local", path=str(corpus), text_field="body")
    hub = DataSource(dataset="owner/name")
    for sources, expected in (
        ((one,), ["there are 1 sources, and were 2"]),
        ((field, other), ['source 1: text_field is "body", was "text"']),
        ((one, hub), ['source 2: dataset is "owner/name", was "stdlib"']),
    ):
        assert differences_in_words(before, identify(Data(sources=sources))) == expected


def test_an_identity_is_kept_as_json(corpus):
    sources = identify(Data(sources=(DataSource(dataset="local", path=str(corpus)), DataSource())))
    kept = json.loads(json.dumps([source.to_json() for source in sources]))
    assert [SourceIdentity.from_json(source) for source in kept] == sources


def test_a_file_at_a_url_is_known_by_its_content(corpus):
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    try:
        memory.pipe("/identity/a.jsonl", (corpus / "a.jsonl").read_bytes())
        at_url = local("memory://identity/*.jsonl")
        (corpus / "b.jsonl").unlink()
        assert digest_of(identify(at_url)) == digest_of(identify(local(corpus / "*.jsonl")))
        content = (corpus / "a.jsonl").read_bytes().replace(b"1", b"2")
        memory.pipe("/identity/a.jsonl", content)
        assert digest_of(identify(at_url)) != digest_of(identify(local(corpus / "*.jsonl")))
    finally:
        memory.rm("/identity", recursive=True)


# Remembered hashes


def hashed(monkeypatch):
    """The files that are hashed from now on."""
    files = []
    hash_of = contents.hash_of
    monkeypatch.setattr(contents, "hash_of", lambda file: files.append(file) or hash_of(file))
    return files


def test_a_file_is_hashed_again_only_if_it_was_written(corpus, monkeypatch):
    digest_of(identify(local(corpus)))
    files = hashed(monkeypatch)
    digest_of(identify(local(corpus)))
    assert files == []
    (corpus / "a.jsonl").touch()
    digest_of(identify(local(corpus)))
    assert files == [str(corpus / "a.jsonl")]


def test_hashes_of_many_bytes_are_found_by_the_next_process(corpus, cache, monkeypatch):
    monkeypatch.setattr(contents, "REMEMBER_FROM", 0)
    paths = [str(path) for path in corpus.glob("**/*.jsonl")]
    before = contents_of(paths, str(corpus))
    files = hashed(monkeypatch)
    contents._of_process.clear()
    assert contents_of(paths, str(corpus)) == before
    assert files == []
    contents._of_process.clear()
    (corpus / "a.jsonl").touch()
    contents_of(paths, str(corpus))
    assert files == [str(corpus / "a.jsonl")]
    (remembered,) = (cache / "titan_lite").glob("*.json")
    for damage in ('{"a": 5}', "[]", '{"', ""):
        remembered.write_text(damage)
        contents._of_process.clear()
        assert {file: each.sha256 for file, each in contents_of(paths, str(corpus)).items()} == {
            file: each.sha256 for file, each in before.items()
        }


def test_hashes_that_cannot_be_remembered_are_no_error(corpus, cache, monkeypatch):
    monkeypatch.setattr(contents, "REMEMBER_FROM", 0)
    cache.write_text("a file")
    paths = [str(path) for path in corpus.glob("**/*.jsonl")]
    assert len(contents_of(paths, str(corpus))) == 3
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # a user without a home
    contents._of_process.clear()
    assert len(contents_of(paths, str(corpus))) == 3
    assert not os.path.lexists("~")


@pytest.mark.parametrize("error", [OSError("the disk is gone"), RuntimeError("no thread")])
def test_an_error_in_hashing_is_not_one_of_remembering(error, corpus, monkeypatch, caplog):
    def fail(file):
        raise error

    monkeypatch.setattr(contents, "REMEMBER_FROM", 0)
    caplog.set_level("INFO")
    with monkeypatch.context() as patched:
        patched.setattr(contents, "hash_of", fail)
        with pytest.raises(type(error), match=str(error)):
            contents_of([str(corpus / "a.jsonl")], str(corpus))
    assert "not remembered" not in caplog.text
    assert len(contents_of([str(corpus / "a.jsonl")], str(corpus))) == 1  # the lock is free


def test_a_process_that_never_ends_its_hashing_is_waited_for_a_while(
    corpus, cache, monkeypatch, caplog
):
    monkeypatch.setattr(contents, "REMEMBER_FROM", 0)
    paths = [str(corpus / "a.jsonl")]
    before = contents_of(paths, str(corpus))
    (remembered,) = (cache / "titan_lite").glob("*.json")
    written = remembered.read_bytes()
    monkeypatch.setattr(contents, "MAX_WAIT", 0.1)
    contents._of_process.clear()
    (corpus / "a.jsonl").touch()
    with FileLock(f"{remembered}.lock"):
        found = contents_of(paths, str(corpus))
    assert found[paths[0]].sha256 == before[paths[0]].sha256
    assert "another process of this host has hashed" in caplog.text
    assert remembered.read_bytes() == written
    contents._of_process.clear()
    assert contents_of(paths, str(corpus)) == found
    assert remembered.read_bytes() != written


def test_a_memory_that_cannot_be_read_or_written_is_no_error(corpus, cache, monkeypatch, caplog):
    monkeypatch.setattr(contents, "REMEMBER_FROM", 0)
    paths = [str(corpus / "a.jsonl")]
    caplog.set_level("INFO")
    before = contents_of(paths, str(corpus))
    (remembered,) = (cache / "titan_lite").glob("*.json")
    remembered.unlink()
    remembered.mkdir()  # as a file without permission, also for root
    contents._of_process.clear()
    assert contents_of(paths, str(corpus)) == before
    assert caplog.text.count("not remembered for the next start") == 2


def test_hashes_at_a_path_that_is_no_utf_8_are_remembered(corpus, cache, monkeypatch):
    monkeypatch.setattr(contents, "REMEMBER_FROM", 0)
    renamed = corpus.rename(os.fsdecode(os.fsencode(corpus) + b"\xff"))
    paths = [str(renamed / "a.jsonl")]
    before = contents_of(paths, str(renamed))
    contents._of_process.clear()
    files = hashed(monkeypatch)
    assert contents_of(paths, str(renamed)) == before
    assert files == []


# Files that are changed while they are read


def epochs(data):
    source = build_source(data, split="train", seed=0)
    return (text for _, text in source.documents(0, lambda ordinal: True))


CHANGES = {
    "rewritten": lambda text: text.replace(b"b", b"x"),
    "cut at a line's end": lambda text: b"".join(text.splitlines(keepends=True)[:5]),
    "appended": lambda text: text + b'{"text": "one more"}\n',
}


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_is_changed_within_a_run_ends_it(change, shuffle, corpus):
    documents = epochs(local(corpus, shuffle=shuffle))
    first = list(islice(documents, 60))
    assert len(set(first)) == 60
    path = corpus / "b.jsonl"
    path.write_bytes(CHANGES[change](path.read_bytes()))
    with pytest.raises(ConfigError, match=r"b\.jsonl was changed while the run reads it") as error:
        list(islice(documents, 60))
    assert "checkpoint.restart_data" in str(error.value)


def test_a_file_that_is_touched_or_put_back_within_a_run_is_the_same(corpus, tmp_path):
    documents = epochs(local(corpus))
    first = list(islice(documents, 60))
    (corpus / "a.jsonl").touch()
    shutil.copyfile(corpus / "b.jsonl", tmp_path / "copy")
    (tmp_path / "copy").replace(corpus / "b.jsonl")
    assert list(islice(documents, 60)) == first


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl.gz", "a.json", "a.parquet"])
def test_files_of_every_format_are_looked_at_when_they_are_opened(name, tmp_path):
    import gzip

    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table({"text": ["one", "two"]})
    path = tmp_path / name
    line = b'{"text": "one"}\n'
    match path.suffix:
        case ".parquet":
            parquet.write_table(table, path)
        case ".gz":
            path.write_bytes(gzip.compress(line))
        case _:
            path.write_bytes(line)
    documents = epochs(local(tmp_path))
    for _ in range(3):
        next(documents)
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ConfigError, match=r"was changed while the run reads it"):
        list(islice(documents, 5))


def test_a_file_at_a_url_is_looked_at_when_it_is_opened(corpus):
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    try:
        memory.pipe("/changed/a.jsonl", (corpus / "a.jsonl").read_bytes())
        documents = epochs(local("memory://changed/*.jsonl"))
        list(islice(documents, 20))
        memory.pipe("/changed/a.jsonl", (corpus / "a.jsonl").read_bytes()[:-30])
        with pytest.raises(ConfigError, match=r"was changed while the run reads it"):
            list(islice(documents, 20))
    finally:
        memory.rm("/changed", recursive=True)


@pytest.fixture
def url(served, corpus):
    """The URL of a file behind http."""
    url = "http://host/a.jsonl"
    served.files[url] = (corpus / "a.jsonl").read_bytes()
    return url


@pytest.mark.parametrize("header", ["ETag", "Last-Modified", "none"])
def test_a_file_behind_http_that_is_changed_at_equal_size_ends_the_run(
    header, url, served, monkeypatch, caplog
):
    monkeypatch.setattr(served, "headers", {} if header == "none" else {header: "1"})
    with caplog.at_level(logging.INFO, logger="titan_lite"):
        documents = epochs(local(url))
        epochs(local(url))
    assert caplog.text.count("neither by ETag nor by Last-Modified") == (header == "none")
    list(islice(documents, 30))
    served.files[url] = served.files[url].replace(b'"a ', b'"x ')
    if header != "none":
        list(islice(documents, 60))  # by its header it is the same file
        monkeypatch.setattr(served, "headers", {header: "2"})
    with pytest.raises(ConfigError, match=r"a\.jsonl was changed while the run reads it"):
        list(islice(documents, 60))


def test_a_file_behind_http_is_hashed_again_only_if_its_server_does_not_know(
    url, served, monkeypatch
):
    monkeypatch.setattr(served, "headers", {"ETag": "1"})
    unchanged = contents.UnchangedFiles([url], url)
    seen = hashed(monkeypatch)
    unchanged.check()
    assert seen == []
    monkeypatch.setattr(served, "headers", {"ETag": "2"})
    unchanged.check()
    unchanged.check()
    assert seen == [url]
    monkeypatch.setattr(served, "headers", {})
    unchanged.check()
    unchanged.check()
    assert seen == [url] * 3


@pytest.mark.parametrize("policy", ["error", "skip"])
def test_a_server_without_ranges_is_no_bad_document(policy, url, served, monkeypatch):
    monkeypatch.setattr(served, "headers", {"ETag": "1"})
    monkeypatch.setattr(files, "PIECE", 100)
    documents = epochs(local(url, on_bad_document=policy))
    monkeypatch.setattr(served, "serves_ranges", False)
    with pytest.raises(ConfigError, match="use a server that serves ranges, or a copy on disk"):
        contents.hash_of(url)
    with pytest.raises(ConfigError, match=r"a\.jsonl cannot be read"):
        list(islice(documents, 20))


def test_a_server_that_does_not_say_a_size_is_named(url, served, monkeypatch):
    monkeypatch.setattr(served, "headers", {"size": None})
    with pytest.raises(ConfigError, match="does not say its size"):
        contents.stamp_of(url)


@pytest.mark.parametrize("part", ["first epoch", "second epoch"])
def test_a_prepared_file_that_is_changed_within_a_run_ends_it(part, corpus, tmp_path):
    from titan_lite.data.outputs import PREPARED
    from titan_lite.tools import prepare

    folder = tmp_path / "prepared"
    options = [f"--data.path={corpus}", "--data.dataset=local"]
    assert prepare.main(["debug_model", str(folder), *options]) == 0
    data = Data(dataset="prepared", path=str(folder), validation_fraction=0.0)
    before = identify(data)
    assert PREPARED in before[0].files
    documents = epochs(data)
    list(islice(documents, 10 if part == "first epoch" else 60))
    (table,) = folder.glob("documents/*.arrow")
    content = bytearray(table.read_bytes())
    content[len(content) // 2] ^= 1
    with table.open("r+b") as file:
        file.write(content)
    name = f"documents/{table.name}"
    assert differences_in_words(before, identify(data)) == [f"1 file was changed ({name})"]
    with pytest.raises(ConfigError, match=rf"{table.name} was changed while the run reads it"):
        list(islice(documents, 60))
