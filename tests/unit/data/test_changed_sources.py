"""Sources, sequence length and batch that change at a resume: each source has each of its tokens
once, in order, over all phases of a run and on any layout.
"""

import itertools
import json
from collections import defaultdict

import pytest
from corpora import Letters, write_jsonl

from titan_lite.config import Data, DataSource
from titan_lite.data.documents import build_source
from titan_lite.data.listing import list_sources
from titan_lite.data.loader import build_loader
from titan_lite.data.source_identity import source_keys
from titan_lite.data.streams import merge_states

STREAMS = 8
# sources, seq_len, sequences of a step, steps
PHASES = (
    (("web", "books"), 31, 8, 6),
    (("books", "code"), 63, 12, 4),
    (("code", "web"), 15, 4, 9),
)
# (data-parallel ranks, microbatches) of a part of a run
LAYOUTS = ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 1))


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """{name: its folder}; a document's text is unlike any other's."""
    folder = tmp_path_factory.mktemp("corpora")
    for number, name in enumerate(("web", "books", "code")):
        texts = [f"{name}{i}" * (i % 23 * (number + 1) + 1) for i in range(150)]
        write_jsonl(folder / name / "a.jsonl", texts)
    return folder


def data_of(corpora, names):
    sources = tuple(DataSource(dataset="local", path=str(corpora / name)) for name in names)
    return Data(sources=sources, validation_fraction=0.0, num_workers=0, shuffle_buffer=20)


def loaders_of(corpora, phase, layout, state):
    names, seq_len, sequences, _ = PHASES[phase]
    degree, microbatches = layout
    data = data_of(corpora, names)
    keys = source_keys([listing.identity for listing in list_sources(data)])
    result = []
    for rank in range(degree):
        shape = dict(batch_size=sequences // degree // microbatches, seq_len=seq_len)
        ranks = dict(dp_rank=rank, dp_degree=degree)
        loader = build_loader(
            data, Letters(), split="train", streams=STREAMS, seed=3, keys=keys, **shape, **ranks
        )
        if state:
            loader.load_state_dict(state)
        result.append(loader)
    return result


def step_of(ranks, microbatches):
    """Yield (number, source, tokens) of the windows of a step."""
    for _ in range(microbatches):
        for loader in ranks:
            numbers = loader.streams.windows(loader.windows_taken, loader.batch_size)
            batch = next(loader)
            kept = [number for number in numbers if loader.streams.keeps(number)]
            for number, source, input, label in zip(
                kept, batch.sources, batch.input, batch.label, strict=True
            ):
                name = loader.packing.data.source_names()[source]
                yield number, name, [*input.tolist(), int(label[-1])]


def run(corpora, layouts):
    """Return the windows of a run by number, whose layout is another one after every third step."""
    found = []
    state = None
    layout = itertools.cycle(layouts)
    for phase, (*_, steps) in enumerate(PHASES):
        for done in range(steps):
            if done % 3 == 0:  # a resume, the last one a step before the boundary
                now = next(layout)
                ranks = loaders_of(corpora, phase, now, state)
            found += step_of(ranks, now[1])
            state = json.loads(json.dumps(merge_states([rank.state_dict() for rank in ranks])))
    return sorted(found), state


def expected_tokens(corpora, name, stream, count):
    """The first tokens of a source's stream."""
    source = build_source(data_of(corpora, [name]).mixture()[0][1], split="train", seed=3)
    documents = source.documents(0, lambda ordinal: ordinal % STREAMS == stream)
    tokens = itertools.chain.from_iterable(
        Letters().encode_document(text).tolist() for _, text in documents
    )
    return list(itertools.islice(tokens, count))


@pytest.fixture(scope="module")
def alone(corpora):
    """The windows of one rank that reads all."""
    return run(corpora, [(1, 1)])[0]


@pytest.mark.parametrize("layout", [(2, 1), (2, 2)], ids=str)
def test_each_source_has_each_token_once_over_all_phases(corpora, alone, layout):
    windows, state = run(corpora, [layout, *LAYOUTS])
    counts = [sequences * steps for _, _, sequences, steps in PHASES]
    assert [number for number, *_ in windows] == list(range(sum(counts)))
    by_stream = defaultdict(list)
    for number, name, tokens in windows:
        by_stream[name, number % STREAMS] += tokens
    assert {name for name, _ in by_stream} == {"web", "books", "code"}
    for (name, stream), tokens in by_stream.items():
        assert tokens == expected_tokens(corpora, name, stream, len(tokens))
    assert windows == alone
    assert [name for name, _ in state["sources"]] == ["code", "web", "books"]


def test_a_state_of_older_versions_is_of_the_sources_that_there_are(corpora):
    (loader,) = loaders_of(corpora, 0, (1, 1), None)
    next(loader)
    state = loader.state_dict()
    del state["sources"]
    (resumed,) = loaders_of(corpora, 0, (1, 1), state)
    assert resumed.positions == loader.positions
    for positions in state["positions"].values():
        positions.pop()
    with pytest.raises(ValueError, match="state of 1 sources"):
        loaders_of(corpora, 0, (1, 1), state)


def test_two_sources_with_the_same_documents_have_a_position_each(corpora):
    data = data_of(corpora, ["web", "web", "code"])
    keys = source_keys([listing.identity for listing in list_sources(data)])
    assert [key.name for key in keys] == ["web", "web", "code"]  # which the rules refuse
    assert len({key.sha256 for key in keys}) == 3
