"""Check a recipe, print it resolved, or print the help of a run, without torch.

    python -m titan_lite recipe RECIPE [--section.key value ...] [--print-config]
    python -m titan_lite recipe --world-size 8 RECIPE ...      # also checks it for 8 ranks

With --world-size, the layout, the tokenizer, the data and LOG_RANK are checked too. Exit code 0:
the recipe can be read; 2: something in it or on the command line is wrong; 1: the machine or the
network has failed.
"""

import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

from titan_lite import rules
from titan_lite.cli import command
from titan_lite.config import SECTIONS, Config, ConfigError, read_config, to_toml
from titan_lite.config.help import WIDTH, section_help
from titan_lite.config.nearest import nearest_section
from titan_lite.logging import log_ranks

# a text that ./run_train.sh prints without an installation, too
HELP = (Path(__file__).parent / "help.txt").read_text(encoding="utf-8")
HELP += "\n" + textwrap.fill(f"Sections: {', '.join(SECTIONS)}.", WIDTH) + "\n"


def help_text(arguments: Sequence[str] = ()) -> str:
    """Return the usage of a run and every key, or the keys of the section that follows --help.

    Raises ConfigError for an unknown section.
    """
    section = _section_after_help(arguments)
    if section:
        return "\n".join(section_help(section))
    sections = ("\n".join(section_help(name)) for name in SECTIONS)
    return "\n\n".join((HELP.rstrip(), *sections))


def _section_after_help(arguments: Sequence[str]) -> str:
    """Return "training" for --help training, "" without a section. Raises ConfigError."""
    flag = "--help" if "--help" in arguments else "-h"
    if flag not in arguments:
        return ""
    following = arguments[arguments.index(flag) + 1 :]
    if not following or following[0].startswith("-"):
        return ""
    section = following[0].strip("[]")
    if section not in SECTIONS:
        raise ConfigError(
            f"command line: --help {section}: no such section{nearest_section(section)}"
        )
    return section


def _world_size(arguments: Sequence[str]) -> tuple[int, Sequence[str]]:
    """Return (number of ranks, or 0 if not given; the recipe and its options).

    Raises ConfigError.
    """
    if arguments[0] != "--world-size":
        return 0, arguments
    if len(arguments) < 3 or not re.fullmatch("[1-9][0-9]{0,8}", arguments[1]):
        raise ConfigError(
            f"command line: {' '.join(arguments[:2])}: use --world-size N RECIPE, with N at least 1"
        )
    return int(arguments[1]), arguments[2:]


def check_world(config: Config, world_size: int | None, wrong: Sequence[str] = ()) -> None:
    """Check LOG_RANK, and the recipe, its tokenizer and its data for so many ranks; None: the
    number is not known.

    Raises ConfigError with all mistakes, after those in `wrong`.
    """
    try:
        if world_size:
            log_ranks(world_size)
    except ValueError as error:
        wrong = [*wrong, str(error)]
    rules.check_all(config, world_size, wrong)


@command()
def main(arguments: Sequence[str]) -> int:
    """Check a recipe, print it resolved, or print the help."""
    if not arguments or "--help" in arguments or "-h" in arguments:
        print(help_text(arguments) if arguments else HELP.rstrip())
        return 0 if arguments else 2
    world_size, arguments = _world_size(arguments)
    options = [word for word in arguments[1:] if word != "--print-config"]
    config, wrong = read_config(arguments[0], options)
    if world_size:
        check_world(config, world_size, wrong)
    else:
        rules.check_keys(config, wrong)
    if "--print-config" in arguments:
        print(to_toml(config, origins=True))
    return 0
