"""Prepared data: a corpus tokenized once, read from any place in an order that is computed."""

import dataclasses
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from base64 import b64encode
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_lite import manifest
from titan_lite.check import check
from titan_lite.checkpoint.state import merge_loaders
from titan_lite.config import ConfigError, Data, load_config
from titan_lite.data import prepare as command
from titan_lite.data.dataset import build_source, fingerprint
from titan_lite.data.loader import build_loader
from titan_lite.data.prepare import prepare
from titan_lite.data.prepared import PreparedSource, check_prepared, read_manifest, shuffled
from titan_lite.data.tokenizer import load_tokenizer
from titan_lite.layout import make_layout
from titan_lite.outside import ANY, WORD

datasets = pytest.importorskip("datasets")
ROOT = Path(__file__).parents[3]
TOKENIZER = load_tokenizer(ROOT / "assets/tokenizer/debug.model")
RECIPE = str(ROOT / "train_configs/debug_model.toml")


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path_factory, monkeypatch):
    """`datasets` leaves a lock file for each file it opens."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))


def text(i):
    return f"document {i} " + "".join(
        chr(33 + (i * 7 + j * (i + 1)) % 90) for j in range(i * 13 % 97)
    )


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """150 documents, all different, in three files."""
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(3):
        some = range(number * 50, number * 50 + 50)
        (folder / f"{number}.jsonl").write_text(
            "".join(json.dumps({"text": text(i)}) + "\n" for i in some)
        )
    return folder


def local(corpus, **more):
    return Data(
        dataset="local", path=str(corpus), **{"validation_fraction": 0.2, "num_workers": 0, **more}
    )


@pytest.fixture(scope="module")
def folder(corpus, tmp_path_factory):
    """Several shards of each split."""
    path = tmp_path_factory.mktemp("prepared") / "corpus"
    prepare(local(corpus), TOKENIZER, path, workers=0, shard_tokens=500)
    assert len(list(path.glob("train-*.tokens"))) > 4
    assert len(list(path.glob("validation-*.tokens"))) > 1
    return path


def prepared(folder, **more):
    return Data(dataset="prepared", path=str(folder), **{"num_workers": 0, **more})


def read(source, start, count, wanted=lambda ordinal: True):
    return [
        (ordinal, document.tolist())
        for ordinal, document in islice(source.documents(start, wanted), count)
    ]


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


# What is written


@pytest.mark.parametrize("split", ["train", "validation"])
def test_in_order_it_is_what_reading_the_text_gives(corpus, folder, split):
    texts = build_source(local(corpus, shuffle=False), split=split, seed=0).documents(
        0, lambda ordinal: True
    )
    source = PreparedSource(prepared(folder, shuffle=False), split, seed=0)
    count = sum(shard["documents"] for shard in read_manifest(folder)["splits"][split])
    assert 10 < count < 140
    expected = [TOKENIZER.encode_document(text).tolist() for _, text in islice(texts, 2 * count)]
    assert read(source, 0, 2 * count) == list(enumerate(expected))
    tokens = sum(shard["tokens"] for shard in read_manifest(folder)["splits"][split])
    assert tokens == sum(map(len, expected[:count]))


def test_the_bytes_do_not_depend_on_the_workers(corpus, folder, tmp_path):
    prepare(local(corpus), TOKENIZER, tmp_path / "p", workers=3, shard_tokens=500)
    assert contents(tmp_path / "p") == contents(folder)


def test_a_large_vocabulary_has_larger_tokens(corpus, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(TOKENIZER, "vocab_size", 1 << 16 | 1)
    prepare(local(corpus), TOKENIZER, tmp_path / "p", workers=0)
    assert read_manifest(tmp_path / "p")["dtype"] == "uint32"
    documents = [
        read(PreparedSource(prepared(f, shuffle=False), "train", 0), 0, 300)
        for f in (folder, tmp_path / "p")
    ]
    assert documents[0] == documents[1]


def test_killed_it_goes_on_after_the_last_whole_shard(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text(i) * 20}) + "\n" for i in range(700)))
    command = [sys.executable, "-m", "titan_lite.data.prepare", RECIPE, str(tmp_path / "p")]
    command += [
        "--data.dataset=local",
        f"--data.path={corpus}",
        "--shard-tokens=30000",
        "--workers=2",
    ]
    first = subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    unfinished, progress = tmp_path / "unfinished-p", tmp_path / "unfinished-p/progress.json"
    while not progress.exists() or not json.loads(progress.read_text())["files"]:
        assert first.poll() is None
        time.sleep(0.01)
    workers = children(first.pid)
    first.kill()
    first.wait()
    assert len(workers) >= 2
    for _ in range(500):  # which end with their parent
        if not any(map(runs, workers)):
            break
        time.sleep(0.01)
    else:
        pytest.fail("worker processes outlived their parent")
    before = {
        path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in unfinished.iterdir()
    }
    whole = json.loads(progress.read_text())["files"]
    assert not (tmp_path / "p").exists()
    (unfinished / "train-99999.tokens").write_bytes(b"left over")
    with pytest.raises(ConfigError, match="was begun with other shard_tokens"):
        prepare(
            local(corpus, validation_fraction=0.05),
            TOKENIZER,
            tmp_path / "p",
            workers=0,
            shard_tokens=99,
        )
    second = subprocess.run(command, capture_output=True, text=True)
    assert second.returncode == 0, second.stderr
    assert f"has {len(whole) // 2} whole shards: continuing after them" in second.stdout
    assert all(
        ((tmp_path / "p" / name).stat().st_ino, (tmp_path / "p" / name).stat().st_mtime_ns)
        == before[name]
        for name in whole
    )
    prepare(
        local(corpus, validation_fraction=0.05),
        TOKENIZER,
        tmp_path / "at once",
        workers=0,
        shard_tokens=30000,
    )
    assert contents(tmp_path / "p") == contents(tmp_path / "at once")
    assert len(contents(tmp_path / "p")) - 1 > len(whole)


def children(pid):
    return [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Dies:
    vocab_size, sha256 = 2048, "0" * 64

    def __reduce__(self):  # unpickled in the worker
        return signal.raise_signal, (signal.SIGKILL,)


def test_a_worker_that_dies_is_an_error_and_no_hang(corpus, tmp_path):
    with pytest.raises(ConfigError, match="a worker process died"):
        prepare(local(corpus), Dies(), tmp_path / "p", workers=2)
    assert not (tmp_path / "p").exists()


def test_two_at_once_are_refused(corpus, tmp_path):
    (tmp_path / "unfinished-p").mkdir()
    with (
        command._writing(tmp_path / "p", tmp_path / "unfinished-p"),
        pytest.raises(ConfigError, match="being written by another process"),
    ):
        prepare(local(corpus), TOKENIZER, tmp_path / "p", workers=0)


def test_a_full_disk_is_told_and_gone_on_from(corpus, tmp_path, monkeypatch, folder):
    write, written = command._Shard.write, []

    def full(shard, documents):
        written.append(shard.name)
        if len(written) == 12:
            raise OSError(28, "No space left on device")
        write(shard, documents)

    monkeypatch.setattr(command._Shard, "write", full)
    with pytest.raises(
        ConfigError, match=r"No space left on device; use the same command to continue"
    ):
        prepare(local(corpus), TOKENIZER, tmp_path / "p", workers=0, shard_tokens=500)
    prepare(local(corpus), TOKENIZER, tmp_path / "p", workers=0, shard_tokens=500)
    assert contents(tmp_path / "p") == contents(folder)


def test_the_command_prepares_says_what_and_verifies(corpus, tmp_path, capsys):
    options = [
        RECIPE,
        str(tmp_path / "p"),
        "--workers",
        "0",
        "--data.dataset",
        "local",
        "--data.path",
        str(corpus),
    ]
    assert command.main(options) == 0
    out = capsys.readouterr().out
    assert f"--data.dataset prepared --data.path {tmp_path}/p trains on it" in out
    assert "train: 139 documents, 7,501 tokens, shards: 1" in out
    assert command.main(["--verify", str(tmp_path / "p")]) == 0
    assert "every byte is as written" in capsys.readouterr().out
    shard = tmp_path / "p/train-00000.tokens"
    content = bytearray(shard.read_bytes())
    content[100] ^= 1
    shard.write_bytes(content)
    assert command.main(["--verify", str(tmp_path / "p")]) == 2
    assert "train-00000.tokens was altered" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["FOLDER"], "expected RECIPE FOLDER first"),
        ([RECIPE, "--workers", "1"], "expected RECIPE FOLDER first"),
        ([RECIPE, "HERE"], "exists, and nothing is overwritten"),
        ([RECIPE, "new", "--workers", "-1"], "--workers -1: expected 0 or more"),
        (
            [RECIPE, "precious", "--workers", "0"],
            "unfinished-precious exists, and this command did not write it",
        ),
        (
            [RECIPE, "foreign", "--workers", "0"],
            "unfinished-foreign: progress.json: splits = None: expected an object",
        ),
        (["--verify", "HERE", RECIPE], "expected nothing else"),
        ([RECIPE, "new", "--shard-tokens", "0"], "--shard-tokens 0: expected 1 or more"),
        ([RECIPE, "new", "--data.path=x"], "is only read with data.dataset"),
        ([RECIPE, "new", "--data.dataset=prepared", "--data.path=HERE"], "is prepared already"),
        ([RECIPE, "new", "--data.dataset=local", "--data.path=nowhere"], "no such file"),
        ([RECIPE, "new", "--model.tokenizer_path=nowhere"], "cannot be read"),
        (["--verify", "nowhere"], 'data.path = "nowhere": manifest.json is missing'),
    ],
)
def test_what_is_wrong_is_one_line(folder, tmp_path, options, words, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, file in (("precious", "notes.txt"), ("foreign", "progress.json")):
        (tmp_path / f"unfinished-{name}").mkdir()
        (tmp_path / f"unfinished-{name}" / file).write_text("{}")
    assert command.main([option.replace("HERE", str(folder)) for option in options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert words in line
    assert (tmp_path / "unfinished-precious/notes.txt").exists()


def test_a_corpus_with_nothing_to_train_on_is_an_error(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    (tmp_path / "bad.jsonl").write_text("bad\n")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"has no (document that can be read|train document)"):
            prepare(
                local(tmp_path / "bad.jsonl", on_bad_document="skip"),
                TOKENIZER,
                tmp_path / "p",
                workers=0,
            )
    with pytest.raises(ConfigError, match="has no train document"):
        prepare(
            local(tmp_path / "a.jsonl", validation_fraction=0.999999),
            TOKENIZER,
            tmp_path / "s",
            workers=0,
        )
    prepare(
        local(tmp_path / "a.jsonl", validation_fraction=0.1), TOKENIZER, tmp_path / "q", workers=0
    )
    assert read(PreparedSource(prepared(tmp_path / "q"), "train", 0), 0, 1) == [
        (0, TOKENIZER.encode_document("x").tolist())
    ]
    more = ["--data.dataset=prepared", f"--data.path={tmp_path}/q", f"--job.dump_folder={tmp_path}"]
    with pytest.raises(
        ConfigError,
        match=r"has no validation document; prepare it again with another .*\(it was 0.1\)",
    ):
        checked(load_config(RECIPE, more))
    checked(load_config(RECIPE, [*more, "--validation.no-enable"]))


def test_bad_documents_are_an_error_or_skipped_and_listed(tmp_path):
    lines = [json.dumps({"text": text(i)}) for i in range(40)]
    lines[7], lines[20], lines[33] = '{"text": null}', "{", json.dumps({"text": ""})
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(ConfigError, match=r"a.jsonl, line 8: .*on_bad_document"):
        prepare(local(tmp_path / "a.jsonl"), TOKENIZER, tmp_path / "p", workers=0, shard_tokens=99)
    skip = local(tmp_path / "a.jsonl", on_bad_document="skip")
    with pytest.raises(
        ConfigError, match=r"data.max_bad_documents = 2: there are 3, the last one .*a.jsonl, line"
    ):
        prepare(
            skip.replace(max_bad_documents=2),
            TOKENIZER,
            tmp_path / "q",
            workers=0,
            shard_tokens=99,
        )
    # what was advised goes on from there
    described = prepare(skip, TOKENIZER, tmp_path / "q", workers=0, shard_tokens=99)
    assert (
        described["files"]
        == prepare(skip, TOKENIZER, tmp_path / "r", workers=0, shard_tokens=99)["files"]
    )
    assert {(bad["file"], bad["place"]) for bad in described["bad"]} == {
        (str(tmp_path / "a.jsonl"), f"line {n}") for n in (8, 21, 34)
    }
    shards = [shard for split in described["splits"].values() for shard in split]
    assert sum(shard["documents"] for shard in shards) == 37
    assert "skipped: 3 bad documents" in command._summary(described)


def test_more_shards_than_a_manifest_may_list_are_refused_while_they_are_made(
    corpus, tmp_path, monkeypatch
):
    monkeypatch.setattr(command, "MOST", 8000)
    with pytest.raises(
        ConfigError,
        match=r"--shard-tokens 9: \d+ files are more than a manifest may list; use a larger value",
    ):
        prepare(local(corpus), TOKENIZER, tmp_path / "p", workers=0, shard_tokens=9)


def mixture(corpus, folder, tmp_path):
    """A recipe's options: two folders of text, one prepared before."""
    (tmp_path / "books").mkdir()
    (tmp_path / "books/a.jsonl").write_text(
        "".join(json.dumps({"text": text(i)}) + "\n" for i in range(200, 240))
    )
    sources = [
        ("local", corpus, 2),
        ("local", tmp_path / "books/*.jsonl", 1),
        ("prepared", folder, 1),
    ]
    tables = ", ".join(
        f'{{dataset = "{name}", path = "{path}", weight = {weight}}}'
        for name, path, weight in sources
    )
    return [RECIPE, str(tmp_path / "mix"), "--workers=0", f"--data.sources=[{tables}]"]


def test_a_mixture_becomes_a_folder_for_each_source_and_a_part_of_a_recipe(
    corpus, folder, tmp_path, capsys
):
    options = mixture(corpus, folder, tmp_path)
    assert command.main(options) == 0
    out = capsys.readouterr().out
    names = [f"1-{corpus.name}", "2-books"]
    assert sorted(path.name for path in (tmp_path / "mix").iterdir()) == names
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'extends = "{RECIPE}"\n' + out[out.index("\n[[data.sources]]") :])
    data = load_config(recipe).data
    assert [source.path for source in data.sources] == [
        *(f"{tmp_path}/mix/{name}" for name in names),
        str(folder),
    ]
    assert [(share, part.dataset) for share, part in data.mixture()] == [
        (0.5, "prepared"),
        (0.25, "prepared"),
        (0.25, "prepared"),
    ]
    fraction = load_config(RECIPE).data.validation_fraction
    prepare(
        local(tmp_path / "books", validation_fraction=fraction),
        TOKENIZER,
        tmp_path / "alone",
        workers=0,
    )
    alone, part = contents(tmp_path / "alone"), contents(tmp_path / "mix/2-books")
    assert {
        name: content for name, content in alone.items() if "manifest" not in name
    }.items() <= part.items()
    [loader] = loaders(data, 1, 4, 4, 16)
    next(loader)
    assert command.main(options) == 2  # nothing is overwritten
    assert "mix exists, and nothing is overwritten" in capsys.readouterr().err


def test_a_mixture_goes_on_after_the_sources_that_are_whole(
    corpus, folder, tmp_path, capsys, monkeypatch
):
    options, each = mixture(corpus, folder, tmp_path), []

    def stopped(data, tokenizer, path, *, prepare=command.prepare, **how):
        each.append(path.name)
        if len(each) == 2:
            raise KeyboardInterrupt
        return prepare(data, tokenizer, path, **how)

    monkeypatch.setattr(command, "prepare", stopped)
    assert command.main(options) == 130
    assert "use the same command to continue" in capsys.readouterr().err
    assert not (tmp_path / "mix").exists()
    assert command.main([*options, "--shard-tokens=99"]) == 2
    assert (
        f"unfinished-mix/1-{corpus.name} was made with other shard_tokens; use the same to continue"
        in capsys.readouterr().err
    )
    assert command.main(options) == 0
    assert each == [f"1-{corpus.name}", "2-books", "2-books"]
    (tmp_path / "unfinished-other").mkdir()
    (tmp_path / "unfinished-other/notes.txt").touch()
    assert command.main([RECIPE, str(tmp_path / "other"), *options[2:]]) == 2
    assert (
        "unfinished-other has notes.txt, which this command did not write"
        in capsys.readouterr().err
    )


# What is read


def alter(folder, change):
    described = manifest.read_sealed(folder, {WORD: ANY})
    change(described)
    manifest.write_sealed(folder / "manifest.json", described)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            lambda f: (f / "manifest.json").unlink(),
            "manifest.json is missing; use `python -m titan_lite.data.prepare` to",
        ),
        (lambda f: (f / "manifest.json").write_text("{}"), "manifest.json was altered"),
        (lambda f: (f / "manifest.json").write_text("[" * 9), "manifest.json is not JSON"),
        (
            lambda f: manifest.write(f, step=1, files={}),
            "manifest.json is in no format of prepared data",
        ),
        (lambda f: (f / "train-00001.tokens").unlink(), "train-00001.tokens is missing"),
        (
            lambda f: os.truncate(f / "train-00001.documents", 8),
            "train-00001.documents has 8 bytes of ",
        ),
        (
            lambda f: alter(f, lambda d: d.update(format=2)),
            "is in format 2, and this version reads format 1",
        ),
        (
            lambda f: (f / "manifest.json").write_text(
                (f / "manifest.json").read_text().replace('"size": ', '"size":  ', 1)
            ),
            "manifest.json was altered",
        ),
    ],
)
def test_what_is_not_whole_is_named_before_a_run_starts(folder, tmp_path, damage, words):
    copy = tmp_path / "copy"
    copy.mkdir()
    for name, content in contents(folder).items():
        (copy / name).write_bytes(content)
    check_prepared(prepared(copy), TOKENIZER.sha256, TOKENIZER.vocab_size)
    damage(copy)
    with pytest.raises(ConfigError) as error:
        check_prepared(prepared(copy), TOKENIZER.sha256, TOKENIZER.vocab_size)
    assert str(error.value).startswith(f'data.path = "{copy}"')
    assert words in str(error.value)


def test_links_of_a_cache_of_the_hub_are_followed_and_no_others_that_leave_the_folder(
    folder, tmp_path
):
    cache = tmp_path / "datasets--a--b"
    snapshot, blobs = cache / "snapshots/0123/corpus", cache / "blobs"
    snapshot.mkdir(parents=True)
    shutil.copytree(folder, blobs)
    for path in folder.iterdir():
        (snapshot / path.name).symlink_to(Path("../../../blobs", path.name))
    assert read_manifest(snapshot, every_byte=True) == read_manifest(folder)
    (tmp_path / "whole").symlink_to(folder)  # the folder itself may be one
    assert read_manifest(tmp_path / "whole") == read_manifest(folder)
    for name in ("train-00000.tokens", "manifest.json"):
        copy = shutil.copytree(folder, tmp_path / f"with {name}")
        (copy / name).unlink()
        (copy / name).symlink_to(folder / name)
        with pytest.raises(ConfigError, match=f"{name} is a link that leads out of this folder"):
            read_manifest(copy)


def test_another_tokenizer_is_an_error(folder):
    with pytest.raises(
        ConfigError,
        match=r"was made by another tokenizer \(SHA-256 865699d1d602, \d+ tokens\) than model.tokenizer_path \(ffff",
    ):
        check_prepared(prepared(folder), "f" * 64, TOKENIZER.vocab_size)


def checked(config):
    return check(config, make_layout(config, 1))


def test_check_finds_it_before_anything_starts(folder, tmp_path):
    more = ["--data.dataset=prepared", f"--data.path={folder}", f"--job.dump_folder={tmp_path}"]
    checked(load_config(RECIPE, more))
    (tmp_path / "other.model").write_text(
        "".join(f"{b64encode(bytes([i])).decode()} {i}\n" for i in range(256))
    )
    with pytest.raises(ConfigError, match="was made by another tokenizer"):
        checked(load_config(RECIPE, [*more, f"--model.tokenizer_path={tmp_path}/other.model"]))
    with pytest.raises(ConfigError, match=r"manifest.json is missing"):
        checked(load_config(RECIPE, [*more, f"--data.path={tmp_path}"]))


def test_it_is_told_by_its_bytes_wherever_it_lies(folder, tmp_path):
    for name, content in contents(folder).items():
        (tmp_path / name).write_bytes(content)
    assert fingerprint(prepared(folder)) == fingerprint(prepared(tmp_path))
    alter(
        tmp_path, lambda described: described["files"]["train-00000.tokens"].update(sha256="0" * 64)
    )
    assert fingerprint(prepared(folder)) != fingerprint(prepared(tmp_path))


def test_an_epoch_has_every_document_once_in_an_order_of_its_own(folder):
    plain = PreparedSource(prepared(folder, shuffle=False), "train", 0)
    count = int(plain.firsts[-1])
    in_order = [document for _, document in read(plain, 0, count)]
    stream = read(PreparedSource(prepared(folder), "train", seed=1), 0, 3 * count)
    assert [ordinal for ordinal, _ in stream] == list(range(3 * count))
    epochs = [[document for _, document in stream[i * count : (i + 1) * count]] for i in range(3)]
    assert all(sorted(epoch) == sorted(in_order) for epoch in epochs)
    orders = [
        in_order,
        *epochs,
        [
            document
            for _, document in read(PreparedSource(prepared(folder), "train", seed=2), 0, count)
        ],
    ]
    assert len({json.dumps(order) for order in orders}) == 5


def test_it_starts_anywhere_and_opens_only_what_is_wanted(folder, monkeypatch):
    source = PreparedSource(prepared(folder), "train", seed=0)
    count = int(source.firsts[-1])
    everything = dict(read(source, 0, 3 * count))
    for start in (0, 1, count - 1, count, 2 * count - 5):
        expected = [(o, everything[o]) for o in range(start, 3 * count) if o % 4 == 1][:9]
        assert read(source, start, len(expected), lambda ordinal: ordinal % 4 == 1) == expected
    opened = []
    monkeypatch.setattr(
        PreparedSource,
        "_open",
        lambda self, number, open=PreparedSource._open: opened.append(number) or open(self, number),
    )
    read(source, 10**12, 1)  # deep in the data, at once
    assert len(opened) == 1


def test_it_pickles_without_its_data(folder):
    source = PreparedSource(prepared(folder), "train", seed=0)
    expected = read(source, 5, 20)
    assert len(pickle.dumps(source)) < 5000
    assert read(pickle.loads(pickle.dumps(source)), 5, 20) == expected


# The order


@settings(deadline=None)
@given(count=st.integers(1, 3000), key=st.text(max_size=5))
def test_a_shuffled_range_is_a_permutation(count, key):
    order = shuffled(np.arange(count), count, key)
    assert sorted(order.tolist()) == list(range(count))
    some = np.array([0, count // 2, count - 1])
    assert (
        shuffled(some, count, key).tolist() == order[some].tolist()
    )  # each place alone gives the same


@pytest.mark.parametrize("count", [2, 3, 4, 5, 16])
def test_every_document_comes_to_every_place_as_often(count):
    """Pearson's chi-squared over places and documents, (count - 1)^2 degrees of freedom."""
    orders = 100 * count
    seen = np.zeros((count, count))
    for key in range(orders):
        seen[np.arange(count), shuffled(np.arange(count), count, f"{key} 0")] += 1
    freedom = (count - 1) ** 2
    chi_squared = float(((seen - 100) ** 2 / 100).sum())
    assert abs(chi_squared - freedom) < 5 * (2 * freedom) ** 0.5 + 5


def test_neighbours_are_not_kept_together():
    order = shuffled(np.arange(100_000), 100_000, "0 0")
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(np.arange(100_000), order)[0, 1]) < 0.02
    assert np.mean(np.abs(np.diff(order)) < 100) < 0.005
    assert shuffled(np.arange(5), 10**12, "0 0").tolist() == EVER_SAME


EVER_SAME = [
    340457459576,
    136063862342,
    551914329791,
    786562039936,
    379612133931,
]  # a run goes on with it under any version


# Through the loader


def loaders(data, dp_degree, batch_size, rows, seq_len, state=None):
    ranks = []
    for rank in range(dp_degree):
        shape = dict(
            rows=rows, batch_size=batch_size, seq_len=seq_len, dp_rank=rank, dp_degree=dp_degree
        )
        ranks.append(build_loader(data, TOKENIZER, split="train", seed=0, **shape))
        if state is not None:
            ranks[-1].load_state_dict(state)
    return ranks


def step(ranks, batch_size, rows):
    """One optimizer step's windows, (rows, seq_len + 1)."""
    shares = []
    for loader in ranks:
        batches = [next(loader) for _ in range(rows // len(ranks) // batch_size)]
        shares.append(
            torch.cat([torch.cat([input, label[:, -1:]], dim=1) for input, label in batches])
        )
    return torch.stack(shares, dim=1).flatten(
        0, 1
    )  # window n is that of rank n modulo their number


def test_batches_are_those_of_the_text_itself(corpus, tmp_path):
    """In the first epoch, where nothing is held out: later the text's ordinals have gaps."""
    prepare(
        local(corpus, validation_fraction=0.0),
        TOKENIZER,
        tmp_path / "p",
        workers=0,
        shard_tokens=500,
    )
    for num_workers in (0, 1, 2):
        text = loaders(local(corpus, shuffle=False, validation_fraction=0.0), 1, 4, 4, 32)
        tokens = loaders(
            prepared(tmp_path / "p", shuffle=False, num_workers=num_workers), 1, 4, 4, 32
        )
        for _ in range(40):
            assert torch.equal(step(tokens, 4, 4), step(text, 4, 4))
            assert tokens[0].state_dict() == text[0].state_dict()
        assert min(ordinal for _, (ordinal, _) in tokens[0].state_dict()["rows"].values()) > 90


@settings(deadline=None, max_examples=25)
@given(
    seq_len=st.integers(1, 200),
    share=st.integers(1, 4),
    degrees=st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=4),
    steps=st.integers(1, 6),
)
def test_every_token_once_in_order_on_any_ranks_resumed_anywhere(
    folder, seq_len, share, degrees, steps
):
    rows, data = 4 * share, prepared(folder)
    windows, state = [], None
    for degree in degrees:  # resumed on each
        ranks = loaders(data, degree, 1, rows, seq_len, state)
        windows += [step(ranks, 1, rows) for _ in range(steps)]
        state = json.loads(json.dumps(merge_loaders([loader.state_dict() for loader in ranks])))
    streams = torch.stack(windows, dim=1).flatten(1).tolist()
    source = PreparedSource(data, "train", seed=0)
    for row in range(rows):
        expected = []
        for _, document in source.documents(0, lambda ordinal, row=row: ordinal % rows == row):
            expected += document.tolist()
            if len(expected) >= len(streams[row]):
                break
        assert streams[row] == expected[: len(streams[row])]


def test_a_state_of_other_data_is_refused(folder):
    [loader] = loaders(prepared(folder), 1, 4, 4, 16)
    state = loader.state_dict()
    state["rows"]["3"] = [5, [3, 10**9]]
    loader.load_state_dict(state)
    with pytest.raises(ConfigError, match="1000000000 tokens into document 3"):
        next(loader)


def test_documents_are_chosen_without_regard_to_length(folder):
    """The first half of an epoch has about half of all tokens: long documents do not come first."""
    source = PreparedSource(prepared(folder), "train", seed=0)
    count = int(source.firsts[-1])
    lengths = Counter({ordinal: len(document) for ordinal, document in read(source, 0, count)})
    first = sum(lengths[ordinal] for ordinal in range(count // 2))
    assert 0.35 < first / lengths.total() < 0.65


def test_settings_that_matter_to_no_prepared_byte_are_left_out(corpus, folder, tmp_path):
    data = dataclasses.replace(
        local(corpus), shuffle=False, shuffle_buffer=3, num_workers=1, prefetch=9
    )
    prepare(data, TOKENIZER, tmp_path / "p", workers=0, shard_tokens=500)
    assert contents(tmp_path / "p") == contents(folder)
