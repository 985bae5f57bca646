"""Which streams and windows a rank reads, and the form of a loader's state."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_lite.data.streams import LoaderState, RankStreams, StreamPosition


@given(
    num_streams=st.integers(1, 24),
    dp_degree=st.integers(1, 12),
    batch_size=st.integers(1, 4),
    taken=st.integers(0, 100),
)
def test_each_window_of_a_microbatch_is_kept_by_one_rank_that_reads_its_stream(
    num_streams, dp_degree, batch_size, taken
):
    kept = []
    for rank in range(dp_degree):
        streams = RankStreams(num_streams, rank, dp_degree)
        windows = streams.windows(taken, batch_size)
        assert {number % num_streams for number in windows} <= {*streams.indices}
        own = [number for number in windows if streams.keeps(number)]
        assert len(own) == batch_size
        kept += own
    assert sorted(kept) == [*range(taken, taken + batch_size * dp_degree)]


@pytest.mark.parametrize(
    ("dp_degree", "readers"), [(1, 1), (2, 1), (3, 3), (4, 1), (6, 3), (16, 2)]
)
def test_streams_are_shared_only_where_ranks_do_not_divide_them(dp_degree, readers):
    ranks = [RankStreams(8, rank, dp_degree) for rank in range(dp_degree)]
    counts = Counter(stream for rank in ranks for stream in rank.indices)
    assert counts == dict.fromkeys(range(8), readers)
    reporting = [rank.indices for rank in ranks if rank.is_first_of_group]
    assert sorted(stream for indices in reporting for stream in indices) == [*range(8)]


def test_a_state_is_of_json_types_and_comes_back():
    state = LoaderState(40, 8, {3: [StreamPosition(17, 120), StreamPosition(3)]})
    saved = json.loads(json.dumps(state.to_dict()))
    assert saved == {"windows_taken": 40, "streams": 8, "positions": {"3": [[17, 120], [3, 0]]}}
    assert LoaderState.from_dict(saved) == state


@pytest.mark.parametrize(
    "change",
    [
        {"windows_taken": -1},
        {"positions": {"3": [[-1, 0]]}},
    ],
)
def test_a_number_that_cannot_be_is_refused(change):
    saved = {"windows_taken": 40, "streams": 8, "positions": {"3": [[17, 120]]}}
    LoaderState.from_dict(saved)
    with pytest.raises(ValueError, match="should be"):
        LoaderState.from_dict(saved | change)
