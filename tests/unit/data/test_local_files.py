"""Which files are a corpus, and their names: by these documents are held out."""

import itertools
import logging
import os
from itertools import islice

import fsspec
import pytest
from corpora import local, write_jsonl
from identified import identify

from titan_lite.config import ConfigError, Data, load_config
from titan_lite.data.documents import build_source, check_data
from titan_lite.data.files import local_files
from titan_lite.data.source_identity import digest_of


def names(data):
    return [file.name for file in local_files(data)]


def split_of(path):
    """Return (training, held-out documents) of one epoch."""
    sets = []
    for split in ("train", "validation"):
        source = build_source(local(path, validation_fraction=0.2), split=split, seed=0)
        documents = itertools.takewhile(
            lambda document, source=source: source.epoch(document[0]) == 0,
            source.documents(0, lambda ordinal: True),
        )
        sets.append({text for _, text in documents})
    return sets


@pytest.mark.parametrize("pattern", ["*/*.jsonl", "**/*.jsonl", "20*/[a-z].jsonl", ""])
def test_no_document_changes_its_split_when_folders_are_added(pattern, tmp_path):
    write_jsonl(tmp_path / "2023/a.jsonl", [f"2023 {number}" for number in range(200)])
    train, held_out = split_of(tmp_path / pattern)
    assert len(train) + len(held_out) == 200
    write_jsonl(tmp_path / "2024/a.jsonl", [f"2024 {number}" for number in range(200)])
    write_jsonl(tmp_path / "2023/b.jsonl", [f"b {number}" for number in range(200)])
    more_train, more_held_out = split_of(tmp_path / pattern)
    assert not train & more_held_out
    assert not held_out & more_train
    assert len(more_held_out) > len(held_out)


def test_the_split_at_a_url_does_not_change_when_folders_are_added():
    memory = fsspec.filesystem("memory")
    try:
        memory.pipe("/split/2023/a.txt", b"one")
        assert names(local("memory://split/*/*.txt")) == ["2023/a.txt"]
        memory.pipe("/split/2024/a.txt", b"two")
        assert names(local("memory://split/*/*.txt")) == ["2023/a.txt", "2024/a.txt"]
        assert names(local("memory://*/2024/a.txt")) == ["split/2024/a.txt"]
    finally:
        memory.rm("/split", recursive=True)


def test_names_do_not_depend_on_how_a_path_is_written(tmp_path, monkeypatch):
    for name in ("corpus/2023/a.jsonl", "corpus/2023/part/b.jsonl"):
        write_jsonl(tmp_path / name, [name])
    (tmp_path / "link").symlink_to(tmp_path / "corpus", target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    for path in ("corpus", "corpus/", "./corpus", str(tmp_path / "corpus"), "x/../corpus", "link"):
        for end in ("", "/**/*.jsonl", "//**/*.jsonl", "/*/../*/**/*.jsonl"):
            assert names(local(path + end)) == ["2023/a.jsonl", "2023/part/b.jsonl"], path + end
    assert names(local("corpus/2023/a.jsonl")) == ["a.jsonl"]
    assert names(local("corpus/2023/*.jsonl")) == ["a.jsonl"]
    assert names(local("*/2023/*.jsonl")) == ["corpus/2023/a.jsonl", "link/2023/a.jsonl"]


# The folder of the run inside of the corpus


@pytest.fixture
def corpus(tmp_path):
    """A corpus with the folder of a run in it."""
    write_jsonl(tmp_path / "corpus/a.jsonl", ["one", "two"])
    write_jsonl(tmp_path / "corpus/part/b.jsonl", ["three"])
    return tmp_path / "corpus"


def with_run(path, run_folder):
    recipe = load_config(
        "debug_model",
        [f"--data.path={path}", "--data.dataset=local", f"--job.dump_folder={run_folder}"],
    )
    return recipe.data


@pytest.mark.parametrize("pattern", ["**/*.jsonl", "", "*/*.jsonl"])
@pytest.mark.parametrize("run", ["run", "part/run", "../link/run"])
def test_what_the_run_writes_is_not_its_data(pattern, run, corpus, tmp_path):
    (tmp_path / "link").symlink_to(corpus, target_is_directory=True)
    data = with_run(corpus / pattern, corpus / run)
    before = names(data), digest_of(identify(data))
    for name in ("metrics.jsonl", "events.jsonl", "graphs/0/a.jsonl", "checkpoint/step-1/x.json"):
        write_jsonl(corpus / run / name, ["not a document"])
    assert (names(data), digest_of(identify(data))) == before
    check_data(data)
    assert [text for _, text in islice(texts(data), 3)]


def texts(data):
    return build_source(data.replace(validation_fraction=0.0), split="train", seed=0).documents(
        0, lambda ordinal: True
    )


def test_the_run_folder_is_left_out_of_every_source_of_a_mixture(corpus):
    write_jsonl(corpus / "run/metrics.jsonl", ["not a document"])
    sources = f'[{{dataset = "local", path = "{corpus}/**/*.jsonl"}}, {{weight = 2}}]'
    recipe = load_config(
        "debug_model", ["--data.sources", sources, f"--job.dump_folder={corpus}/run"]
    )
    (_, part), _ = recipe.data.mixture()
    assert names(part) == ["a.jsonl", "part/b.jsonl"]
    recipe = load_config(
        "debug_model", [f"--validation.path={corpus}", f"--job.dump_folder={corpus}/run"]
    )
    assert names(recipe.validation_data) == ["a.jsonl", "part/b.jsonl"]


# What other runs and programs have written into the corpus

OF_RUN = ("config.toml", "events.jsonl", "graphs/0/a.txt")
OF_STEP = ("manifest.json", "state.json", "documents.json")
OF_PREPARED = ("prepared.json", "documents/a.jsonl")


@pytest.mark.parametrize("written", [OF_RUN, OF_STEP, OF_PREPARED])
@pytest.mark.parametrize("folder", ["old", "part/old", "old/deeper"])
@pytest.mark.parametrize("prefix", ["", "file://"])
def test_what_other_runs_have_written_is_no_data(prefix, folder, written, corpus, caplog):
    data = local(f"{prefix}{corpus}", validation_fraction=0.0)
    before = names(data), digest_of(identify(data))
    for name in written:
        write_jsonl(corpus / folder / name, ["not a document"])
    with caplog.at_level(logging.INFO, logger="titan_lite"):
        assert (names(data), digest_of(identify(data))) == before
    assert f"that titan_lite has written are left out ({corpus / folder})" in caplog.text


def test_files_with_a_name_that_runs_have_are_documents(corpus):
    write_jsonl(corpus / "github/events.jsonl", ["a push"])
    write_jsonl(corpus / "github/manifest.json", ["a list"])
    assert {"github/events.jsonl", "github/manifest.json"} < set(names(local(corpus)))


@pytest.mark.parametrize("pattern", ["", "*.jsonl", "**/*.jsonl"])
def test_the_folder_of_another_run_is_no_corpus(pattern, corpus):
    for name in ("lock", "events.jsonl"):
        write_jsonl(corpus / name, ["not a document"])
    with pytest.raises(ConfigError, match=r"data\.path.*a run has written events\.jsonl"):
        check_data(local(corpus / pattern))
    assert names(local(corpus / "part/*.jsonl")) == ["b.jsonl"]
    assert names(local(corpus / "[ab].jsonl")) == ["a.jsonl"]


def test_a_corpus_within_the_folder_of_the_run_is_one(corpus, tmp_path):
    assert names(with_run(corpus, tmp_path)) == ["a.jsonl", "part/b.jsonl"]
    assert names(with_run(corpus / "a.jsonl", corpus)) == ["a.jsonl"]
    assert names(with_run(corpus / "[ab].jsonl", corpus)) == ["a.jsonl"]


@pytest.mark.parametrize("pattern", ["", "*", "*.jsonl", "**/*.jsonl"])
def test_the_folder_of_the_run_is_not_that_of_the_corpus(pattern, corpus):
    with pytest.raises(ConfigError) as error:
        check_data(with_run(corpus / pattern, corpus))
    for part in ("data.path", "job.dump_folder", os.fspath(corpus), "metrics.jsonl"):
        assert part in str(error.value)


# What other programs have left in the corpus


def write_hidden(corpus):
    """Write what notebooks, desktops, git and macOS leave beside documents."""
    for name in (
        ".ipynb_checkpoints/a-checkpoint.jsonl",
        ".Trash-1000/files/old.jsonl",
        ".git/logs/x.jsonl",
        "part/.cache/b.jsonl",
        "._a.jsonl",
    ):
        write_jsonl(corpus / name, ["not a document"])


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_hidden_files_of_a_folder_are_no_documents(prefix, corpus, caplog):
    data = local(f"{prefix}{corpus}")
    before = names(data), digest_of(identify(data))
    write_hidden(corpus)
    with caplog.at_level(logging.INFO, logger="titan_lite"):
        assert (names(data), digest_of(identify(data))) == before
    for part in (".ipynb_checkpoints", ".Trash-1000", ".git", ".cache", "._a.jsonl"):
        assert part in caplog.text
    assert names(local(f"{corpus}/.git/logs")) == ["x.jsonl"]
    assert names(local(f"{corpus}/.git/logs/*.jsonl")) == ["x.jsonl"]
    assert names(local(f"{corpus}/._a.jsonl")) == ["._a.jsonl"]


@pytest.mark.parametrize("pattern", ["", "/**/*.jsonl"])
def test_hidden_files_at_a_url_are_no_documents(pattern):
    memory = fsspec.filesystem("memory")
    line = b'{"text": "a"}'
    try:
        for name in ("a.jsonl", "part/b.jsonl", ".git/c.jsonl", "part/._b.jsonl"):
            memory.pipe(f"/hidden/{name}", line)
        assert names(local(f"memory://hidden{pattern}")) == ["a.jsonl", "part/b.jsonl"]
        assert names(local("memory://hidden/.git/*.jsonl")) == ["c.jsonl"]
        assert names(local("memory://hidden/part/._b.jsonl")) == ["._b.jsonl"]
    finally:
        memory.rm("/hidden", recursive=True)


# What cannot be read


@pytest.mark.parametrize("pattern", ["", "*.jsonl", "**/*.jsonl", "part.jsonl"])
def test_a_link_to_nothing_is_named(pattern, corpus):
    """As in a snapshot of the hub's cache whose blob was deleted."""
    link = corpus / "part.jsonl"
    link.symlink_to("../blobs/0123")
    with pytest.raises(ConfigError) as error:
        local_files(local(corpus / pattern))
    assert str(error.value) == (
        f'data.path = "{corpus / pattern}": {link} cannot be read: No such file or directory; use a'
        " path without it, or make it readable"
    )
    assert names(local(corpus / "[ab].jsonl")) == ["a.jsonl"]
    link.rename(corpus / ".hidden")
    assert names(local(corpus)) == ["a.jsonl", "part/b.jsonl"]


@pytest.mark.parametrize("pattern", ["", "*/*.jsonl", "**/*.jsonl", "**", "part/*.jsonl", "part"])
def test_a_folder_that_cannot_be_read_is_named(pattern, corpus, monkeypatch):
    part = os.fspath(corpus / "part")
    scandir = os.scandir

    def refused(path):
        if os.path.realpath(path) in (part, os.fspath(corpus / ".hidden")):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return scandir(path)

    (corpus / ".hidden").mkdir()
    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(ConfigError, match=rf"data\.path.*: {part}/? cannot be read: Permission d"):
        local_files(local(corpus / pattern))
    assert names(local(corpus / "*.jsonl")) == ["a.jsonl"]


def test_what_a_file_system_has_at_its_root_is_no_part_of_a_corpus(corpus, monkeypatch):
    (corpus / "lost+found").mkdir()
    scandir = os.scandir

    def refused(path):
        if os.fspath(path).endswith("lost+found"):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    assert names(local(corpus)) == ["a.jsonl", "part/b.jsonl"]


def test_a_link_of_a_pattern_to_a_folder_that_is_gone_is_named(corpus):
    (corpus / "more").symlink_to("gone")
    with pytest.raises(ConfigError, match=f"{corpus}/more cannot be read: No such file"):
        local_files(local(corpus / "*/*.jsonl"))


# At a URL


@pytest.mark.parametrize("pattern", ["", "/*.jsonl"])
def test_sizes_that_a_page_of_http_lacks_are_asked_for(pattern, served, monkeypatch):
    def listed(cls, path, **_):
        return {file: {"name": file, "size": None, "type": "file"} for file in cls.files}

    served.files["http://host/corpus/a.jsonl"] = b'{"text": "a"}\n'
    served.files["http://host/corpus/?C=N"] = b"the page in another order"
    for method in ("find", "glob"):
        monkeypatch.setattr(served, method, classmethod(listed))
    if pattern:
        del served.files["http://host/corpus/?C=N"]
    (file,) = local_files(local(f"http://host/corpus{pattern}"))
    assert (file.name, file.size) == ("a.jsonl", 14)
    monkeypatch.setattr(served, "headers", {"size": None})
    with pytest.raises(ConfigError, match=r'data\.path = "http://host.*does not say its size; use'):
        local_files(local(f"http://host/corpus{pattern}"))


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("http://h/my/docs.jsonl?sig=a/b%2B&versionId=3", "docs.jsonl"),
        ("http://h/my%20docs.jsonl?download=1", "my docs.jsonl"),
        ("http://h/caf%C3%A9.jsonl", "caf\u00e9.jsonl"),
    ],
)
def test_a_document_behind_http_has_the_name_of_a_copy_on_disk(url, name, served):
    served.files[url] = b'{"text": "a"}'
    (file,) = local_files(Data(dataset="local", path=url))
    assert file.name == name


def test_files_behind_http_that_differ_in_the_query_alone_are_refused(served):
    served.files |= {f"http://h/docs/a.jsonl?version={n}": b'{"text": "a"}' for n in range(2)}
    with pytest.raises(ConfigError, match=r"several files are documents of a\.jsonl: their URLs"):
        local_files(Data(dataset="local", path="http://h/docs"))
