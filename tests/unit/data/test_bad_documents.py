"""Counts of all ranks, each bad document once, in however many epochs, ranks and starts it is met."""

import json

import pytest
import torch.distributed as dist

from titan_lite.config import ConfigError, Data
from titan_lite.data import bad_documents
from titan_lite.data.bad_documents import LeftOutDocuments
from titan_lite.data.loader import LeftOut

SKIP = Data(on_bad_document="skip", min_document_tokens=5, max_bad_documents=3)


def bad(line, file="a.jsonl"):
    return {"file": file, "place": f"line {line}", "reason": "empty"}


@pytest.fixture
def others(monkeypatch):
    """What the other ranks have gathered: (their place among data-parallel ranks, short documents, bad ones)."""
    told = []

    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(bad_documents, "gather_objects", lambda own: [own, *told])
    monkeypatch.setattr(dist, "broadcast_object_list", lambda values, src: None)
    return told


def test_what_is_left_out_is_counted_over_ranks_and_listed_once(tmp_path, others, caplog):
    documents = LeftOutDocuments(SKIP, tmp_path, dp_rank=0)
    assert documents.gather([LeftOut()]) == {"bad_documents": 0, "short_documents": 0}
    assert documents.summary() == ""
    assert not (tmp_path / "bad_documents.jsonl").exists()
    # a rank with the same sequences, and one with others
    others[:] = [(0, 2, [bad(3)]), (1, 4, [bad(3, "b.jsonl")])]
    assert documents.gather([LeftOut([bad(3)], 1), LeftOut([], 1)]) == {"bad_documents": 2, "short_documents": 6}
    assert "2 bad documents left out, 2 in all; a.jsonl, line 3: empty" in caplog.text
    others.clear()
    assert documents.gather([LeftOut([bad(3)], 1)]) == {"bad_documents": 2, "short_documents": 7}  # another epoch
    lines = [json.loads(line) for line in (tmp_path / "bad_documents.jsonl").read_text().splitlines()]
    assert lines == [bad(3), bad(3, "b.jsonl")]
    assert ", 2 bad documents left out, listed in " in documents.summary()
    assert "7 times a document left out that is shorter than 5 tokens" in documents.summary()
    again = LeftOutDocuments(SKIP, tmp_path, dp_rank=0)  # a run that goes on
    assert again.gather([LeftOut([bad(3), bad(9)])])["bad_documents"] == 3
    with pytest.raises(ConfigError, match=r"data.max_bad_documents = 3: 4 bad documents, listed in .*bad_documents.jsonl"):
        again.gather([LeftOut([bad(10)])])


def test_where_nothing_may_be_left_out_ranks_need_not_talk(tmp_path, monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    assert LeftOutDocuments(Data(), tmp_path, dp_rank=0).gather([LeftOut()]) == {}


def test_a_rank_that_cannot_go_on_lists_alone_what_is_not_listed_yet(tmp_path, others):
    LeftOutDocuments(SKIP, tmp_path, dp_rank=0).gather([LeftOut([bad(3)])])
    LeftOutDocuments(SKIP, tmp_path, dp_rank=1).list_alone(LeftOut([bad(3), bad(9)]))
    assert [json.loads(line) for line in (tmp_path / "bad_documents.jsonl").read_text().splitlines()] == [bad(3), bad(9)]
