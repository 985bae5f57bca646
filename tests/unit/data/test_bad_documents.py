"""Counts of all ranks, which go on over a resume, and the list of bad documents."""

import json
from types import SimpleNamespace

import pytest
from corpora import Letters

from titan_lite.config import ConfigError, Data
from titan_lite.data.bad_documents import (
    BadDocument,
    BadDocumentPolicy,
    BadDocumentsLog,
    SkippedDocuments,
)
from titan_lite.data.loader import build_loader
from titan_lite.distributed import process_group as ranks

SKIP = Data(on_bad_document="skip", min_document_tokens=5, max_bad_documents=3)


def bad(line, file="a.jsonl"):
    return BadDocument(file, f"line {line}", "not JSON")


def listed(folder):
    lines = (folder / "bad_documents.jsonl").read_text().splitlines()
    assert json.loads(lines[0]).keys() == {"file", "location", "reason"}
    return [BadDocument(**json.loads(line)) for line in lines]


@pytest.fixture
def others(monkeypatch):
    """Counts of ranks with other sequences: (short documents, bad ones)."""
    told = []

    monkeypatch.setattr(ranks, "gather_to_rank_0", lambda own: [own, *(bad for _, bad in told)])

    def sum_over_ranks(*own):
        of_others = ((short, 0, len(bad)) for short, bad in told)
        return [sum(numbers) for numbers in zip(own, *of_others, strict=True)]

    monkeypatch.setattr(ranks, "sum_over_ranks", sum_over_ranks)
    return told


def test_skipped_documents_are_counted_over_ranks_and_listed(tmp_path, others, caplog):
    documents = BadDocumentsLog(SKIP, tmp_path, counts=True)
    assert documents.gather([SkippedDocuments()]) == {"bad_documents": 0, "short_documents": 0}
    assert documents.summary() == ""
    assert not (tmp_path / "bad_documents.jsonl").exists()
    others[:] = [(0, []), (4, [bad(3, "b.jsonl")])]
    assert documents.gather([SkippedDocuments([bad(3)], 1), SkippedDocuments([], 1)]) == {
        "bad_documents": 2,
        "short_documents": 6,
    }
    assert "2 bad documents left out; a.jsonl, line 3: not JSON; all are listed in" in caplog.text
    others.clear()
    assert documents.gather([SkippedDocuments([bad(3)], 1)]) == {
        "bad_documents": 3,
        "short_documents": 7,
    }  # another epoch
    assert listed(tmp_path) == [bad(3), bad(3, "b.jsonl"), bad(3)]
    assert ", 3 bad documents left out, listed in " in documents.summary()
    assert "7 times a document left out that is shorter than 5 tokens" in documents.summary()
    resumed = BadDocumentsLog(SKIP, tmp_path, counts=True)
    resumed.load_state_dict(documents.state_dict())
    with pytest.raises(
        ConfigError,
        match=r"data.max_bad_documents = 3: there are 4, over all epochs, listed in .*documents.jsonl",
    ):
        resumed.gather([SkippedDocuments([bad(10)])])
    assert listed(tmp_path)[3:] == [bad(10)]


def test_of_ranks_that_read_the_same_one_counts_and_lists(tmp_path, others):
    documents = BadDocumentsLog(SKIP, tmp_path, counts=False)
    assert documents.gather([SkippedDocuments([bad(3)], 1)])["bad_documents"] == 0
    assert not (tmp_path / "bad_documents.jsonl").exists()


def test_where_nothing_may_be_skipped_ranks_need_not_talk(tmp_path):
    assert BadDocumentsLog(Data(), tmp_path, counts=True).gather([SkippedDocuments()]) == {}


def test_a_rank_that_cannot_go_on_lists_what_it_has_skipped(tmp_path):
    loader = SimpleNamespace(pop_skipped=lambda: SkippedDocuments([bad(3), bad(9)]))
    with (
        pytest.raises(ConfigError),
        BadDocumentsLog(SKIP, tmp_path, counts=True).listing_on_error([loader]),
    ):
        raise ConfigError("too many")
    assert listed(tmp_path) == [bad(3), bad(9)]


def test_a_list_that_cannot_be_written_ends_no_run(tmp_path, others, caplog):
    documents = BadDocumentsLog(SKIP, tmp_path / "nowhere", counts=True)
    assert documents.gather([SkippedDocuments([bad(3)])])["bad_documents"] == 1
    assert "cannot be written, and lacks these: No such file" in caplog.text


# Resumed runs


def with_bad_lines(tmp_path):
    """A corpus whose every third line is bad."""
    lines = ['{"text": "%s"}' % (f"document {n} " * 3) if n % 3 else "{" for n in range(90)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    return Data(
        dataset="local",
        path=str(tmp_path / "corpus.jsonl"),
        validation_fraction=0.0,
        shuffle_buffer=10,
        on_bad_document="skip",
        max_bad_documents=1000,
        num_workers=0,
    )


def loader_of(data, batch_size):
    return build_loader(
        data,
        Letters(),
        split="train",
        streams=4,
        batch_size=batch_size,
        seq_len=16,
        dp_rank=0,
        dp_degree=1,
        seed=0,
    )


@pytest.mark.parametrize("batch_size", [1, 2, 3])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resumed_run_counts_what_one_without_a_stop_counts(
    batch_size, num_workers, tmp_path, others
):
    """Documents that were packed ahead, or read in steps that do not count, are counted when their
    turn has come.
    """
    data = with_bad_lines(tmp_path).replace(num_workers=num_workers)

    def count(loader, log, sequences):
        counts = []
        for _ in range(sequences // batch_size):
            next(loader)
            counts.append(log.gather([loader.pop_skipped()])["bad_documents"])
        return counts

    loader = loader_of(data, batch_size)
    log = BadDocumentsLog(data, tmp_path, counts=True)
    count(loader, log, 12)
    state, state_of_log = loader.state_dict(), log.state_dict()
    without_stop = count(loader, log, 48)
    in_list = len(listed(tmp_path))
    assert without_stop[0] < without_stop[-1]

    resumed = loader_of(data, 1 if batch_size == 2 else batch_size)
    resumed.load_state_dict(state)
    log = BadDocumentsLog(data, tmp_path, counts=True)
    log.load_state_dict(state_of_log)
    if batch_size == 2:
        log_of_pairs = []
        for _ in range(24):
            next(resumed)
            skipped = resumed.pop_skipped()
            next(resumed)
            log_of_pairs.append(log.gather([skipped, resumed.pop_skipped()])["bad_documents"])
        assert log_of_pairs == without_stop
    else:
        assert count(resumed, log, 48) == without_stop
    # what was read after the checkpoint is listed again
    assert len(listed(tmp_path)) == 2 * in_list - state_of_log["listed"]


@pytest.mark.parametrize("policy", ["error", "skip"])
def test_empty_texts_are_no_bad_documents(policy, tmp_path, others, caplog):
    data = Data(dataset="local", path=str(tmp_path), on_bad_document=policy, max_bad_documents=0)
    skipping = BadDocumentPolicy(data)
    for line in range(200):
        skipping.skip(BadDocument("a.jsonl", f"line {line}", "empty"))
    log = BadDocumentsLog(data, tmp_path, counts=True)
    bad_counts = {"bad_documents": 0} if policy == "skip" else {}
    with caplog.at_level("INFO", logger="titan_lite"):
        assert log.gather([skipping.pop_skipped()]) == {**bad_counts, "empty_documents": 200}
        assert log.gather([SkippedDocuments(empty=3)])["empty_documents"] == 203
    assert caplog.text.count("empty texts are left out") == 1
    assert "203 times an empty text left out" in log.summary()
    assert not log.path.exists()
