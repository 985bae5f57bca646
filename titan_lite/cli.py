"""Common parts of command-line programs: help, one line for an error, exit codes.

    @command()
    def main(arguments: Sequence[str]) -> None:
        options = Parser(__doc__).parse_args(arguments)
        ...

Imports no torch.
"""

import argparse
import difflib
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from titan_lite.config import ConfigError
from titan_lite.config.errors import MachineError
from titan_lite.logging import drop_pending, print_line

Program = Callable[[Sequence[str]], int]  # arguments -> exit code


class Parser(argparse.ArgumentParser):
    """A parser whose help is the module's docstring and the options."""

    def __init__(self, doc: str | None, *, needs_arguments: bool = True):
        """needs_arguments: without arguments, print the help and exit with code 2."""
        super().__init__(
            usage=argparse.SUPPRESS,
            description=doc,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.needs_arguments = needs_arguments

    def add_options_of_checkpoint(self) -> None:
        """Add what a program needs to compute with saved weights."""
        self.add_argument(
            "checkpoint",
            help="a checkpoint, a run's folder (its newest complete one), or a Hugging Face folder",
        )
        self.add_argument("--dtype", choices=("float32", "bfloat16"), help="(default: as stored)")
        self.add_argument(
            "--tokenizer",
            default="",
            metavar="FILE",
            help="in tiktoken's format, or a tokenizer.json (default: that of the weights)",
        )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # noqa: ANN401 argparse's
        if self.needs_arguments and not args:
            self.print_help()
            self.exit(2)
        return super().parse_known_args(args, namespace)

    def parse_with_overrides(
        self, arguments: Sequence[str]
    ) -> tuple[argparse.Namespace, list[str]]:
        """Return the options, and the arguments that override keys of options.recipe.

        An override is as in training: --section.key value. Raises ConfigError for an option that
        was probably meant to be one of this program's, and for an override before the recipe.
        """
        options, overrides = self.parse_known_args(list(arguments))
        for argument in overrides:
            name = argument.partition("=")[0]
            near = difflib.get_close_matches(name, self._option_string_actions, n=1, cutoff=0.8)
            if name.startswith("--") and near:
                raise ConfigError(f"unknown option {name}; did you mean {near[0]}?")
        if overrides and options.recipe:
            first = overrides[0]
            if arguments.index(options.recipe) > arguments.index(first):
                raise ConfigError(f"{first} stands before the recipe; use RECIPE {first} ...")
        return options, overrides

    def print_help(self, file: Any = None) -> None:  # noqa: ANN401 argparse's
        print(self.format_help(), end="", file=file, flush=True)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def at_least_one(text: str) -> int:
    """Return an option's value as an integer, as `type` of add_argument."""
    if text.isascii() and text.isdigit() and int(text) > 0:
        return int(text)
    message = f"{text}: use an integer at least 1, such as 8"
    if not text[:1].isdigit():
        message += "; a recipe stands before the options"
    raise argparse.ArgumentTypeError(message)


INTERRUPTED = 130  # exit code after Ctrl-C, as of a shell


def command(*, gone: int = 0) -> Callable[[Callable[[Sequence[str]], int | None]], Program]:
    """Return a decorator of `main` that prints an error as one line, and returns an exit code.

    The code is that of `main` (None: 0), 2 after a ConfigError, 130 after Ctrl-C, 1 after a
    MachineError, and `gone` if the reader of standard output, such as head, has closed the pipe.
    """

    def decorate(main: Callable[[Sequence[str]], int | None]) -> Program:
        @functools.wraps(main)
        def run(arguments: Sequence[str]) -> int:
            try:
                code = main(arguments) or 0
                sys.stdout.flush()
                return code
            except ConfigError as error:
                print_line(f"error: {error}")
                return 2
            except MachineError as error:
                print_line(f"error: {error}")
                return 1
            except BrokenPipeError:
                drop_pending(sys.stdout)
                return gone
            except KeyboardInterrupt:
                print_line("")  # ends that of ^C
                return INTERRUPTED

        return run

    return decorate
