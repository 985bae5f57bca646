"""Steps that are skipped: losses that are not finite, and losses far above the ones before."""

import json
import logging
import math

import pytest
import torch

from titan_lite.config import Training
from titan_lite.resilience import TrainingError, skipped_steps
from titan_lite.resilience.skipped_steps import SkippedSteps


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.setattr(skipped_steps.dist, "all_reduce", lambda tensor, operation: None)
    monkeypatch.setattr(skipped_steps.dist, "get_rank", lambda: 0)


class Guard(SkippedSteps):
    """Decides and notes a step at once."""

    def skips(self, step, loss, grad_norm):
        skip, limit = self.decide(torch.tensor(loss), torch.tensor(grad_norm))
        self.record(step, loss, grad_norm, skip.item(), limit.item())
        return bool(skip)


def guard(window=4, losses=(1.0, 2.0, 1.0, 2.0), **options):
    training = Training(spike_window=window, spike_sigmas=3.0, **options)
    made = Guard(training, 0.5, torch.device("cpu"))
    assert not any(made.skips(step, loss, 1.0) for step, loss in enumerate(losses, 1))
    return made


def test_a_loss_is_a_spike_from_so_many_standard_deviations_above_the_mean_on():
    assert guard().limit() == 1.5 + 3 * 0.5
    assert not guard().skips(5, 3.0, 1.0)
    assert guard().skips(5, 3.01, 1.0)
    assert not guard().skips(5, -100.0, 1.0)


def test_nothing_is_one_before_the_window_is_full():
    assert not guard(losses=(1.0, 1.0, 1.0)).skips(4, 1000.0, 1.0)


def test_neither_a_spike_nor_what_is_not_finite_joins_the_window():
    made = guard()
    assert made.skips(5, 50.0, 1.0)
    assert made.skips(6, 50.0, 1.0)
    assert made.skips(7, math.nan, 1.0)
    assert made.skips(8, 1.0, math.inf)
    assert made.limit() == 3.0
    assert not made.skips(9, 2.5, 1.0)
    assert made.state_dict()["accepted"] == [2.0, 1.0, 2.0, 2.5]
    assert [one["step"] for one in made.spikes] == [5, 6]


def test_turned_off_it_finds_none_and_asks_nobody(monkeypatch):
    monkeypatch.delattr(skipped_steps.dist, "all_reduce")
    assert not guard(window=0, losses=(1.0, 1.0)).skips(3, 1e9, 1.0)


def test_one_that_another_rank_finds_is_one(monkeypatch):
    def with_another_rank(tensor, operation):
        assert operation == skipped_steps.dist.ReduceOp.MAX
        tensor.fill_(1)

    made = guard()
    monkeypatch.setattr(skipped_steps.dist, "all_reduce", with_another_rank)
    assert made.skips(5, 3.0, 1.0)


@pytest.mark.parametrize(
    ("loss", "grad_norm"), [(math.nan, 1.0), (1.0, math.inf), (math.inf, math.nan)]
)
def test_what_is_not_finite_is_skipped_counted_and_told(loss, grad_norm, caplog):
    caplog.set_level(logging.WARNING, logger="titan_lite")
    made = guard()
    assert made.skips(5, loss, grad_norm)
    assert made.skips(6, loss, grad_norm)
    assert (made.count, made.in_a_row) == (2, 2)
    assert not made.skips(7, 1.0, 1.0)
    assert (made.count, made.in_a_row) == (2, 0)
    assert caplog.messages == [
        f"step {5 + i} skipped: loss {loss}, gradient norm {grad_norm}; {1 + i} in a row"
        for i in (0, 1)
    ]
    assert [record.event for record in caplog.records] == ["skip", "skip"]


@pytest.mark.parametrize(("window", "spike"), [(4, ", or a spike,"), (0, "")])
def test_too_many_in_a_row_end_the_run(window, spike):
    made = guard(window=window, max_nonfinite_steps=2)
    made.skips(5, math.nan, 1.0)
    with pytest.raises(TrainingError) as error:
        made.skips(6, math.nan, 1.0)
    assert (
        str(error.value) == f"2 steps in a row had a non-finite loss or gradient{spike}"
        " (training.max_nonfinite_steps), the last one step 6; parameters are those of step 4;"
        ' use an optimizer.lr below 0.5, or training.mixed_precision_param = "float32"'
    )


def test_it_goes_on_from_its_state_as_json():
    made = guard(losses=(1.0, 2.0, 1.25, 2.5, 0.5))
    made.skips(6, 50.0, 1.0)
    state = made.state_dict()
    assert state == {
        "count": 1,
        "in_a_row": 1,
        "accepted": [2.0, 1.25, 2.5, 0.5],
        "skipped": [{"step": 6, "loss": 50.0, "limit": made.limit()}],
    }
    after = guard(losses=())
    after.load_state_dict(json.loads(json.dumps(state)))
    assert (after.limit(), after.state_dict()) == (made.limit(), state)
    wider = guard(window=8, losses=())
    wider.load_state_dict(state)
    assert not wider.skips(7, 50.0, 1.0)  # fills up first


def test_it_says_why(caplog):
    caplog.set_level(logging.WARNING, logger="titan_lite")
    guard().skips(5, 50.0, 1.0)
    assert caplog.messages == [
        "step 5 skipped: loss 50.0000 is a spike, above 3.0000, 3 standard deviations above the"
        " mean of the last 4 (training.spike_sigmas); 1 in a row"
    ]
