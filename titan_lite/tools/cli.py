"""Common parts of command-line programs: help, one line for an error, exit codes. Imports no torch.

@command
def main(arguments: Sequence[str]) -> None:
    options = Parser(__doc__).parse_args(arguments)
    ...
"""

import argparse
import difflib
import functools
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from titan_lite.config import ConfigError


class Parser(argparse.ArgumentParser):
    """A parser whose help is the module's docstring and the options.

    Without arguments it prints the help, with exit code 2.

    needs_arguments: False if the program itself reports missing arguments.
    """

    def __init__(self, doc: str | None, *, needs_arguments: bool = True):
        raw = argparse.RawDescriptionHelpFormatter
        super().__init__(
            usage=argparse.SUPPRESS, description=doc, formatter_class=raw, allow_abbrev=False
        )
        self.needs_arguments = needs_arguments

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self.needs_arguments and not args:
            self.print_help()
            self.exit(2)
        return super().parse_known_args(args, namespace)

    def parse_with_overrides(
        self, arguments: Sequence[str]
    ) -> tuple[argparse.Namespace, list[str]]:
        """Return the options, and those that change a key of options.recipe, as in --section.key
        value. Raises ConfigError.
        """
        options, overrides = self.parse_known_args(list(arguments))
        for word in (
            argument.partition("=")[0] for argument in overrides if argument.startswith("--")
        ):
            if near := difflib.get_close_matches(
                word, self._option_string_actions, n=1, cutoff=0.8
            ):
                raise ConfigError(f"unknown option {word}; did you mean {near[0]}?")
        if (
            overrides
            and options.recipe
            and arguments.index(options.recipe) > arguments.index(overrides[0])
        ):
            raise ConfigError(
                f"{overrides[0]} stands before the recipe; use RECIPE {overrides[0]} ..."
            )
        return options, overrides

    def print_help(self, file: Any = None) -> None:
        print(self.format_help(), end="", file=file, flush=True)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def at_least_one(text: str) -> int:
    """Return an option's value as an integer, as `type` of add_argument."""
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        order = "" if text[:1].isdigit() else "; a recipe stands before the options"
        raise argparse.ArgumentTypeError(f"{text}: use an integer at least 1, such as 8{order}")
    return int(text)


def command(
    main: Callable[[Sequence[str]], int | None], *, gone: int = 0
) -> Callable[[Sequence[str]], int]:
    """Wrap `main` to return an exit code: its own (None: 0), 2 after a ConfigError, 130 after
    Ctrl-C, with a line on stderr.

    gone: the exit code if the reader of its output, such as head, has closed the pipe.
    """

    @functools.wraps(main)
    def run(arguments: Sequence[str]) -> int:
        try:
            code = main(arguments) or 0
            sys.stdout.flush()
            return code
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        except UnicodeEncodeError as error:
            wrong = (
                f"standard output is {error.encoding}, which has no {error.object[error.start]!a}"
            )
            print(f"error: {wrong}; use PYTHONIOENCODING=utf-8", file=sys.stderr)
            return 2
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return gone
        except KeyboardInterrupt as stopped:
            print(*stopped.args, file=sys.stderr)
            return 130

    return run


def end_with_parent() -> None:
    """Run in a worker of a program's pool: ignore Ctrl-C and SIGTERM, which the program handles,
    and end with the program.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end() -> None:
        """Wait for the parent itself, since siblings keep the pipe to it open."""
        parent.join()
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()
