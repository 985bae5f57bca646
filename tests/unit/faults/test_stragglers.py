"""The rank that waits least is slow."""

import json
import sys
import threading

import pytest
import torch

from titan_lite.faults import stragglers
from titan_lite.faults.stragglers import (
    BINS,
    IN_A_ROW,
    LEAST,
    LEAST_ON_GPU,
    PERIOD,
    Stragglers,
    _bin,
    is_waiting,
    times_slower,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("work", "slower"),
    [
        ([0.9, 0.5, 0.5, 0.6], {0: 1.8}),
        ([0.9, 0.9, 0.9, 0.9], {}),
        ([0.6, 0.5, 0.55, 0.5], {}),
        ([1.0, 0.5], {0: 2.0}),
        ([0.2, 0.9, 0.9, 0.9], {}),  # one that is quick
        ([1.0, 0.0], {0: 100.0}),
    ],
)
def test_who_works_longer_than_most_is_slower(work, slower):
    working = torch.zeros(BINS)
    for share in work:
        working[_bin(share)] += 1
    found = {
        rank: times for rank, share in enumerate(work) if (times := times_slower(share, working))
    }
    assert found == pytest.approx(slower, rel=2 / BINS)


@pytest.fixture
def comparing(monkeypatch):
    """A function: the others' shares of time in which they wait -> what rank 1 says."""
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)
    made = Stragglers(1, [[0, 1], [2, 3]], CPU)
    looks = int(LEAST / PERIOD) + 1

    def compare(waiting, own, others_looks=looks):
        made.looks, made.waits = looks, looks * own

        def all_reduce(working):
            for rank, share in waiting.items():
                working[rank // 2, _bin(1 - share)] += 1
                working[-1, 0] += others_looks * PERIOD < LEAST

        monkeypatch.setattr(stragglers.dist, "all_reduce", all_reduce)
        return made.compare()

    return compare


def test_a_rank_is_named_when_it_is_slower_several_times_in_a_row(comparing):
    slow = {0: 0.5, 2: 0.0, 3: 0.0}  # and the other stage works all the time
    assert [comparing(slow, 0.0) for _ in range(IN_A_ROW - 1)] == [""] * (IN_A_ROW - 1)
    said = "rank 1 is slower than the others, which wait for it: its steps take 2.0 times theirs"
    assert comparing(slow, 0.0) == said
    assert comparing(slow, 0.0) == ""  # not each time
    assert comparing(slow, 0.5) == ""
    assert [comparing(slow, 0.0) for _ in range(IN_A_ROW)][-1] == said


def test_the_first_rank_warns(monkeypatch, caplog):
    for rank in (0, 1):
        one = Stragglers(rank, [[0], [1]], CPU)
        one.warn(6)
        monkeypatch.setattr(one, "compare", lambda: "rank 1 is slower")
        one.warn(7)
    assert caplog.messages == ["step 7: rank 1 is slower"]
    assert caplog.records[0].event == "slow"


def test_a_few_looks_tell_nothing_and_add_up(comparing):
    slow = {0: 0.5, 2: 0.0, 3: 0.0}
    for _ in range(5):
        assert comparing(slow, 0.0, others_looks=3) == ""


def test_a_rank_that_is_alone_in_its_stage_compares_with_nobody():
    assert Stragglers(0, [[0], [1]], CPU).compare() == ""


def frame_in(path, function):
    """A frame that looks like one of another file."""
    names = {
        "sys": sys,
        "WaitTensor": type(
            "WaitTensor", (), {"__str__": lambda self: "_c10d_functional.wait_tensor"}
        ),
    }
    exec(compile(f"def {function}(self=None):\n return sys._getframe()", path, "exec"), names)
    return names[function](names["WaitTensor"]())


@pytest.mark.parametrize(
    ("path", "function", "waits"),
    [
        ("/x/titan_lite/distributed/gather.py", "wait", True),
        ("/x/torch/distributed/_functional_collectives.py", "trigger_wait", True),
        ("/x/torch/distributed/distributed_c10d.py", "all_reduce", True),
        ("/x/torch/_ops.py", "__call__", True),
        ("/lib/python3.11/threading.py", "wait", False),  # for the loader
        ("/x/titan_lite/models/llama3.py", "forward", False),
        ("/x/titan_lite/distributed/gather.py", "start_gather", False),
    ],
)
def test_waiting_is_told_from_working(path, function, waits):
    assert is_waiting(frame_in(path, function)) == waits
    assert not is_waiting(None)


def test_the_time_of_nccl_is_that_of_its_kernels_since_the_oldest_one(monkeypatch):
    made = Stragglers(0, [[0, 1]], torch.device("cuda"))
    entries = [
        {"time_created_ns": 10**9, "duration_ms": 500.0},
        {"time_created_ns": 3 * 10**9, "duration_ms": 250.0},
    ]
    entries.append({"time_created_ns": 9 * 10**9})  # on its way
    dumps = iter([{}, {"entries": entries}])
    monkeypatch.setattr(
        stragglers.c10d, "_dump_nccl_trace_json", lambda *_: json.dumps(next(dumps)), raising=False
    )
    assert made._time_of_nccl() == (0.0, 0.0)  # and does not read yet
    made.since -= LEAST_ON_GPU
    assert made._time_of_nccl() == (0.0, 0.0)  # turned off
    assert made._time_of_nccl() == (2.0, 0.75)
