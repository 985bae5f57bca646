"""bucketing = "measured": every way has its steps, all ranks keep the same one, and the compiled models are those of that way."""

import contextlib

import pytest
import torch
from torch import nn

from titan_lite.compiler import autotune as module
from titan_lite.compiler.autotune import FITS, METHODS, STEPS, Autotuner, check_steps
from titan_lite.compiler.receipt import Collective, DoesNotFit, Receipt
from titan_lite.compiler.stage import CompileError
from titan_lite.compiler.timeline import Timeline
from titan_lite.config import Compile, ConfigError

MEASURED = Compile(enable=True, bucketing="measured")


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


def run(clock, seconds, compiles=5.0, share=lambda step: 1.0):
    model = nn.Linear(1, 1)
    compiled = []

    def compile_as(way, fits):
        compiled.append(way)
        model._compiled_call_impl = way
        return [
            Receipt("forward", {"all_gather": 6}, (Collective("all_gather", ("a",), 8, 2),), 0, "")
        ]

    autotune = Autotuner([model], compile_as, MEASURED, torch.device("cpu"))
    steps = 0
    while not autotune.decided:
        way, first = METHODS[steps // STEPS], steps % STEPS == 0
        with autotune.step(share(steps)):
            clock.now += seconds[way] * share(steps) + (compiles if first else 0.0)
        steps += 1
    return autotune, model, compiled, steps


@pytest.mark.parametrize("fastest", METHODS)
def test_the_fastest_stays(fastest, clock):
    autotune, model, compiled, steps = run(clock, {way: 1.0 + (way != fastest) for way in METHODS})
    assert autotune.chosen == model._compiled_call_impl == fastest
    assert compiled == list(METHODS)
    assert steps == STEPS * len(METHODS)
    lines = autotune.describe()
    assert [line.endswith("; it stays") for line in lines] == [way == fastest for way in METHODS]
    assert lines[METHODS.index(fastest)].startswith(
        f'bucketing "{fastest}": 1.000 s a step, 6 collectives -> 1'
    )


def test_steps_of_a_smaller_batch_are_not_taken_for_faster_ones(clock):
    autotune, *_ = run(
        clock,
        {"none": 2.0, "block": 2.0, "greedy": 1.5, "auto": 2.0},
        share=lambda step: 0.5 if step < 5 else 1.0,
    )
    assert autotune.chosen == "greedy"
    assert autotune.seconds["none"] == 2.0


def test_what_takes_longest_to_compile_may_still_be_fastest(clock):
    autotune, *_ = run(
        clock, {"none": 2.0, "block": 2.0, "greedy": 1.0, "auto": 2.0}, compiles=100.0
    )
    assert autotune.chosen == "greedy"


def test_ranks_decide_on_the_slowest(clock, monkeypatch):
    """Here "block" is the fastest, on another rank it is not."""

    def slower_elsewhere(figures, operation):
        assert operation == torch.distributed.ReduceOp.MAX
        figures[METHODS.index("block"), 0] = 9.0

    monkeypatch.setattr(module.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(module.dist, "all_reduce", slower_elsewhere)
    autotune, *_ = run(clock, {"none": 3.0, "block": 1.0, "greedy": 2.0, "auto": 2.5})
    assert autotune.chosen == "greedy"


GIB = 2**30
BYTES = {
    "none": (1, 5),
    "block": (2, 5),
    "greedy": (1, 9),
    "auto": (1, 6),
}  # GiB that each way's graphs hold at once


class Compiled(nn.Module):
    """A model whose first call as `way` compiles a forward and a backward graph, and which notes what has run."""

    def __init__(self):
        super().__init__()
        self.ran = []

    def compile_as(self, way, fits):
        receipts = []

        def call():
            for graph, held in zip(
                ("forward", "backward"), BYTES[way] if not receipts else (), strict=False
            ):
                receipts.append(
                    Receipt(graph, {}, (), 0, "", Timeline(graph, (), *[0.0] * 5, held * GIB))
                )
                if fits is not None and not fits(receipts[-1]):
                    raise DoesNotFit
            self.ran.append(way)

        self._compiled_call_impl = call
        return receipts


def measured_within(memory, clock, monkeypatch, seconds):
    """The autotuner after a run on a device of `memory` GiB, and what has run in each step."""
    monkeypatch.setattr(module, "memory_of", lambda device: memory * GIB)
    model = Compiled()
    autotune = Autotuner([model], model.compile_as, MEASURED, torch.device("cpu"))
    while not autotune.decided:
        with autotune.step():
            model()
            clock.now += seconds[model.ran[-1]]
    model()
    return autotune, model.ran


SECONDS = {"none": 4.0, "block": 3.0, "greedy": 1.0, "auto": 2.0}


def test_a_way_that_would_not_fit_is_not_run_and_another_stays(clock, monkeypatch):
    autotune, ran = measured_within(4 / FITS - 0.1, clock, monkeypatch, SECONDS)
    assert ran == ["none"] * 3 + ["block"] * 3 + ["none"] * 3 + ["auto"] * 4
    assert autotune.describe()[2] == 'bucketing "greedy": not run, as it would need 4.00 GiB'
    assert autotune.describe()[3].endswith("; it stays")


def test_where_nothing_else_fits_the_first_way_stays(clock, monkeypatch):
    autotune, ran = measured_within(0.5, clock, monkeypatch, SECONDS)
    assert ran == ["none"] * 13
    assert autotune.chosen == "none"


def test_a_way_that_fits_is_run(clock, monkeypatch):
    assert measured_within(4 / FITS + 0.1, clock, monkeypatch, SECONDS)[0].chosen == "greedy"


def test_what_does_not_fit_another_rank_does_not_stay(clock, monkeypatch):
    """Here everything fits; a rank with less memory, of another stage, has not run "greedy", and "auto" filled it."""

    def full_elsewhere(figures, operation):
        figures[METHODS.index("greedy")] = torch.tensor([float("inf"), 9.0 * GIB, 1.1])
        figures[METHODS.index("auto"), 2] = 0.99

    monkeypatch.setattr(module.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(module.dist, "all_reduce", full_elsewhere)
    autotune, _ = measured_within(100, clock, monkeypatch, SECONDS)
    assert autotune.chosen == "block"
    assert autotune.describe()[2] == 'bucketing "greedy": not run, as it would need 9.00 GiB'


def test_an_estimate_that_was_too_low_is_an_error_that_names_the_way(clock):
    model = Compiled()
    autotune = Autotuner([model], model.compile_as, MEASURED, torch.device("cpu"))
    for _ in range(STEPS):
        with autotune.step():
            model()
    told = r'"measured" ran out of memory with "block"; use bucketing = "none", which fitted'
    with pytest.raises(CompileError, match=told), autotune.step():
        raise torch.OutOfMemoryError


def test_a_step_that_fails_decides_nothing(clock):
    autotune = Autotuner([], lambda way, fits: [], MEASURED, torch.device("cpu"))
    with contextlib.suppress(ZeroDivisionError), autotune.step():
        raise ZeroDivisionError
    assert (autotune.steps, autotune.chosen) == (0, "")


def test_any_other_way_is_compiled_at_once_and_decided_after_one_step():
    receipts = [Receipt("forward", {}, (), 0, "")]
    autotune = Autotuner(
        [],
        lambda way, fits: {"block": receipts}[way],
        Compile(enable=True, bucketing="block"),
        torch.device("cpu"),
    )
    assert autotune.receipts is receipts
    decided = []
    for _ in range(3):
        assert autotune.decided == bool(decided)
        with autotune.step():
            pass
        decided.append(autotune.just_decided)
    assert decided == [True, False, False]
    assert autotune.describe() == []


def test_without_a_compiled_model_nothing_is_compiled():
    autotune = Autotuner([], {}.__getitem__, Compile(bucketing="measured"), torch.device("cpu"))
    with autotune.step():
        pass
    assert autotune.just_decided
    assert autotune.receipts == autotune.describe() == []


def test_every_way_needs_its_steps():
    most = STEPS * len(METHODS)
    check_steps(MEASURED, done=5, steps=5 + most)
    check_steps(MEASURED, done=5, steps=5)  # nothing to do
    check_steps(Compile(enable=True), done=5, steps=6)
    check_steps(Compile(bucketing="measured"), done=5, steps=6)
    with pytest.raises(
        ConfigError,
        match=f"from step 5 on training.steps = {4 + most} .* training.steps = {5 + most} or more",
    ):
        check_steps(MEASURED, done=5, steps=4 + most)
