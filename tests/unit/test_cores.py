"""tests/cores.py: a test holds as many places as it has ranks, and all are free after it."""

import fcntl

import cores
import pytest


@pytest.fixture
def free(monkeypatch, tmp_path):
    """free(): the number of three places that another worker could take."""
    monkeypatch.setattr(cores, "_folder", tmp_path)
    monkeypatch.setattr(cores, "_held", [])
    monkeypatch.setattr(cores, "PLACES", 3)

    def is_free(place):
        with open(tmp_path / str(place), "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    return lambda: sum(is_free(place) for place in range(3))


def test_ranks_have_a_place_each_in_place_of_their_test(free):
    with cores.taken(1):
        assert free() == 2
        with cores.given_to(2):
            assert free() == 1
        assert free() == 2
    assert free() == 3


def test_more_ranks_than_places_take_all_of_them(free):
    with cores.taken(1), cores.given_to(8):
        assert free() == 0
    assert free() == 3
