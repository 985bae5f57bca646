"""Ranks before they have a process group: what ends one ends all, at once."""

import os
import signal
import time

import pytest
import torch.distributed as dist
from ranks import end_ranks, run_ranks, start_ranks

from titan_lite.config import ConfigError
from titan_lite.faults import TrainingError, signals
from titan_lite.faults.meeting import meet, refuse


def late():
    time.sleep(0.5 * int(os.environ["RANK"]))


def meet_and_connect():
    late()
    meet(60)
    dist.init_process_group("gloo")
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, dist.get_rank())
    return ranks


def test_ranks_that_have_met_connect_in_the_same_store():
    assert run_ranks(3, meet_and_connect, init=False) == [[0, 1, 2]] * 3


def one_refuses(refusing, code, folder):
    late()
    signals.listen(starting=True)
    began, rank = time.monotonic(), os.environ["RANK"]
    if rank == refusing:
        refuse("the folder is in use", code)
        told = f"refused in {time.monotonic() - began:.0f}"
    else:
        try:
            meet(60)
            told = "met"
        except (ConfigError, TrainingError) as error:
            told = f"{type(error).__name__}: {error}"
    (folder / rank).write_text(told)


@pytest.mark.parametrize("refusing", ["0", "2"])  # rank 0 hosts the store
@pytest.mark.parametrize(
    ("code", "kind"), [(signals.WRONG_INPUT, "ConfigError"), (signals.FAILED, "TrainingError")]
)
def test_a_rank_that_refuses_is_not_waited_for(refusing, code, kind, tmp_path):
    began = time.monotonic()
    assert end_ranks(start_ranks(3, one_refuses, refusing, code, tmp_path), 60) == [0, 0, 0]
    told = {rank: (tmp_path / rank).read_text() for rank in "012"}
    assert told.pop(refusing) in ("refused in 0", "refused in 1", "refused in 2", "refused in 3")
    assert set(told.values()) == {f"{kind}: [rank {refusing}] the folder is in use"}
    assert time.monotonic() - began < 50  # and not the time limit of the others


def one_never_comes():
    if os.environ["RANK"] == "0":
        with pytest.raises(
            TrainingError, match=r"1 of 2 ranks are ready after 2 s \(comm.init_timeout_seconds\)"
        ):
            meet(2)


def test_a_rank_that_does_not_come_is_waited_for_so_long():
    assert end_ranks(start_ranks(2, one_never_comes), 60) == [0, 0]


def one_is_signalled():
    rank = int(os.environ["RANK"])
    if rank == 1:
        time.sleep(1)
    signals.listen(starting=True)
    if rank == 0:
        signals.started()
        os.kill(os.getpid(), signal.SIGUSR1)
    meet(60)


def test_a_signal_before_all_have_met_stops_all():
    assert end_ranks(start_ranks(2, one_is_signalled), 60, patience=20) == [75, 75]
