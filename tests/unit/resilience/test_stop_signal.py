"""Ranks agree to stop, and one of them says who was asked and what follows."""

import logging
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from titan_lite.distributed.mesh import build_mesh
from titan_lite.resilience import stop_signal
from titan_lite.resilience.signals import LAUNCHER_DEATH
from titan_lite.resilience.stop_signal import StopSignal
from titan_lite.trainer import Trainer


@pytest.fixture
def ranks(monkeypatch):
    """A function that sets what the two ranks have received, of which this process is the first."""

    def received(*names):
        monkeypatch.setattr(stop_signal.signals, "received", lambda: names[0])
        monkeypatch.setattr(stop_signal.dist, "get_rank", lambda: 0)
        monkeypatch.setattr(
            stop_signal.dist, "all_reduce", lambda tensor: tensor.fill_(sum(map(bool, names)))
        )
        monkeypatch.setattr(
            stop_signal, "first_nonempty", lambda own: own or f"{names[1]} received by rank 1"
        )
        monkeypatch.setattr(stop_signal, "sum_over_ranks", lambda own: [own + bool(names[1])])

    return received


def test_a_signal_of_any_rank_stops_all_and_is_told_once(ranks, caplog):
    caplog.set_level(logging.WARNING, logger="titan_lite")
    one = StopSignal(torch.device("cpu"), lambda: "step 7: exiting")
    ranks("", "")
    assert not one.poll()
    one.update(0)
    assert not one.requested
    ranks("", "SIGUSR1")
    assert one.poll()
    ranks("SIGTERM", "SIGUSR1")
    assert one.poll()
    one.update(1)
    assert caplog.messages == ["SIGUSR1 received by rank 1 at step 7: exiting"]
    assert caplog.records[0].event == "stop"


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("SIGUSR1", ""), "SIGUSR1 received by rank 0 at"),
        (("SIGUSR1", "SIGTERM"), "SIGUSR1 received by rank 0 and 1 other at"),
        (
            (LAUNCHER_DEATH, LAUNCHER_DEATH),
            "the death of its launcher noticed by rank 0 and 1 other at",
        ),
    ],
)
def test_who_received_it(ranks, caplog, names, words):
    ranks(*names)
    StopSignal(torch.device("cpu"), lambda: "step 7").update(1)
    assert caplog.messages[-1].startswith(words)


def stops_of_a_pair():
    """Of two tensor-parallel ranks, the second one has a signal."""
    degrees = dict(pp=1, dp_replicate=1, dp_shard=1, cp=1, tp=2)
    trainer = SimpleNamespace(mesh=build_mesh(degrees, "cpu"))
    return Trainer.sum_loss_and_stops(trainer, torch.zeros(()), dist.get_rank() == 1)[1]


@pytest.mark.ranks(2)
def test_ranks_that_share_their_data_stop_together():
    assert [bool(stops) for stops in run_ranks(2, stops_of_a_pair)] == [True, True]
