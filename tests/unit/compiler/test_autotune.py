"""bucketing = "measured": every way has its steps, all ranks keep the same one, and the compiled models are those of that way."""

import contextlib

import pytest
import torch
from torch import nn

from titan_lite.compiler import autotune as module
from titan_lite.compiler.autotune import STEPS, WAYS, Trial
from titan_lite.compiler.receipt import Collective, Receipt


class Clock:
    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def run(clock, seconds, compiles=5.0):
    model = nn.Linear(1, 1)
    compiled = []

    def compile_as(way):
        compiled.append(way)
        model._compiled_call_impl = way
        return [Receipt("forward", {"all_gather": 6}, (Collective("all_gather", ("a",), 8, 2),), 0, "")]

    trial = Trial([model], compile_as, torch.device("cpu"))
    steps = 0
    while not trial.chosen:
        way, first = WAYS[steps // STEPS], steps % STEPS == 0
        with trial.step():
            clock.now += seconds[way] + (compiles if first else 0.0)
        steps += 1
    return trial, model, compiled, steps


@pytest.mark.parametrize("fastest", WAYS)
def test_the_fastest_stays(fastest, clock):
    trial, model, compiled, steps = run(clock, {way: 1.0 + (way != fastest) for way in WAYS})
    assert trial.chosen == model._compiled_call_impl == fastest
    assert compiled == list(WAYS)
    assert steps == STEPS * len(WAYS)
    lines = trial.describe()
    assert [line.endswith("; it stays") for line in lines] == [way == fastest for way in WAYS]
    assert lines[WAYS.index(fastest)].startswith(f'bucketing "{fastest}": 1.000 s a step, 6 collectives -> 1')


def test_what_takes_longest_to_compile_may_still_be_fastest(clock):
    trial, *_ = run(clock, {"none": 2.0, "block": 2.0, "greedy": 1.0, "auto": 2.0}, compiles=100.0)
    assert trial.chosen == "greedy"


def test_ranks_decide_on_the_slowest(clock, monkeypatch):
    """Here "block" is the fastest, on another rank it is not."""

    def slower_elsewhere(figures, operation):
        assert operation == torch.distributed.ReduceOp.MAX
        figures[WAYS.index("block"), 0] = 9.0

    monkeypatch.setattr(module.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(module.dist, "all_reduce", slower_elsewhere)
    trial, *_ = run(clock, {"none": 3.0, "block": 1.0, "greedy": 2.0, "auto": 2.5})
    assert trial.chosen == "greedy"


def test_a_step_that_fails_decides_nothing(clock):
    trial = Trial([], lambda way: [], torch.device("cpu"))
    with contextlib.suppress(ZeroDivisionError), trial.step():
        raise ZeroDivisionError
    assert (trial.steps, trial.chosen) == (0, "")
