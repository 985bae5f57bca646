"""The exit code of a run, which ranks record for the process that runs torchrun."""

import os
import subprocess
import sys

import pytest

from titan_lite import train
from titan_lite.config import ConfigError
from titan_lite.config.errors import MachineError
from titan_lite.resilience import exit_code
from titan_lite.resilience.exit_code import ENDINGS, FAILED, REPEATED, STOPPED, TRAINED, WRONG_INPUT


@pytest.fixture
def expected(monkeypatch):
    monkeypatch.setenv(exit_code.VARIABLE, "")
    exit_code.name_record()


@pytest.mark.parametrize(
    ("codes", "last"),
    [
        ([], None),
        ([FAILED], FAILED),
        ([FAILED, TRAINED], TRAINED),
        ([FAILED, STOPPED, FAILED], STOPPED),  # a rank that is late
        ([WRONG_INPUT], WRONG_INPUT),
        ([REPEATED], REPEATED),
    ],
)
def test_how_the_run_ended_is_recorded_and_decides_whether_a_restart_goes_on(codes, last, expected):
    for code in codes:
        exit_code.record(code)
    assert exit_code.recorded() == last
    assert exit_code.has_ended() == (last in ENDINGS)
    if last == FAILED:
        assert exit_code.recorded() is None  # of the next attempt
    else:
        assert exit_code.take_record() == last
    assert not os.path.exists(os.environ[exit_code.VARIABLE])


def test_the_first_rank_of_a_node_that_ends_tells_why(expected):
    assert exit_code.is_first_to_record(REPEATED)
    assert not exit_code.is_first_to_record(REPEATED)
    assert exit_code.recorded() == REPEATED


def test_without_a_record_each_rank_under_torchrun_tells_and_else_the_first(monkeypatch):
    monkeypatch.delenv(exit_code.VARIABLE, raising=False)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    assert exit_code.is_first_to_record(WRONG_INPUT)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert not exit_code.is_first_to_record(WRONG_INPUT)


def test_under_torchrun_alone_a_stop_exits_with_0_and_nothing_is_recorded(monkeypatch):
    monkeypatch.delenv(exit_code.VARIABLE, raising=False)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert exit_code.record_and_translate(STOPPED) == STOPPED
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    assert exit_code.record_and_translate(STOPPED) == TRAINED
    assert exit_code.record_and_translate(WRONG_INPUT) == WRONG_INPUT
    assert exit_code.recorded() is None
    assert not exit_code.has_ended()


def test_a_pipe_that_is_gone_leaves_the_exit_code():
    code = (
        "from titan_lite.resilience import exit_code as e; e.end_with(lambda: print('told') or 75)"
    )
    command = [sys.executable, "-c", code]
    environment = {"PYTHONPATH": ":".join(sys.path)}
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing) as pipe:
        assert subprocess.run(command, env=environment, stdout=pipe).returncode == 75


def test_streams_that_a_shell_has_closed_leave_the_exit_code():
    code = (
        "from titan_lite.resilience.exit_code import end_with; end_with(lambda: print('a') or 75)"
    )
    command = ["bash", "-c", 'exec "$@" <&- >&- 2>&-', "bash", sys.executable, "-c", code]
    assert subprocess.run(command, env={"PYTHONPATH": ":".join(sys.path)}).returncode == 75


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError("a key is wrong"), WRONG_INPUT), (MachineError("a server is away"), FAILED)],
)
def test_a_rank_ends_with_the_code_of_its_error(error, code, capsys, monkeypatch):
    def fail(*_):
        raise error

    monkeypatch.setattr(train, "read_config", fail)
    assert train.main(["debug_model"]) == code
    assert capsys.readouterr().err == f"error: {error}\n"
