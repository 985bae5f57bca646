"""Attempts of one run, one after the other, as torchrun's environment tells them apart."""

import sys

import pytest

from titan_lite.resilience.restarts import RepeatedFault, Restarts, restart_command


@pytest.fixture
def attempt(tmp_path, monkeypatch):
    def begin(number, *steps, most=5):
        """An attempt that began these steps, and failed in the last one."""
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(number))
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", str(most))
        Restarts(tmp_path).check()
        trainer = Restarts(tmp_path)
        for step in steps:
            trainer.record_step(step)

    return begin


def test_the_same_step_twice_is_enough(attempt):
    attempt(0, 1, 2, 3)
    attempt(1, 1, 2, 3)
    with pytest.raises(
        RepeatedFault, match="step 3 failed twice in a row, the second time after a restart"
    ):
        attempt(2)


def test_an_attempt_that_did_not_come_to_a_step_is_no_news(attempt):
    attempt(0, 1, 2, 3)
    attempt(1)
    attempt(2, 3)
    for number in (3, 4):  # torchrun itself goes on with what the launcher would end
        with pytest.raises(RepeatedFault, match="step 3 failed twice in a row"):
            attempt(number)


def test_a_run_that_gets_further_or_not_so_far_is_restarted(attempt):
    attempt(0, 1, 2, 3)
    attempt(1, 2, 3, 4)
    attempt(2, 3)
    attempt(3, 3, 4)
    attempt(4)  # failed before a step
    attempt(5, 4)


def test_the_first_attempt_of_a_launch_forgets_the_launch_before(attempt):
    attempt(0, 1, 2)
    attempt(1, 1, 2)
    attempt(0)  # failed before a step
    attempt(1, 2)
    attempt(2)


def test_the_first_rank_alone_writes(attempt, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    attempt(0, 1, 2)
    assert list(tmp_path.iterdir()) == []


def test_without_restarts_nothing_is_written(attempt, tmp_path):
    attempt(0, 1, 2, most=0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", '{"0": 3, "1"'])
def test_a_torn_file_says_nothing(text, attempt, tmp_path):
    (tmp_path / "restarts.json").write_text(text)
    attempt(2)


@pytest.mark.parametrize(
    ("variables", "command"),
    [
        ({}, "python -u -m titan_lite.train 'a recipe.toml'"),
        ({"TITAN_LITE_COMMAND": "NGPU=2 ./run_train.sh"}, "NGPU=2 ./run_train.sh"),
        ({"WORLD_SIZE": "2"}, "torchrun --nproc-per-node 2 -m titan_lite.train 'a recipe.toml'"),
        (
            {"WORLD_SIZE": "8"},
            "torchrun --nnodes 4 ... --nproc-per-node 2 -m titan_lite.train 'a recipe.toml'",
        ),
    ],
)
def test_the_command_that_goes_on(variables, command, monkeypatch):
    for name in ("TITAN_LITE_COMMAND", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    if "WORLD_SIZE" in variables:
        variables = {**variables, "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "run"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        sys, "orig_argv", ["python", "-u", "-m", "titan_lite.train", "a recipe.toml"]
    )
    assert restart_command() == command
