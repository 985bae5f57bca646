import gzip
import json
import logging
from itertools import islice, pairwise
from pathlib import Path

import pytest
from corpora import local, write_jsonl
from identified import identify

from titan_lite.config import ConfigError, Data, DataSource
from titan_lite.config.errors import MachineError
from titan_lite.data import files
from titan_lite.data.documents import (
    GROUP_STRIDE,
    _belongs,
    build_source,
    check_data,
)
from titan_lite.data.source_identity import digest_of

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path_factory, monkeypatch):
    """`datasets` leaves a lock file for each file it opens."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))


def read(source, start, count, wanted=lambda ordinal: True):
    return list(islice(source.documents(start, wanted), count))


def texts_of(source, start, count):
    return [text for _, text in read(source, start, count)]


# The standard library


def test_stdlib_is_split_without_overlap_and_by_name():
    train, held_out = (
        build_source(Data(), split=split, seed=0).names for split in ("train", "validation")
    )
    everything = build_source(Data(validation_fraction=0.0), split="train", seed=0).names
    assert sorted(train + held_out) == everything
    assert not set(train) & set(held_out)
    assert 0.02 < len(held_out) / len(everything) < 0.1
    larger = build_source(Data(validation_fraction=0.2), split="validation", seed=0).names
    assert set(held_out) < set(larger)  # raising the fraction moves documents one way only
    assert "argparse.py" in everything
    assert "topics/for" in everything
    parts = {part for name in everything for part in name.split("/")}
    assert not parts & {"test", "tests", "site-packages", "__pycache__"}
    assert "pydoc_data/topics.py" not in everything


def test_stdlib_order_belongs_to_seed_and_epoch():
    source = build_source(Data(), split="train", seed=1)
    count = len(source.names)
    first, second = (read(source, epoch * count, count) for epoch in (0, 1))
    assert [ordinal for ordinal, _ in first + second] == list(range(2 * count))
    texts = [text for _, text in first]
    assert texts != [text for _, text in second]
    assert sorted(texts) == sorted(text for _, text in second)
    assert texts == [
        text for _, text in read(build_source(Data(), split="train", seed=1), 0, count)
    ]
    assert texts != [
        text for _, text in read(build_source(Data(), split="train", seed=2), 0, count)
    ]
    plain = build_source(Data(shuffle=False), split="train", seed=1)
    assert [text for _, text in read(plain, 0, 5)] == [text for _, text in read(plain, count, 5)]


def test_stdlib_starts_anywhere_and_reads_only_what_is_wanted(monkeypatch):
    source = build_source(Data(), split="train", seed=0)
    count = len(source.names)
    everything = dict(read(source, 0, 2 * count))
    opened = []
    read_text = Path.read_text

    def listening_read(path, **how):
        opened.append(path)
        return read_text(path, **how)

    monkeypatch.setattr(Path, "read_text", listening_read)
    some = read(source, count - 5, 3, wanted=lambda ordinal: ordinal % 4 == 1)
    expected = [ordinal for ordinal in range(count - 5, 2 * count) if ordinal % 4 == 1][:3]
    assert some == [(ordinal, everything[ordinal]) for ordinal in expected]
    assert len(opened) <= 3


def test_a_python_without_sources_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr("titan_lite.data.stdlib.FOLDER", tmp_path)
    monkeypatch.setattr("titan_lite.data.stdlib._topics", dict)
    with pytest.raises(ConfigError, match=r'data.dataset = "stdlib".*data.dataset = "local"'):
        check_data(Data())


# Local files


@pytest.fixture
def corpus(tmp_path):
    """Seven documents in five files of four formats, three in a subfolder."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "a.txt").write_text("one\ntext \u6f22")
    write_jsonl(tmp_path / "b.jsonl", ["first", "second"])
    (tmp_path / "sub").mkdir()
    write_jsonl(tmp_path / "sub/c.json", ["third", "fourth"])
    parquet.write_table(pyarrow.table({"text": ["fifth"], "id": [1]}), tmp_path / "sub/d.parquet")
    write_jsonl(tmp_path / "sub/e.jsonl", ["sixth"])
    return tmp_path


EVERYTHING = ["one\ntext \u6f22", "first", "second", "third", "fourth", "fifth", "sixth"]


@pytest.mark.parametrize(
    ("path", "texts"),
    [
        ("", EVERYTHING),
        ("a.txt", EVERYTHING[:1]),
        ("b.jsonl", ["first", "second"]),
        ("sub/c.json", ["third", "fourth"]),
        ("sub/d.parquet", ["fifth"]),
        ("*.jsonl", ["first", "second"]),
        ("**/*.jsonl", ["first", "second", "sixth"]),
    ],
)
def test_files_folders_and_globs(corpus, path, texts):
    check_data(local(corpus / path))
    source = build_source(local(corpus / path), split="train", seed=0)
    twice = read(source, 0, 2 * len(texts))
    assert [text for _, text in twice] == texts + texts
    ordinals = [ordinal for ordinal, _ in twice]
    assert ordinals == sorted(set(ordinals))
    assert [source.epoch(ordinal) for ordinal in ordinals] == [0] * len(texts) + [1] * len(texts)
    for place, ordinal in enumerate(ordinals):
        assert read(source, ordinal, 1) == [twice[place]]
        assert read(source, ordinal + 1, 1) == twice[place + 1 :][:1] or place == len(twice) - 1


def test_strange_names_and_empty_files(tmp_path):
    write_jsonl(tmp_path / "a b [1]*?.jsonl", ["x"])
    for name in ("empty.jsonl", "empty.json"):
        (tmp_path / name).write_bytes(b"")
    for path in (tmp_path, tmp_path / "a b [1]*?.jsonl"):
        check_data(local(path))
        assert texts_of(build_source(local(path), split="train", seed=0), 0, 2) == ["x", "x"]


def test_folders_that_are_linked_are_read_once(tmp_path):
    for folder in ("elsewhere", "corpus"):
        (tmp_path / folder).mkdir()
    write_jsonl(tmp_path / "elsewhere/a.jsonl", ["x"])
    write_jsonl(tmp_path / "corpus/b.jsonl", ["y"])
    for name in ("one", "two"):
        (tmp_path / "corpus" / name).symlink_to(tmp_path / "elsewhere")
    (tmp_path / "corpus/round").symlink_to(tmp_path / "corpus")
    assert [name for _, name, _ in files.local_files(local(tmp_path / "corpus"))] == [
        "b.jsonl",
        "one/a.jsonl",
    ]


def test_other_formats_in_a_folder_are_left_out_and_said(corpus, caplog):
    (corpus / "README.md").write_text("no document")
    with caplog.at_level(logging.INFO, logger="titan_lite"):
        source = build_source(local(corpus), split="train", seed=0)
    assert [text for _, text in read(source, 0, 7)] == EVERYTHING
    assert "1 files of other formats are left out (.md)" in caplog.text


def test_local_shuffle_is_a_new_order_every_epoch_and_the_same_everywhere(tmp_path):
    texts = [str(i) for i in range(60)]
    for i in range(3):
        write_jsonl(tmp_path / f"{i}.jsonl", texts[i * 20 : i * 20 + 20])
    data = local(tmp_path, shuffle=True, shuffle_buffer=10)
    stream = read(build_source(data, split="train", seed=3), 0, 180)
    epochs = [[text for _, text in stream[i : i + 60]] for i in (0, 60, 120)]
    assert len({tuple(epoch) for epoch in epochs} | {tuple(texts)}) == 4
    assert read(build_source(data, split="train", seed=3), 0, 60) == stream[:60]
    assert read(build_source(data, split="train", seed=4), 0, 60) != stream[:60]


@pytest.mark.parametrize(("split", "fraction"), [("validation", 0.0), ("train", 0.999999)])
def test_an_empty_split_is_an_error_and_no_hang(tmp_path, split, fraction):
    write_jsonl(tmp_path / "a.jsonl", ["x", "y"])
    for data in (local(tmp_path, validation_fraction=fraction), Data(validation_fraction=fraction)):
        with pytest.raises(ConfigError) as error:
            read(build_source(data, split=split, seed=0), 0, 1)
        for part in (
            f'data.dataset = "{data.dataset}"',
            data.path,
            f"no {split} document",
            f"data.validation_fraction = {fraction}",
        ):
            assert part in str(error.value)


@pytest.mark.parametrize("name", ["a.csv", "a.arrow", "a.txt.xz", "a.jsonl.zip", "a.parquet.gz"])
def test_a_file_of_another_format_is_refused_with_the_way_to_convert_it(tmp_path, name):
    (tmp_path / name).write_text("text\nx\n")
    for path in (tmp_path / name, tmp_path / "*", tmp_path):
        with pytest.raises(ConfigError, match=r'datasets\.load_dataset\("csv".*\.to_parquet\('):
            check_data(local(path, on_bad_document="skip"))


@pytest.mark.parametrize("compression", ["", ".gz"])
def test_a_group_is_small_and_going_on_opens_no_file_before_it(tmp_path, monkeypatch, compression):
    for number in range(12):
        lines = "".join(
            json.dumps({"text": f"{number} {i} {'x' * 400}"}) + "\n" for i in range(20)
        ).encode()
        (tmp_path / f"{number:02}.jsonl{compression}").write_bytes(
            gzip.compress(lines, mtime=0) if compression else lines
        )
    data = local(tmp_path, shuffle=True, shuffle_buffer=6)  # 24 KiB
    source = build_source(data, split="train", seed=0)
    epoch = read(source, 0, 240)
    assert len({text for _, text in epoch}) == 240
    groups = {(ordinal // GROUP_STRIDE) for ordinal, _ in epoch}
    assert len(groups) >= 4 if not compression else groups == {0}  # compressed all are one group
    opened = []
    open_file = files.open_file
    monkeypatch.setattr(files, "open_file", lambda file: opened.append(file) or open_file(file))
    assert read(source, epoch[-1][0], 1) == epoch[-1:]
    assert len(opened) <= (3 if not compression else 12)


def test_of_txt_files_only_those_wanted_are_read(tmp_path, monkeypatch):
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"{number}")
    opened = []
    open_file = files.open_file
    monkeypatch.setattr(files, "open_file", lambda file: opened.append(file) or open_file(file))
    source = build_source(local(tmp_path, shuffle=True), split="train", seed=0)
    some = list(islice(source.documents(0, lambda ordinal: ordinal % 8 == 3), 5))
    assert [Path(file).stem for file in opened] == [text for _, text in some]


def test_documents_are_shuffled_among_files(tmp_path):
    """A hundred documents in a row are of more than a few files, and none has its neighbours in the
    file.
    """
    for number in range(20):
        write_jsonl(tmp_path / f"{number}.jsonl", [f"{number} {i}" for i in range(50)])
    texts = texts_of(build_source(local(tmp_path, shuffle=True), split="train", seed=0), 0, 1000)
    assert len({text.split()[0] for text in texts[:100]}) >= 15
    beside = sum(
        a.split()[0] == b.split()[0] and int(a.split()[1]) + 1 == int(b.split()[1])
        for a, b in pairwise(texts)
    )
    assert beside < 10


def test_pieces_are_in_another_order_every_epoch(tmp_path):
    """Also where a file is as much as is shuffled at once."""
    for number in range(10):
        write_jsonl(tmp_path / f"{number}.jsonl", [f"{number} {'x' * 1000}"] * 20)
    texts = texts_of(
        build_source(local(tmp_path, shuffle=True, shuffle_buffer=5), split="train", seed=0), 0, 400
    )
    first, second = (
        list(dict.fromkeys(text[0] for text in texts[at : at + 200])) for at in (0, 200)
    )
    assert sorted(first) == sorted(second) == list("0123456789")
    assert len({tuple(order) for order in (first, second, sorted(first))}) == 3


def test_rows_are_served_alike_however_few_documents_there_are(tmp_path):
    """Though each epoch, and so each group, begins anew: of 9 documents for 8 rows none gets the
    second one every time.
    """
    write_jsonl(tmp_path / "a.jsonl", [str(i) for i in range(9)])
    source = build_source(local(tmp_path), split="train", seed=0)
    for rows in (2, 5, 8, 12):
        served = [0] * rows
        for ordinal, _ in read(source, 0, 9 * 2 * rows):
            served[ordinal % rows] += 1
        assert max(served) == min(served)


# C4


def test_c4_streams_the_split_of_the_hub(monkeypatch):
    calls = []

    def load_dataset(*arguments, split, streaming):
        calls.append((*arguments, split, streaming))
        return datasets.IterableDataset.from_generator(
            lambda: ({"text": f"{split} {i}", "url": "u"} for i in range(5))
        )

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    check_data(Data(dataset="c4"))
    assert calls == []  # nothing of the hub
    for split in ("train", "validation"):
        source = build_source(Data(dataset="c4", shuffle=False), split=split, seed=0)
        assert texts_of(source, 3, 4) == [f"{split} 3", f"{split} 4", f"{split} 0", f"{split} 1"]
    shuffled = read(build_source(Data(dataset="c4"), split="train", seed=0), 0, 10)
    assert sorted(text for _, text in shuffled[:5]) == [f"train {i}" for i in range(5)]
    assert [text for _, text in shuffled[:5]] != [text for _, text in shuffled[5:]]
    assert calls == [
        ("allenai/c4", "en", split, True) for split in ("train", "validation", "train")
    ]


def test_a_dataset_of_the_hub_is_read_by_shards(monkeypatch):
    """Shards before the one in which it resumes are not opened."""
    opened = []

    def generate(shards):
        for shard in shards:
            opened.append(shard)
            yield from ({"body": f"{shard} {i}"} for i in range(4))
            yield {"body": None}

    def load_dataset(name, subset, *, split, streaming):
        assert (name, subset, split, streaming) == ("owner/name", "part", "all", True)
        return datasets.IterableDataset.from_generator(
            generate, gen_kwargs={"shards": ["a", "b", "c"]}
        )

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    data = Data(
        dataset="owner/name", subset="part", split="all", text_field="body", validation_fraction=0.0
    )
    check_data(data)
    source = build_source(data, split="train", seed=0)
    epoch = read(source, 0, 15)
    good = [text for _, text in epoch if isinstance(text, str)]
    assert sorted(good) == sorted(f"{shard} {i}" for shard in "abc" for i in range(4))
    assert [text[0] for text in good] != sorted(text[0] for text in good) or opened == [
        "a",
        "b",
        "c",
    ]
    assert next(str(bad) for _, bad in epoch if not isinstance(bad, str)).startswith(
        "owner/name shard "
    )
    last = opened[-1]
    opened.clear()
    assert read(source, epoch[-1][0], 1)[0][0] == epoch[-1][0]
    assert opened == [last]
    held_out = build_source(
        Data(
            dataset="owner/name",
            subset="part",
            split="all",
            text_field="body",
            validation_fraction=0.3,
        ),
        split="validation",
        seed=0,
    )
    assert {str(text) for _, text in read(held_out, 0, 30)} < {str(text) for _, text in epoch}


@pytest.mark.parametrize("dataset", ["me/corpus", "c4"])
def test_a_folder_is_not_read_as_a_dataset_of_the_hub(dataset, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("it was opened"))
    folder = tmp_path / {"c4": "allenai/c4"}.get(dataset, dataset)
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text('{"text": "a"}\n')
    for check in (check_data, lambda data: build_source(data, split="train", seed=0)):
        with pytest.raises(ConfigError, match=r'dataset of the hub.* "local" with data\.path'):
            check(Data(dataset=dataset))


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (ConnectionError("no route to host"), MachineError, "allenai/c4 cannot be read"),
        (FileNotFoundError("no such dataset"), ConfigError, 'data.dataset = "c4"'),
    ],
)
def test_an_unreachable_hub_is_said_with_a_way_out(error, kind, said, clock, monkeypatch):
    def load_dataset(*arguments, **more):
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(kind) as raised:
        build_source(Data(dataset="c4"), split="train", seed=0)
    for part in (said, str(error), 'data.dataset = "local"', '"stdlib"'):
        assert part in str(raised.value)


# What tells the documents of a run from others


def test_the_identity_of_the_standard_library_is_of_all_its_documents():
    assert digest_of(identify(Data())) == digest_of(
        identify(Data(validation_fraction=0.5, shuffle=False))
    )
    assert len(digest_of(identify(Data()))) == 64


def test_the_identity_of_several_sources_is_of_all_but_not_of_their_weights(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["x"])
    one, other = DataSource(dataset="local", path=str(tmp_path)), DataSource(dataset="stdlib")
    seen = {
        digest_of(identify(Data(sources=sources)))
        for sources in ((one, other), (other, one), (one,), (other,))
    }
    assert len(seen) == 4
    heavy = DataSource(dataset="stdlib", weight=9.0)
    assert digest_of(identify(Data(sources=(one, heavy)))) == digest_of(
        identify(Data(sources=(one, other)))
    )
    assert (
        digest_of(identify(Data(dataset="c4")))
        != digest_of(identify(Data(dataset="owner/name")))
        != digest_of(identify(Data(dataset="owner/name", subset="x")))
    )
    other_field = DataSource(dataset="local", path=str(tmp_path), text_field="body")
    assert digest_of(identify(Data(sources=(other_field,)))) != digest_of(
        identify(Data(sources=(one,)))
    )


@pytest.mark.parametrize("fraction", [0.0, 0.05, 0.9999])
def test_a_corpus_that_is_held_out_completely_is_told_before_a_run(fraction, tmp_path):
    """One single document in twenty is held out, by its name."""
    names = (f"{number}.txt" for number in range(1000))
    name = next(name for name in names if _belongs(name, "validation", 0.05))
    (tmp_path / name).write_text("all there is")
    data = Data(dataset="local", path=str(tmp_path / name), validation_fraction=fraction)
    if not fraction:
        check_data(data)
        return
    with pytest.raises(ConfigError) as error:
        check_data(data)
    line = str(error.value)
    assert f"has no train document with data.validation_fraction = {fraction}; use more" in line
    assert ("or data.validation_fraction = 0, with validation.enable = false" in line) == (
        fraction == 0.05
    )
