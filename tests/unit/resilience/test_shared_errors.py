"""An error of one rank is told to the others; tests/integration/test_hangs.py has several ranks."""

import threading

import pytest
import torch.distributed as dist

from titan_lite import progress
from titan_lite.distributed.process_group import first_line
from titan_lite.resilience import TrainingError, shared_errors
from titan_lite.resilience.shared_errors import call_within, share_errors

GLOO = (
    "[/build/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:10673. This is"
    " typically caused by a remote worker crashing. Check the logs.\nand more"
)


@pytest.fixture
def store(monkeypatch):
    """A store that two ranks share, of which this is rank 0."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    store = dist.HashStore()
    monkeypatch.setattr(shared_errors, "connect", lambda seconds: store)
    return store


def test_of_an_error_the_line_that_tells_is_kept():
    assert first_line(RuntimeError(GLOO)) == "Connection closed by peer [127.0.0.1]:10673"
    assert (
        first_line(ValueError("[1, 2] is no list of three\nof numbers"))
        == "[1, 2] is no list of three"
    )


def test_what_ends_a_rank_is_reported_in_words_and_the_rest_is_left_as_it_is(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    progress.start_phase("start", "init_timeout_seconds")
    with pytest.raises(TrainingError, match=r"^no more disk$"), share_errors(OSError, KeyError):
        raise OSError("no more disk")
    assert progress.current.limit_key == ""
    with pytest.raises(ValueError, match=r"^odd$"), share_errors(OSError):
        raise ValueError("odd")
    with pytest.raises(RuntimeError, match="Connection closed"), share_errors():
        raise RuntimeError(GLOO)


def test_an_error_is_told_and_the_first_one_stays(store):
    for text in ("odd\nand more", "later"):
        with pytest.raises(ValueError, match=text), share_errors():
            raise ValueError(text)
    assert store.get(shared_errors.CAUSE).decode() == "rank 0 failed: ValueError: odd"


def test_an_error_that_all_ranks_have_is_not_told(store):
    with pytest.raises(TrainingError), share_errors():
        raise TrainingError("too many skipped steps", everywhere=True)
    assert not store.check([shared_errors.CAUSE])


def test_a_lost_connection_is_explained_by_the_error_of_another_rank(store):
    store.set(shared_errors.CAUSE, "rank 1 failed")
    with pytest.raises(TrainingError, match=r"^stopped, since rank 1 failed$"), share_errors():
        raise RuntimeError(GLOO)


def test_a_lost_connection_without_an_error_is_told_to_who_listens(store, monkeypatch):
    lost = []
    monkeypatch.setattr(shared_errors, "GRACE_AFTER_LOST_CONNECTION", 0.0)
    monkeypatch.setattr(progress, "lost_rank", lambda error: lost.append(str(error)))
    with pytest.raises(RuntimeError), share_errors():
        raise RuntimeError(GLOO)
    assert lost == [GLOO]


def test_what_cannot_be_known_in_time_is_not_waited_for():
    assert call_within(60, lambda: 3) == 3
    ended = threading.Event()
    assert call_within(0.01, ended.wait) is None
    ended.set()  # else the thread outlives the test

    def fails():
        raise dist.DistNetworkError("gone")

    assert call_within(60, fails) is None
