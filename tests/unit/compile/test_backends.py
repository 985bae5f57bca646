"""In which order the ranks of a node compile segments."""

from dataclasses import dataclass

import pytest

from titan_lite.compile.backends import compile_order
from titan_lite.compile.rank_agreement import PlaceOnNode


@dataclass
class Sized:
    nodes: int


SEGMENTS = {"a": Sized(5), "b": Sized(9), "c": Sized(1), "d": Sized(7), "e": Sized(7)}


def test_one_rank_compiles_all_largest_first():
    assert compile_order(SEGMENTS, PlaceOnNode()) == ["b", "d", "e", "a", "c"]


def test_two_ranks_begin_with_their_halves_and_meet_within_the_other():
    assert compile_order(SEGMENTS, PlaceOnNode(0, 2)) == ["b", "e", "c", "a", "d"]
    assert compile_order(SEGMENTS, PlaceOnNode(1, 2)) == ["d", "a", "c", "e", "b"]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_the_ranks_of_a_node_compile_each_segment_first_on_one_of_them(ranks):
    segments = {number: Sized(number % 5) for number in range(15)}
    orders = [compile_order(segments, PlaceOnNode(index, ranks)) for index in range(ranks)]
    assert all(sorted(order) == [*segments] for order in orders)
    largest_share = -(-len(segments) // ranks)
    begun = [order[: largest_share - 1] for order in orders]
    assert len({number for part in begun for number in part}) == sum(map(len, begun))
    assert {number for order in orders for number in order[:largest_share]} == {*segments}


def test_more_ranks_than_segments():
    orders = [compile_order({"a": Sized(2), "b": Sized(1)}, PlaceOnNode(i, 4)) for i in range(4)]
    assert orders == [["a", "b"], ["b", "a"], ["a", "b"], ["a", "b"]]
