"""A rank's place among the ranks of its node that run the same graphs."""

import pytest

from titan_lite.compile.rank_agreement import PlaceOnNode
from titan_lite.distributed.stage_ranks import place_on_node


@pytest.mark.parametrize(
    ("stage", "rank", "local_rank", "local_size", "place"),
    [
        pytest.param(range(1), 0, 0, 1, PlaceOnNode(0, 1), id="alone"),
        pytest.param(range(8), 5, 5, 8, PlaceOnNode(5, 8), id="one node"),
        pytest.param(range(16), 13, 5, 8, PlaceOnNode(5, 8), id="the second of two nodes"),
        pytest.param(range(4, 8), 6, 6, 8, PlaceOnNode(2, 4), id="two stages on a node"),
        pytest.param(range(6, 10), 9, 1, 8, PlaceOnNode(1, 2), id="a stage on two nodes"),
        pytest.param([0, 2, 4, 6], 4, 0, 4, PlaceOnNode(0, 2), id="every second rank"),
        pytest.param(range(8), 7, 0, 1, PlaceOnNode(0, 1), id="one rank a node"),
    ],
)
def test_places(stage, rank, local_rank, local_size, place):
    assert place_on_node(stage, rank, local_rank, local_size) == place
