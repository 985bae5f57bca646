"""The exit code of a run, which ranks record for the process that runs torchrun."""

import errno
import os
import subprocess
import sys

import pytest

from titan_lite import train
from titan_lite.config import ConfigError
from titan_lite.config.errors import MachineError
from titan_lite.processes import describe_limit
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


def test_a_process_has_streams_where_a_shell_has_closed_them():
    code = (
        "import sys; from titan_lite.resilience.exit_code import end_with;"
        " end_with(lambda: 75 if sys.stdin and sys.stdout and sys.stderr else 1)"
    )
    command = ["bash", "-c", 'exec "$@" <&- >&- 2>&-', "bash", sys.executable, "-c", code]
    assert subprocess.run(command, env={"PYTHONPATH": ":".join(sys.path)}).returncode == 75


@pytest.mark.parametrize("module", ["titan_lite.launch", "titan_lite.train"])
def test_a_limit_of_threads_is_told_in_a_line(module, tmp_path):
    program = f"""
import runpy, sys, threading

def refuse(self):
    raise RuntimeError("can't start new thread")

threading.Thread.start = refuse
sys.argv = ["program", "debug_model", "--job.dump_folder", {str(tmp_path)!r}]
runpy.run_module({module!r}, run_name="__main__")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == FAILED
    assert ended.stderr.startswith("error: no further thread can be started: raise the limit")
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "noun"),
    [
        (RuntimeError("can't start new thread"), "thread"),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "process"),
        (RuntimeError("another"), ""),
        (OSError(errno.ENOENT, "No such file or directory"), ""),
    ],
)
def test_limits_of_threads_and_processes(error, noun):
    assert describe_limit(error).startswith(f"no further {noun} can be started" if noun else "")
    assert bool(describe_limit(error)) == bool(noun)


def test_a_limit_is_known_from_what_it_led_to():
    error = RuntimeError("cannot join thread before it is started")
    error.__context__ = RuntimeError("can't start new thread")
    assert describe_limit(error).startswith("no further thread can be started")


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError("a key is wrong"), WRONG_INPUT), (MachineError("a server is away"), FAILED)],
)
def test_a_rank_ends_with_the_code_of_its_error(error, code, capsys, monkeypatch):
    def fail(*_):
        raise error

    monkeypatch.setattr(train, "load_config", fail)
    assert train.main(["debug_model"]) == code
    assert capsys.readouterr().err == f"error: {error}\n"
