"""A command's exit codes, and the line that each of its ends is told in."""

import os
import signal
import subprocess
import sys

import pytest
from tiny import ROOT

from titan_lite.cli import Parser, command
from titan_lite.config import ConfigError
from titan_lite.config.errors import MachineError


def raising(error):
    def main(arguments):
        raise error

    return command(gone=7)(main)


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (ConfigError("a key is wrong"), 2, "error: a key is wrong\n"),
        (MachineError("the disk is full"), 1, "error: the disk is full\n"),
        (MachineError("http://me:SECRET@host is away"), 1, "error: http://***@host is away\n"),
        (KeyboardInterrupt(), 130, "\n"),
    ],
)
def test_what_ends_a_command_is_a_line_and_an_exit_code(error, code, told, capsys):
    assert raising(error)([]) == code
    assert capsys.readouterr() == ("", told)


def test_a_bug_is_no_exit_code():
    with pytest.raises(ZeroDivisionError):
        raising(ZeroDivisionError())([])


def test_a_reader_that_has_gone_is_no_error(capfd):
    assert raising(BrokenPipeError())([]) == 7
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("given", "code"), [(None, 0), (0, 0), (1, 1)])
def test_the_exit_code_is_that_of_the_function(given, code):
    assert command()(lambda arguments: given)([]) == code


def test_help_is_the_docstring_and_the_options(capsys):
    parser = Parser("Does one thing.\n\n    an example")
    parser.add_argument("--steps", type=int, help="how many")
    for arguments, code in ((["--help"], 0), ([], 2)):
        with pytest.raises(SystemExit) as ended:
            parser.parse_args(arguments)
        assert ended.value.code == code
        out = capsys.readouterr().out
        assert out.startswith("Does one thing.\n\n    an example\n")
        assert "how many" in out
    assert Parser("", needs_arguments=False).parse_args([]) is not None
    with pytest.raises(ConfigError, match="invalid int value: 'few'"):
        parser.parse_args(["--steps", "few"])


TOOL = """
import os, signal, sys
from titan_lite.__main__ import own_process
own_process()
try:
    for name in sys.argv[1:]:
        os.kill(os.getpid(), getattr(signal, name))
        print("goes on after", name)
except KeyboardInterrupt:
    print("tidies up after", name)
"""


@pytest.mark.parametrize(
    ("names", "is_ignored", "said"),
    [
        (["SIGTERM"], False, "tidies up after SIGTERM"),
        (["SIGHUP"], False, "tidies up after SIGHUP"),
        (["SIGHUP", "SIGTERM"], True, "goes on after SIGHUP\ntidies up after SIGTERM"),
    ],
)
def test_a_tool_tidies_up_where_it_is_stopped_and_not_where_the_signal_is_ignored(
    names, is_ignored, said
):
    def ignore():  # as nohup does
        signal.signal(signal.SIGHUP, signal.SIG_IGN if is_ignored else signal.SIG_DFL)

    tool = subprocess.run(
        [sys.executable, "-c", TOOL, *names],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=ignore,
        capture_output=True,
        text=True,
    )
    assert (tool.returncode, tool.stdout.strip()) == (0, said)


FORKING_TOOL = """
import os, signal, sys, time
from titan_lite.__main__ import own_process
own_process()

class Interrupted:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

try:
    if sys.argv[1] == "fork":
        os.register_at_fork(after_in_parent=lambda: signal.raise_signal(signal.SIGINT))
        if os.fork() == 0:
            os._exit(0)
    else:
        Interrupted()
    time.sleep(300)  # waits in one call, which the signal ends
    print("goes on")
except KeyboardInterrupt:
    print("tidies up")
"""


@pytest.mark.parametrize("place", ["fork", "del"])
def test_ctrl_c_is_not_lost_where_python_ignores_exceptions(place):
    tool = subprocess.run(
        [sys.executable, "-c", FORKING_TOOL, place],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (tool.returncode, tool.stdout, tool.stderr) == (0, "tidies up\n", "")
