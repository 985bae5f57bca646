"""The verdict from flight recorders of several ranks."""

import json
import sys

import pytest

from titan_lite.features.watchdog.hang_report import (
    abbreviate,
    collectives_by_group,
    describe_frame,
    verdict,
)

SECOND = 10**9


def entry(
    group,
    number,
    operation="gloo:all_gather",
    *,
    created=0,
    retired=False,
    state="scheduled",
    is_p2p=False,
):
    """As torch's flight recorder has it, but for what is not read."""
    return {
        "process_group": [group, "mesh_dp_shard"],
        "collective_seq_id": 0 if is_p2p else number,
        "p2p_seq_id": number if is_p2p else 0,
        "profiling_name": operation,
        "time_created_ns": created or number * SECOND,
        "retired": retired,
        "state": state,
        "is_p2p": is_p2p,
    }


def record(
    *entries,
    members=(0, 1, 2, 3),
    started=(),
    phase="step 7",
    code="forward (model.py:3)",
):
    names = {one["process_group"][0] for one in entries}
    groups = collectives_by_group(entries, dict.fromkeys(names, members), started)
    return json.loads(json.dumps({"phase": phase, "code": code, "groups": groups}))  # as it travels


def lines(records, world_size=4):
    return verdict(records, world_size).splitlines()


def test_a_rank_that_did_not_enter_is_named_with_what_it_is_for():
    started = (214 * SECOND - 1000, "0", "layers.4.attention.wq.weight")
    others = record(entry("0", 213, retired=True), entry("0", 214), started=[started])
    late = record(entry("0", 213, retired=True), code="sleep (data.py:9)")
    assert lines({0: others, 1: others, 2: others, 3: late}) == [
        "ranks 0-2 wait in all_gather #214 (layers.4.attention.wq.weight) for rank 3",
        "rank 3, in step 7: sleep (data.py:9)",
    ]


def test_a_collective_of_no_parameters_has_not_the_names_of_the_one_before():
    started = (9 * SECOND - 1000, "0", "layers.4.attention.wq.weight")
    gather = entry("0", 10, "gloo:gather", created=9 * SECOND + 1000)
    others = record(entry("0", 9, retired=True), gather, started=[started], members=(0, 1))
    late = record(entry("0", 9, retired=True), members=(0, 1))
    assert lines({0: others, 1: late}, 2)[0] == "rank 0 waits in gather #10 for rank 1"


def test_a_rank_without_a_record_gives_no_sign_of_life():
    others = record(entry("0", 9, "nccl:_reduce_scatter_base"))
    assert lines({0: others, 1: others, 3: others}) == [
        "rank 2 gives no sign of life (stopped, dead, or cut off)",
        "ranks 0-1, 3 wait in reduce_scatter #9 for rank 2",
        *(
            f"rank {rank}, in step 7: forward (model.py:3), waits in reduce_scatter #9"
            for rank in (0, 1, 3)
        ),
    ]


def test_who_waits_elsewhere_is_no_culprit():
    """Rank 3 is late for its data-parallel group; rank 1, its tensor-parallel neighbour's partner,
    waits for those who wait.
    """
    waits_for_3 = record(entry("dp", 5), members=(2, 3))
    waits_for_2 = record(entry("tp", 8), members=(0, 2))
    late = record(entry("dp", 4, retired=True), members=(2, 3), code="late (a.py:1)")
    found = lines(
        {0: waits_for_2, 1: record(entry("x", 3), members=(1, 0)), 2: waits_for_3, 3: late}
    )
    assert found == [
        "rank 2 waits in all_gather #5 for rank 3",
        "rank 3, in step 7: late (a.py:1)",
    ]


def test_the_oldest_collective_in_flight_is_the_one_that_is_waited_for():
    entries = entry("0", 6), entry("0", 5), entry("0", 4, state="completed")
    ahead = record(*entries, members=(0, 1))
    late = record(entry("0", 4, retired=True), members=(0, 1))
    assert lines({0: ahead, 1: late}, 2)[0] == "rank 0 waits in all_gather #5 for rank 1"


def test_a_collective_that_all_have_entered_hangs_itself():
    left, inside = (
        record(entry("0", 5, retired=True), members=(0, 1)),
        record(entry("0", 5), members=(0, 1)),
    )
    said = "in all_gather #5, which all have entered"
    assert lines({0: inside, 1: left}, 2) == [
        f"rank 0 waits {said}",
        "rank 1, in step 7: forward (model.py:3)",
    ]
    assert lines({0: inside, 1: inside}, 2)[0] == f"ranks 0-1 wait {said}"


def test_ranks_that_wait_for_each_other():
    others = record(entry("b", 1, "gloo:all_reduce"), members=(0, 1))
    assert lines({0: record(entry("a", 1), members=(0, 1)), 1: others}, 2) == [
        "the ranks wait for each other",
        "rank 0, in step 7: forward (model.py:3), waits in all_gather #1",
        "rank 1, in step 7: forward (model.py:3), waits in all_reduce #1",
    ]


def test_different_collectives_under_one_number():
    other = record(entry("a", 4, "gloo:all_reduce"), members=(0, 1))
    found = lines({0: record(entry("a", 4), members=(0, 1)), 1: other}, 2)
    assert found == [
        "ranks 0-1 wait in all_gather #4 or all_reduce #4, which all have entered",
        "rank 0, in step 7: forward (model.py:3), waits in all_gather #4",
        "rank 1, in step 7: forward (model.py:3), waits in all_reduce #4",
    ]


def test_receiving_from_a_stage_that_does_not_send():
    waits = record(entry("pp", 3, "nccl:recv 1<-0", is_p2p=True), members=(0, 1))
    found = lines(
        {0: record(entry("pp", 7, retired=True), members=(0, 1), code="here (a.py:1)"), 1: waits},
        2,
    )
    assert found == [
        "rank 1 waits in recv 1<-0 for rank 0",
        "rank 0, in step 7: here (a.py:1)",
    ]


def test_without_a_flight_recorder_there_is_the_code():
    assert lines({0: record(code="wait (gather.py:44)"), 1: record(code="late (a.py:1)")}, 2) == [
        "rank 0, in step 7: wait (gather.py:44)",
        "rank 1, in step 7: late (a.py:1)",
    ]


def test_many_that_are_missing_are_not_all_shown():
    records = {rank: record(entry("0", 1, retired=True), members=range(9)) for rank in range(1, 9)}
    found = lines({0: record(entry("0", 2), members=range(9)), **records}, 9)
    assert found[0] == "rank 0 waits in all_gather #2 for ranks 1-8"
    assert found[-1] == "and 4 more"
    assert len(found) == 6


def test_a_start_of_long_ago_or_of_another_group_is_of_something_else():
    old, other, later = (
        (SECOND, "0", "old"),
        (5 * SECOND - 1, "1", "other"),
        (5 * SECOND + 1, "0", "later"),
    )
    groups = collectives_by_group([entry("0", 5)], {"0": [0, 1]}, [old, other, later])
    assert groups["0"]["waiting"][0].parameters == ""


@pytest.mark.parametrize(
    ("parameters", "short"),
    [
        ("norm.weight", "norm.weight"),
        ("layers.4.attention.wq.weight layers.4.attention.wk.weight", "layers.4.attention"),
        ("layers.4.attention.wq.weight layers.4.ffn_norm.weight", "layers.4"),
        ("norm.weight output.weight", "norm.weight output.weight"),
        ("a.weight b.weight c.weight d.weight e.weight", "a.weight to e.weight"),
    ],
)
def test_a_bucket_is_called_by_what_its_parameters_share(parameters, short):
    assert abbreviate(parameters) == short


def test_a_frame_is_described_by_the_innermost_function_and_the_innermost_of_the_package():
    found = []

    class Names(list):
        def split(self):
            found.append(describe_frame(sys._getframe()))
            return ["one"]

    abbreviate(Names())
    assert found[0].startswith("split (")
    assert ", called by abbreviate (titan_lite/features/watchdog/hang_report.py:" in found[0]
    assert describe_frame(sys._getframe()).startswith("test_a_frame_is_described_by")
