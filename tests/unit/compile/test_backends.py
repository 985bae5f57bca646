"""In which order the ranks of a node compile segments."""

from dataclasses import dataclass

import pytest

from titan_lite.compile.backends import compile_order, shares_of
from titan_lite.compile.rank_agreement import PlaceOnNode


@dataclass
class Sized:
    nodes: int


SEGMENTS = {"a": Sized(5), "b": Sized(9), "c": Sized(1), "d": Sized(7), "e": Sized(6)}


def test_one_rank_compiles_all_largest_first():
    assert compile_order(SEGMENTS, PlaceOnNode()) == ["b", "d", "e", "a", "c"]


def test_two_ranks_begin_with_their_halves_and_take_the_other_from_its_end():
    assert compile_order(SEGMENTS, PlaceOnNode(0, 2)) == ["b", "a", "c", "e", "d"]
    assert compile_order(SEGMENTS, PlaceOnNode(1, 2)) == ["d", "e", "c", "a", "b"]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_shares_are_every_segment_once_and_of_about_one_size(ranks):
    segments = {number: Sized(1 + number % 5) for number in range(40)}
    shares = shares_of(segments, ranks)
    assert sorted(number for share in shares for number in share) == [*segments]
    sizes = [sum(segments[number].nodes for number in share) for share in shares]
    assert max(sizes) - min(sizes) <= 5


def test_more_ranks_than_segments():
    segments = {"a": Sized(2), "b": Sized(2)}
    assert shares_of(segments, 4) == [[], ["a"], [], ["b"]]
    orders = [compile_order(segments, PlaceOnNode(index, 4)) for index in range(4)]
    assert orders == [["a", "b"], ["a", "b"], ["b", "a"], ["b", "a"]]
