"""Several sources: shares in tokens, on any number of ranks, and after a resume. Skipped documents.

And, for any documents, that every token is in one window, in order.
"""

import copy
import itertools
import json
import pickle
import re
from collections import Counter, defaultdict
from types import SimpleNamespace

import pytest
import torch
from corpora import Letters, write_jsonl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from titan_lite.config import KEYS, ConfigError, Data, DataSource
from titan_lite.data import packing, processes
from titan_lite.data.bad_documents import BadDocument
from titan_lite.data.documents import build_source, check_data
from titan_lite.data.loader import build_loader
from titan_lite.data.streams import merge_states

BOS, EOS = 0, 1


def loaders(data, num_streams, dp_degree, batch_size, seq_len, state=None, seed=0):
    result = []
    for rank in range(dp_degree):
        shape = dict(
            streams=num_streams,
            batch_size=batch_size,
            seq_len=seq_len,
            dp_rank=rank,
            dp_degree=dp_degree,
            seed=seed,
        )
        result.append(build_loader(data, Letters(), split="train", **shape))
        if state is not None:
            result[-1].load_state_dict(state)
    return result


def global_batch(ranks, num_streams, batch_size):
    """(num_streams, seq_len + 1)"""
    shares = []
    for loader in ranks:
        batches = [next(loader) for _ in range(num_streams // len(ranks) // batch_size)]
        shares.append(
            torch.cat([torch.cat([batch.input, batch.label[:, -1:]], dim=1) for batch in batches])
        )
    return torch.stack(shares, dim=1).flatten(
        0, 1
    )  # window n is that of rank n modulo their number


def state_of(ranks):
    return json.loads(json.dumps(merge_states([loader.state_dict() for loader in ranks])))


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Documents of a's and longer ones of b's, 70 to 30 in tokens."""
    folder = tmp_path_factory.mktemp("two")
    write_jsonl(folder / "a.jsonl", ["a" * (i % 50 + 1) for i in range(500)])
    write_jsonl(folder / "b.jsonl", ["b" * (i % 900 + 100) for i in range(300)])
    sources = (
        DataSource(dataset="local", path=str(folder / "a.jsonl"), weight=7.0),
        DataSource(dataset="local", path=str(folder / "b.jsonl"), weight=3.0),
    )
    return Data(sources=sources, validation_fraction=0.0, num_workers=0)


def test_70_to_30_is_so_in_tokens_on_any_number_of_ranks_and_after_a_resume_on_another(two):
    num_streams, seq_len = 8, 511
    state = None
    seen = Counter()
    steps = 2**20 // (num_streams * (seq_len + 1)) // 4
    alone, expected = loaders(two, num_streams, 1, 8, seq_len), []
    for dp_degree, batch_size in ((1, 8), (2, 2), (4, 2), (1, 4)):
        ranks = loaders(two, num_streams, dp_degree, batch_size, seq_len, state)
        for _ in range(steps):
            batch = global_batch(ranks, num_streams, batch_size)
            expected.append(torch.equal(batch, global_batch(alone, num_streams, 8)))
            for window in batch.tolist():
                kinds = Counter(window)
                assert not (kinds[ord("a")] and kinds[ord("b")])  # a window is of one source
                seen["a" if kinds[ord("a")] else "b"] += len(window)
        state = state_of(ranks)
    assert all(expected)
    assert sum(seen.values()) >= 2**20 - num_streams * (seq_len + 1) * 4
    assert abs(seen["a"] / sum(seen.values()) - 0.7) < 0.01
    assert abs(seen["b"] / sum(seen.values()) - 0.3) < 0.01


@pytest.mark.parametrize(("dp_degree", "num_streams", "workers"), [(1, 8, 0), (2, 8, 2), (3, 8, 1)])
def test_the_loader_tells_the_source_of_each_sequence(two, dp_degree, num_streams, workers):
    ranks = loaders(two.replace(num_workers=workers), num_streams, dp_degree, 3, 31)
    found = []
    for loader in ranks:
        for _ in range(8):
            batch = next(loader)
            assert batch.sources == [int((tokens == ord("b")).any()) for tokens in batch.input]
            found += batch.sources
    assert {0, 1} == set(found)
    assert [line.partition(";")[0] for line in ranks[0].source_lines()] == [
        "source a: 70% of the tokens",
        "source b: 30% of the tokens",
    ]
    (line,) = loaders(Data(num_workers=0), 1, 1, 1, 8)[0].source_lines()
    assert re.fullmatch(r"data: stdlib, \d+ documents", line)


@pytest.mark.parametrize("weights", [(1, 1, 1), (0.001, 1, 1), (5, 3, 1, 1, 0.5), (1,)])
def test_any_weights(tmp_path, weights):
    sources = []
    for index, weight in enumerate(weights):
        write_jsonl(tmp_path / f"{index}.jsonl", [chr(ord("a") + index) * 10] * 50)
        sources.append(
            DataSource(dataset="local", path=str(tmp_path / f"{index}.jsonl"), weight=weight)
        )
    data = Data(sources=tuple(sources), validation_fraction=0.0, num_workers=0)
    ranks = loaders(data, 4, 1, 4, 15, seed=3)
    seen = Counter(
        next(token for token in window if token > 1) - ord("a")
        for _ in range(1000)
        for window in global_batch(ranks, 4, 4).tolist()
    )
    for index, weight in enumerate(weights):
        assert abs(seen[index] - 4000 * weight / sum(weights)) <= 4


def test_weights_may_change_when_a_run_goes_on_and_hold_from_there(two):
    ranks = loaders(two, 8, 2, 4, 63)
    for _ in range(100):
        global_batch(ranks, 8, 4)
    sources = tuple(source.replace(weight=1.0) for source in two.sources)
    ranks = loaders(two.replace(sources=sources), 8, 2, 4, 63, state_of(ranks))
    is_a = torch.stack([(global_batch(ranks, 8, 4) == ord("a")).any(dim=1) for _ in range(50)])
    assert abs(is_a.float().mean() - 0.5) < 0.01


# Skipped documents


@pytest.mark.parametrize("num_workers", [0, 2])
def test_bad_and_short_documents_are_skipped_counted_and_listed(tmp_path, num_workers):
    lines = [json.dumps({"text": "long enough " + str(i)}) for i in range(40)]
    lines[3], lines[17], lines[30] = '{"text": null}', "not json", '{"text": "short"}'
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    data = Data(
        dataset="local",
        path=str(tmp_path),
        validation_fraction=0.0,
        num_workers=num_workers,
        min_document_tokens=8,
        on_bad_document="skip",
        prefetch=1,
    )
    ranks = loaders(data, 4, 2, 2, 15)
    tokens = torch.cat([global_batch(ranks, 4, 2) for _ in range(45)], dim=1)
    texts = ["".join(map(chr, stream)).replace("\0", "").split("\1") for stream in tokens.tolist()]
    read = Counter(text for stream in texts for text in stream[1:-1])
    assert set(read) == {f"long enough {i}" for i in range(40) if i not in (3, 17, 30)}
    skipped = [loader.pop_skipped() for loader in ranks]
    bad = {
        (document.location, document.reason.partition(" ")[0])
        for some in skipped
        for document in some.bad
    }
    assert bad == {("line 4", "data.text_field"), ("line 18", "not")}
    assert {document.file for some in skipped for document in some.bad} == {
        str(tmp_path / "a.jsonl")
    }
    short = sum(some.short for some in skipped)
    assert abs(short - read["long enough 1"]) <= 2 + num_workers
    assert loaders(data, 4, 2, 2, 15)[0].pop_skipped().bad == []


def test_empty_texts_are_left_out_and_counted_whatever_the_recipe_says_of_bad_ones(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"text": ""}\n' * 150)
    data = Data(dataset="local", path=str(tmp_path), validation_fraction=0.0, num_workers=0)
    check_data(data)
    [loader] = loaders(data, 1, 1, 1, 15)
    for _ in range(60):
        next(loader)
    skipped = loader.pop_skipped()
    assert skipped.bad == []
    assert 150 <= skipped.empty <= 170  # 960 tokens, in documents of 6


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("content", ['{"text": "x"}\n' * 9, "bad\n" * 9])
def test_a_dataset_that_yields_nothing_is_an_error_and_no_hang(tmp_path, content, num_workers):
    (tmp_path / "a.jsonl").write_text(content)
    data = Data(
        dataset="local", path=str(tmp_path), validation_fraction=0.0, num_workers=num_workers
    )
    data = data.replace(min_document_tokens=3, on_bad_document="skip", max_bad_documents=10_000)
    for num_streams in (1, 8):
        [loader] = loaders(data, num_streams, 1, 1, 15)
        with pytest.raises(
            ConfigError,
            match=r"source 1: \d+ consecutive documents, .* are bad or shorter than .*tokens = 3",
        ):
            next(loader)


def test_one_good_document_is_found_among_many(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["x"] * 150 + ["good one"] + ["y"] * 150)
    data = Data(
        dataset="local",
        path=str(tmp_path),
        validation_fraction=0.0,
        num_workers=0,
        min_document_tokens=3,
    )
    [loader] = loaders(data, 2, 1, 2, 15)
    assert set(next(loader).input.unique().tolist()) == {BOS, EOS, *map(ord, "good one")}


# Any documents

texts = st.lists(
    st.text(st.characters(codec="utf-8", exclude_categories=["Cs"], min_codepoint=2), max_size=40),
    min_size=1,
    max_size=14,
)
layouts = st.sampled_from(
    [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)]
)  # ranks, microbatch, of 4 streams


class Processes:
    """In place of StatefulDataLoader: its processes, taken in turn, all in this one."""

    def __init__(self, dataset, num_workers, **more):
        self.dataset, self.num_workers = dataset, num_workers

    def __iter__(self):
        workers = [
            SimpleNamespace(id=number, num_workers=self.num_workers)
            for number in range(self.num_workers)
        ]
        with pytest.MonkeyPatch.context() as patch:
            started = []
            for worker in workers or [None]:
                patch.setattr(packing, "get_worker_info", lambda worker=worker: worker)
                windows = iter(copy.copy(self.dataset))
                started.append(itertools.chain([next(windows)], windows))
        yield from (next(windows) for windows in itertools.cycle(started))


@pytest.fixture
def in_one_process(monkeypatch):
    monkeypatch.setattr(processes, "StatefulDataLoader", Processes)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    corpora=st.lists(st.tuples(texts, st.sampled_from([0.2, 1.0, 3.0])), min_size=1, max_size=3),
    seq_len=st.integers(1, 40),
    legs=st.lists(st.tuples(layouts, st.integers(1, 6)), min_size=1, max_size=4),
    shuffle=st.booleans(),
    buffer=st.integers(1, 20),
    least=st.sampled_from([0, 0, 3]),
    workers=st.sampled_from([0, 1, 2, 4]),
    seed=st.integers(0, 3),
)
def test_every_token_is_in_one_window_in_order(
    in_one_process, tmp_path_factory, corpora, seq_len, legs, shuffle, buffer, least, workers, seed
):
    """Documents may be empty or short, in one source or several.

    A run may stop after any microbatch and resume with another number of ranks and of sequences at
    once. Its streams have all tokens of the sources.
    """
    folder, num_streams = tmp_path_factory.mktemp("any"), 4
    sources = []
    for index, (some, weight) in enumerate(corpora):
        # each document says who it is, so that none can be taken for another
        write_jsonl(
            folder / f"{index}.jsonl",
            [
                text and f"{index}.{number} {text}"
                for number, text in enumerate([*some, "never empty"])
            ],
        )
        sources.append(
            DataSource(dataset="local", path=str(folder / f"{index}.jsonl"), weight=weight)
        )
    data = Data(
        sources=tuple(sources),
        validation_fraction=0.0,
        shuffle=shuffle,
        shuffle_buffer=buffer,
        min_document_tokens=least,
        on_bad_document="skip",
        max_bad_documents=10_000,
        num_workers=workers,
    )
    state, streams = None, defaultdict(list)  # by source and stream
    for (dp_degree, batch_size), microbatches in legs:
        ranks = loaders(data, num_streams, dp_degree, batch_size, seq_len, state, seed)
        for rank, loader in enumerate(ranks):
            for _ in range(microbatches):
                before = loader.state_dict()
                batch = next(loader)
                after = loader.state_dict()
                assert after["windows_taken"] == before["windows_taken"] + batch_size * dp_degree
                taken = range(before["windows_taken"], after["windows_taken"])
                own = [number % num_streams for number in taken if number % dp_degree == rank]
                windows = torch.cat([batch.input, batch.label[:, -1:]], dim=1).tolist()
                for stream, source, window in zip(own, batch.sources, windows, strict=True):
                    was, now = (state["positions"][str(stream)] for state in (before, after))
                    assert [s for s in range(len(sources)) if now[s] != was[s]] == [source]
                    streams[source, stream] += window
        state = state_of(ranks)
    for index, (_, part) in enumerate(data.mixture()):
        needed = {
            stream: len(tokens) for (source, stream), tokens in streams.items() if source == index
        }
        expected = defaultdict(list)
        documents = build_source(part, split="train", seed=seed).documents(0, lambda ordinal: True)
        while any(len(expected[stream]) < count for stream, count in needed.items()):
            ordinal, text = next(documents)
            if not isinstance(text, BadDocument) and len(text) >= least:
                expected[ordinal % num_streams] += [BOS, *map(ord, text), EOS]
        for stream, count in needed.items():
            assert streams[index, stream] == expected[stream][:count]


@settings(max_examples=25, deadline=None)
@given(
    texts=texts,
    shuffle=st.booleans(),
    buffer=st.integers(1, 20),
    seed=st.integers(0, 3),
    piece=st.integers(1, 200),
)
def test_every_epoch_has_every_document_once_wherever_it_is_begun(
    tmp_path_factory, texts, shuffle, buffer, seed, piece
):
    folder = tmp_path_factory.mktemp("any")
    texts = [f"{number} {text}" for number, text in enumerate(texts)]
    write_jsonl(folder / "a.jsonl", texts[::2])
    write_jsonl(folder / "b.jsonl", texts[1::2])
    with open(folder / "b.jsonl", "ab") as file:
        file.write(b'\n  \n{"text": "no newline at the end"}')
    texts.append("no newline at the end")
    data = Data(
        dataset="local",
        path=str(folder),
        validation_fraction=0.0,
        shuffle=shuffle,
        shuffle_buffer=buffer,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("titan_lite.data.files.PIECE", piece)
        source = build_source(data, split="train", seed=seed)
    three = list(itertools.islice(source.documents(0, lambda ordinal: True), 3 * len(texts)))
    for epoch in range(3):
        assert sorted(
            text for _, text in three[epoch * len(texts) : (epoch + 1) * len(texts)]
        ) == sorted(texts)
    if not shuffle:
        in_order = [*texts[:-1:2], *texts[1:-1:2], texts[-1]]
        assert [text for _, text in three] == 3 * in_order
    for place, (ordinal, _) in enumerate(three):
        rest = list(
            itertools.islice(
                source.documents(ordinal, lambda ordinal: True), min(3, len(three) - place)
            )
        )
        assert rest == three[place : place + 3]


# The keys of a source, as the recipe has them


def read(data):
    """Some of all that the data has, as a run does."""
    check_data(data)
    for _, part in data.mixture():
        source = build_source(part, split="train", seed=0)
        assert list(itertools.islice(source.documents(0, lambda ordinal: True), 5))


def keys_said(data, folder):
    """The keys that the message has."""
    with pytest.raises(ConfigError) as error:
        read(data)
    message = str(error.value).replace(str(folder), "")
    return set(re.findall(r"\bdata\.[\w.\[\]]*(?:path|dataset|text_field|subset|split)\b", message))


@pytest.mark.parametrize(
    ("wrong", "keys"),
    [
        (dict(dataset="local", path="nowhere/*"), {"path"}),
        (dict(dataset="local", path="FOLDER/empty"), {"path"}),
        (dict(dataset="local", path="FOLDER/a.xyz"), {"path"}),
        (dict(dataset="local", path="FOLDER/none.jsonl"), {"path"}),
        (dict(dataset="local", path="FOLDER/a.jsonl", text_field="body"), {"text_field"}),
        (dict(dataset="local", path="FOLDER/number.jsonl"), {"text_field"}),
        (dict(dataset="local", path="FOLDER/a.parquet", text_field="body"), {"text_field"}),
        (dict(dataset="local", path="FOLDER/a.parquet", text_field="n"), {"text_field"}),
        (dict(dataset="prepared", path="FOLDER/empty"), {"path"}),
    ],
)
def test_an_error_names_the_key_that_was_written(wrong, keys, tmp_path):
    import pyarrow
    from pyarrow import parquet

    (tmp_path / "empty").mkdir()
    write_jsonl(tmp_path / "a.jsonl", ["a"])
    for name, text in {
        "a.xyz": "a",
        "none.jsonl": "",
        "number.jsonl": '{"text": 5}',
    }.items():
        (tmp_path / name).write_text(text)
    parquet.write_table(pyarrow.table({"text": ["a"], "n": [[1]]}), tmp_path / "a.parquet")
    wrong = {name: value.replace("FOLDER", str(tmp_path)) for name, value in wrong.items()}
    assert keys_said(Data(**wrong), tmp_path) == {f"data.{key}" for key in keys}
    fine = DataSource(dataset="local", path=str(tmp_path / "a.jsonl"))
    for number, sources in ((1, (DataSource(**wrong), fine)), (2, (fine, DataSource(**wrong)))):
        data = Data(sources=sources, validation_fraction=0.0)
        assert keys_said(data, tmp_path) == {f"data.sources[{number}].{key}" for key in keys}


def test_a_field_that_is_called_as_a_key_keeps_its_name(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["a"])
    source = DataSource(dataset="local", path=str(tmp_path), text_field="data.text_field")
    words = r'data\.sources\[1\]\.text_field = "data\.text_field" is not a field of it;'
    with pytest.raises(ConfigError, match=words):
        check_data(Data(sources=(source,)))


def test_a_source_of_a_mixture_knows_its_place_and_stays_itself():
    data = Data(sources=(DataSource(), DataSource(dataset="local", path="a")), max_document_mib=7)
    _, (_, second) = data.mixture()
    assert second.key("path") == "data.sources[2].path"
    assert second.key("max_document_mib") == "data.max_document_mib"
    assert second.replace(shuffle=False).key("path") == "data.sources[2].path"
    assert pickle.loads(pickle.dumps(second)).key("path") == "data.sources[2].path"
    assert (second.dataset, second.path, second.max_document_mib, second.sources) == (
        "local",
        "a",
        7,
        (),
    )
    assert "data.number" not in KEYS
