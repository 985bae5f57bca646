"""Losses far above the ones before."""

import json

import pytest
import torch

from titan_lite.faults import spikes
from titan_lite.faults.spikes import SpikeGuard


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.setattr(spikes.dist, "all_reduce", lambda tensor, operation: None)


def guard(window=4, sigmas=3.0, losses=(1.0, 2.0, 1.0, 2.0)):
    made = SpikeGuard(window, sigmas, torch.device("cpu"))
    assert not any(made.is_spike(step, loss) for step, loss in enumerate(losses, 1))
    return made


def test_a_loss_is_a_spike_from_so_many_standard_deviations_above_the_mean_on():
    assert guard().limit() == 1.5 + 3 * 0.5
    assert not guard().is_spike(5, 3.0)
    assert guard().is_spike(5, 3.01)
    assert not guard().is_spike(5, -100.0)


def test_nothing_is_one_before_the_window_is_full():
    assert not guard(losses=(1.0, 1.0, 1.0)).is_spike(4, 1000.0)


def test_a_spike_does_not_join_the_window():
    made = guard()
    assert made.is_spike(5, 50.0)
    assert made.is_spike(6, 50.0)
    assert made.limit() == 3.0
    assert not made.is_spike(7, 2.5)
    assert [*made.accepted] == [2.0, 1.0, 2.0, 2.5]
    assert [one["step"] for one in made.skipped] == [5, 6]


def test_turned_off_it_finds_none_and_asks_nobody(monkeypatch):
    monkeypatch.delattr(spikes.dist, "all_reduce")
    assert not guard(window=0, losses=(1.0, 1.0)).is_spike(3, 1e9)


def test_one_that_another_rank_finds_is_one(monkeypatch):
    made = guard()
    monkeypatch.setattr(spikes.dist, "all_reduce", lambda tensor, operation: tensor.fill_(1))
    assert made.is_spike(5, 3.0)


def test_it_goes_on_from_its_state_as_json():
    made = guard(losses=(1.0, 2.0, 1.1, 2.3, 0.1))
    made.is_spike(6, 50.0)
    after = guard(losses=())
    after.load_state_dict(json.loads(json.dumps(made.state_dict())))
    assert (after.limit(), after.skipped) == (made.limit(), made.skipped)
    assert after.describe(6) == made.describe(6)
    wider = SpikeGuard(8, 3.0, torch.device("cpu"))
    wider.load_state_dict(made.state_dict())
    assert not wider.is_spike(7, 50.0)  # fills up first
    empty = guard()
    empty.load_state_dict({})  # of a checkpoint from before there was a guard
    assert not empty.is_spike(5, 50.0)


def test_it_says_why():
    made = guard()
    made.is_spike(5, 50.0)
    assert made.describe(5) == (
        "loss 50.0000 is a spike, above 3.0000, 3 standard deviations above the mean of the last 4 (training.spike_sigmas)"
    )
    assert made.describe(6) == ""
