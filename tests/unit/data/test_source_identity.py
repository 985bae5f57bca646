"""The identity of documents: what is the same corpus, and what differs from it; files that are
changed while they are read.
"""

import os
import pickle
import shutil
from itertools import islice

import pyarrow
import pytest
from corpora import local, write_jsonl
from identified import identify
from pyarrow import parquet

from titan_lite.checkpoint.run_identity import documents_of_run, list_documents, run_identity
from titan_lite.config import ConfigError, Data, DataSource, load_config
from titan_lite.data import files
from titan_lite.data import listing as listing_module
from titan_lite.data.documents import build_source
from titan_lite.data.listing import hash_of, list_sources
from titan_lite.data.loader import build_loader
from titan_lite.data.outputs import PREPARED
from titan_lite.data.source_identity import (
    differences_in_words,
    digest_of,
)
from titan_lite.distributed.layout import Layout
from titan_lite.manifest import MAX_WHOLE, SAMPLE_BYTES
from titan_lite.rules import read_inputs
from titan_lite.tools import prepare


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


def test_the_identity_is_that_of_steps_of_before(tmp_path):
    """Such steps resume, and files are compared by their contents."""
    (tmp_path / "large.txt").write_bytes(bytes(range(256)) * 2**13)
    (tmp_path / "small.txt").write_bytes(b"a text\n")
    assert identify(local(tmp_path))[0].files == {
        "large.txt": (2**21, "0b812c235a163337"),
        "small.txt": (7, "105bcf1fdb892d27"),
    }


def test_what_differs_is_named_and_counted(corpus):
    before = identify(local(corpus))
    write_jsonl(corpus / "a.jsonl", ["another"])
    (corpus / "b.jsonl").rename(corpus / "d.jsonl")
    for name in range(5):
        write_jsonl(corpus / f"new {name}.jsonl", ["one"])
    assert differences_in_words(before, identify(local(corpus))) == [
        "1 file was changed (a.jsonl)",
        "6 files were added (d.jsonl, new 0.jsonl, new 1.jsonl and 3 more)",
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


# Listed once


def test_what_was_listed_stays_as_it_was_and_is_handed_over(corpus, monkeypatch):
    (listing,) = list_sources(local(corpus))
    listing.complete()
    names, identity = [file.name for file in listing.files], listing.identity
    (corpus / "a.jsonl").unlink()
    write_jsonl(corpus / "new.jsonl", ["one"])
    handed_over = pickle.loads(pickle.dumps(listing))
    monkeypatch.setattr(listing_module, "local_files", lambda data: pytest.fail("listed again"))
    monkeypatch.setattr(listing_module, "hash_of", lambda file: pytest.fail("hashed again"))
    for found in (listing, handed_over):
        assert [file.name for file in found.files] == names
        assert [piece.name for piece in found.pieces] == names
        assert found.identity == identity


def test_only_the_first_rank_of_a_node_looks_at_the_documents(corpus, monkeypatch):
    config = load_config("debug_model", ["--data.dataset=local", f"--data.path={corpus}/absent"])
    layout = Layout.from_config(config, 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert read_inputs(config, layout)[1] == []
    monkeypatch.setenv("LOCAL_RANK", "0")
    (mistake,) = read_inputs(config, layout)[1]
    assert "no such file" in mistake.line


def test_a_start_lists_and_hashes_once(corpus, tmp_path, monkeypatch):
    """Footers of parquet are read once, too: they are the pieces."""
    parquet.write_table(pyarrow.table({"text": ["one", "two"]}), corpus / "d.parquet")
    listed, hashed, cut = [], [], []
    for name, calls in (("local_files", listed), ("hash_of", hashed), ("cut_into_pieces", cut)):
        function = getattr(listing_module, name)
        monkeypatch.setattr(
            listing_module,
            name,
            lambda value, function=function, calls=calls: calls.append(value) or function(value),
        )
    options = ["--data.dataset=local", f"--data.path={corpus}", "--data.validation_fraction=0.3"]
    config = load_config("debug_model", [*options, "--validation.enable"])
    layout = Layout.from_config(config, 1)
    listings = list_documents(config)
    tokenizer, mistakes = read_inputs(config, layout, listings)
    assert mistakes == []
    identity = run_identity(config, layout, tokenizer, documents_of_run(listings))
    for split in ("train", "validation"):
        build_loader(
            config.data,
            tokenizer,
            split=split,
            streams=2,
            batch_size=2,
            seq_len=8,
            dp_rank=0,
            dp_degree=1,
            seed=0,
            listings=listings["documents"],
        )
    assert identity.documents == digest_of(identify(config.data))
    assert len(listed) == len(cut) + 1 == 2  # once more to compare
    assert len(hashed) == 2 * 4


def test_a_server_is_asked_for_the_samples_alone(served):
    """By default fsspec reads some MiB ahead."""
    url = "http://host/large.jsonl"
    served.files[url] = bytes(4 * MAX_WHOLE)
    asked = []
    served.fails(None, when=lambda: False)
    opened = served._open
    served._open = lambda self, path, mode="rb", block_size=None, **more: (
        asked.append(block_size) or opened(self, path, mode, **more)
    )
    try:
        hash_of(url)
    finally:
        served._open = opened
    assert asked == [SAMPLE_BYTES]


# Files that are changed while they are read


def epochs(data):
    source = build_source(data, split="train", seed=0)
    return (text for _, text in source.documents(0, lambda ordinal: True))


CHANGES = {
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


def test_a_text_file_is_looked_at_when_it_is_opened(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\n")
    documents = epochs(local(tmp_path))
    for _ in range(3):
        next(documents)
    content = path.read_bytes()
    path.write_bytes(content + b"\n")
    with pytest.raises(ConfigError, match=r"was changed while the run reads it"):
        list(islice(documents, 5))


@pytest.fixture
def url(served, corpus):
    """The URL of a file behind http."""
    url = "http://host/a.jsonl"
    served.files[url] = (corpus / "a.jsonl").read_bytes()
    return url


def test_a_file_behind_http_that_is_appended_to_ends_the_run(url, served):
    documents = epochs(local(url))
    list(islice(documents, 30))
    served.files[url] += b'{"text": "one more"}\n'
    with pytest.raises(ConfigError, match=r"a\.jsonl was changed while the run reads it"):
        list(islice(documents, 60))


@pytest.mark.parametrize("policy", ["error", "skip"])
def test_a_server_without_ranges_is_no_bad_document(policy, url, served, monkeypatch):
    monkeypatch.setattr(files, "PIECE", 100)
    documents = epochs(local(url, on_bad_document=policy))
    monkeypatch.setattr(served, "serves_ranges", False)
    with pytest.raises(ConfigError, match="use a server that serves ranges, or a copy on disk"):
        hash_of(url)
    with pytest.raises(ConfigError, match=r"a\.jsonl cannot be read"):
        list(islice(documents, 20))


def test_a_prepared_file_that_is_changed_is_another_corpus(corpus, tmp_path):
    folder = tmp_path / "prepared"
    options = [f"--data.path={corpus}", "--data.dataset=local"]
    assert prepare.main(["debug_model", str(folder), *options]) == 0
    data = Data(dataset="prepared", path=str(folder), validation_fraction=0.0)
    before = identify(data)
    assert PREPARED in before[0].files
    (table,) = folder.glob("documents/*.arrow")
    content = bytearray(table.read_bytes())
    content[len(content) // 2] ^= 1
    with table.open("r+b") as file:
        file.write(content)
    name = f"documents/{table.name}"
    assert differences_in_words(before, identify(data)) == [f"1 file was changed ({name})"]
