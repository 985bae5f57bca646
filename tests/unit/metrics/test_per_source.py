"""Tokens and loss of each source, from the losses of sequences."""

import math

import pytest
import torch

from titan_lite.metrics import per_source
from titan_lite.metrics.per_source import PerSource

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch):
    """Sums are those of two ranks that have the same."""

    def twice(tensor, mesh):
        tensor *= 2

    monkeypatch.setattr(per_source, "sum_of_losses", twice)
    monkeypatch.setattr(per_source, "sum_over_tokens", twice)


def made(names=("web", "code", "books")):
    return PerSource(names, None, CPU)


def test_figures_are_of_the_window_and_tokens_of_the_run():
    by_source = made()
    by_source.read([0, 1], torch.tensor([4, 2]))
    by_source.read([1, 1], torch.tensor([4, 4]))
    assert by_source.add(torch.tensor([0.8, 0.3]), torch.tensor(10)) == pytest.approx(
        1.1
    )  # losses divided by the step's tokens
    assert by_source.add(torch.tensor([0.6, 0.1]), torch.tensor(10)) == pytest.approx(0.7)
    found = by_source.values()
    assert found == {
        "loss_by_source/web": pytest.approx(2.0),
        "loss_by_source/code": pytest.approx(1.0),
        "tokens_by_source/web": 8,
        "tokens_by_source/code": 20,
        "tokens_by_source/books": 0,
    }
    by_source.read([2], torch.tensor([3]))
    by_source.add(torch.tensor([6.0]))
    by_source.gather()
    state = by_source.state_dict()
    assert state == {"tokens": {"web": 8, "code": 20, "books": 6}}
    found = by_source.values()  # a save between two lines takes nothing from them
    assert {name: value for name, value in found.items() if "loss" in name} == {
        "loss_by_source/books": 2.0
    }
    resumed = made(("books", "web", "new"))
    resumed.load_state_dict(state)
    assert resumed.state_dict() == {"tokens": {"books": 6, "web": 8, "new": 0, "code": 20}}
    assert "tokens_by_source/code" not in resumed.values()  # it is gone; a later phase may have it
    resumed.load_state_dict({})
    assert resumed.state_dict() == {"tokens": {"books": 0, "web": 0, "new": 0}}


def test_a_loss_that_is_not_finite_is_that_of_its_source_alone():
    by_source = made()
    by_source.read([0, 1], torch.tensor([4, 4]))
    by_source.add(torch.tensor([math.nan, 2.0]))
    found = by_source.values("validation_")
    assert found.keys() == {"validation_loss_by_source/web", "validation_loss_by_source/code"}
    assert math.isnan(found["validation_loss_by_source/web"])
    assert found["validation_loss_by_source/code"] == 0.5


def test_a_source_without_a_held_out_sequence_is_named_once(caplog):
    by_source = made(("web", "code"))
    for _ in range(2):
        by_source.read([1], torch.tensor([4]))
        by_source.add(torch.tensor([2.0]))
        assert by_source.values("validation_").keys() == {"validation_loss_by_source/code"}
    (line,) = caplog.messages
    assert (
        "validation_loss_by_source/web is absent: no sequence of that source was read; use a larger"
        " validation.steps" in line
    )


def test_a_rank_without_the_last_stage_adds_zeros():
    by_source = made()
    by_source.read([0, 1], torch.tensor([4, 4]))
    assert by_source.add(torch.zeros(2), torch.tensor(8)) == 0
    assert by_source.values()["loss_by_source/web"] == 0


def test_one_source_adds_no_figure_and_no_collective(monkeypatch):
    monkeypatch.setattr(per_source, "sum_of_losses", pytest.fail)
    monkeypatch.setattr(per_source, "sum_over_tokens", pytest.fail)
    by_source = made(())
    by_source.read([0], torch.tensor([4]))
    assert by_source.add(torch.tensor([2.5]), torch.tensor(8)) == 2.5
    by_source.gather()
    assert by_source.values() == by_source.state_dict() == {}
