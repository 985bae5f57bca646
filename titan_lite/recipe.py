"""Check a recipe, print it resolved, or print the help of a run, without torch.

    python -m titan_lite recipe RECIPE [--world-size N] [--print-config] [--section.key value ...]

Without --world-size: its keys, and its layout on the ranks that it is for, if it says so. With it:
keys, the layout on N ranks, tokenizer, data and LOG_RANK. Exit code 0: what was checked is right;
2: something in the recipe or on the command line is wrong; 1: the machine or the network has
failed.
"""

import math
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from titan_lite import rules
from titan_lite.cli import Parser, at_least_one, command
from titan_lite.config import (
    SECTIONS,
    Config,
    ConfigError,
    find_recipe,
    read_config,
    to_toml,
    world_size_of,
)
from titan_lite.config.help import WIDTH, section_help
from titan_lite.config.nearest import nearest_section
from titan_lite.distributed.layout import DEGREES, resolve_degrees
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
    options, overrides = build_parser().parse_with_overrides(arguments)
    config, wrong = read_config(options.recipe, overrides)
    if options.world_size:
        check_world(config, options.world_size, wrong)
    else:
        rules.check_keys(config, wrong)
    if options.print_config:
        print(to_toml(config, origins=True))
    elif options.world_size:
        print(
            f"{options.recipe}: right at world size {options.world_size}, with tokenizer and data"
        )
    else:
        print(f"{options.recipe}: {check_own_layout(config, options.recipe)}")
    return 0


def check_own_layout(config: Config, recipe: str) -> str:
    """Check the layout on the ranks that a recipe is for, and return what was checked, in words.

    Raises ConfigError.
    """
    ranks = own_ranks(config, recipe)
    if not ranks:
        return "its keys are right; --world-size N checks its layout, tokenizer and data, too"
    rules.check_keys(config, world_size=ranks)
    return f"right at world size {ranks}; --world-size {ranks} checks its tokenizer and data, too"


def own_ranks(config: Config, recipe: str) -> int:
    """Return the number of ranks that a recipe is for: of its line `# world_size: N` if its degrees
    make up so many, or the product of these. 0: it says none.
    """
    with suppress(ConfigError):
        ranks = world_size_of(find_recipe(Path(recipe).expanduser()))
        resolve_degrees(config.parallelism, ranks)
        return ranks
    degrees = [getattr(config.parallelism, key) for key in DEGREES.values()]
    return 0 if -1 in degrees else math.prod(degrees)


def build_parser() -> Parser:
    parser = Parser(__doc__)
    parser.add_argument("recipe")
    parser.add_argument("--world-size", type=at_least_one)
    parser.add_argument("--print-config", action="store_true")
    return parser
