"""A command's exit codes, and the line that each of its ends is told in."""

import pytest

from titan_lite.cli import Parser, command
from titan_lite.config import ConfigError


def raising(error):
    def main(arguments):
        raise error

    return command(gone=7)(main)


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (ConfigError("a key is wrong"), 2, "error: a key is wrong\n"),
        (KeyboardInterrupt(), 130, "\n"),
        (KeyboardInterrupt("it goes on later"), 130, "it goes on later\n"),
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
