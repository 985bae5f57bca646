"""Hooks: those of every run, each by itself."""

import gc
import sys
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest

from titan_lite.config import Config, FaultTolerance
from titan_lite.hooks import GarbageCollection, Hook, ProgressBar, build_hooks
from titan_lite.logging import console

STEPS = range(8, 101)  # of a run that has done seven of a hundred


@pytest.mark.parametrize(
    ("terminal", "rank", "shown"), [(True, 0, True), (True, 1, False), (False, 0, False)]
)
def test_one_rank_shows_a_bar_on_a_terminal_that_starts_where_the_run_does(
    terminal, rank, shown, monkeypatch, capsys
):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    monkeypatch.setenv("NO_COLOR", "")
    bar = ProgressBar(rank)
    with bar.around_training(STEPS):
        bar.on_step_end(8)
        bar.on_train_end(None)
    assert ("7/100" in capsys.readouterr().out) is shown


def test_lines_stand_above_the_bar_as_long_as_there_is_one(monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "")
    bar = ProgressBar(rank=0)
    with suppress(ValueError), bar.around_training(STEPS):
        assert console.around.__func__.__qualname__ == "tqdm.external_write_mode"
        raise ValueError("a fault ends the run")
    assert console.around is nullcontext


def test_garbage_is_collected_in_the_same_steps_on_all_ranks(monkeypatch):
    collected = []
    monkeypatch.setattr(gc, "disable", lambda: collected.append("disabled"))
    monkeypatch.setattr(gc, "enable", lambda: collected.append("enabled"))
    monkeypatch.setattr(gc, "collect", lambda generation: collected.append(generation))
    hook = GarbageCollection(freq=3)
    with hook.around_training(range(1, 7)):
        for step in range(1, 7):
            hook.on_step_start(step)
    assert collected == ["disabled", 1, 1, "enabled"]


def test_a_run_has_the_observers_of_its_recipe():
    with_groups = Config(fault_tolerance=FaultTolerance(replica_groups=2))
    names = [
        [type(hook).__name__ for hook in build_hooks(config, rank=0, folder=Path())]
        for config in (Config(), with_groups)
    ]
    assert {"LogStart", "Profile", "ProgressBar"} <= {*names[0]}
    assert "ProgressBar" not in names[1]


def test_every_hook_has_the_methods_that_the_trainer_calls():
    methods = [name for name in vars(Hook) if name.startswith(("on_", "around_"))]
    for hook in build_hooks(Config(), rank=0, folder=Path()):
        overridden = {name for name in vars(type(hook)) if name.startswith(("on_", "around_"))}
        assert overridden
        assert overridden <= set(methods)
