"""The command `titan-lite`: the programs of titan_lite by name.

A recipe is a file, or the name of a shipped one.

titan-lite train debug_model --training.steps 20
titan-lite plan llama3_405b              # the same as: python -m titan_lite plan llama3_405b
"""

import runpy
import sys
from collections.abc import Sequence

from titan_lite.config import SHIPPED, ConfigError
from titan_lite.config.errors import did_you_mean
from titan_lite.tools.cli import command

PROGRAMS = {  # name: (module, purpose)
    "train": ("launch", "train a recipe on this machine's GPUs, or on CPU processes"),
    "recipe": ("tools.recipe", "check a recipe, or print it resolved"),
    "plan": ("tools.plan", "predict memory, traffic and time of a recipe, without a GPU"),
    "verify": ("tools.verify", "compare a recipe's layout with one process, on CPUs"),
    "prepare": ("tools.prepare", "tokenize documents once, for many runs"),
    "report": ("tools.report", "make a page of one run, or of several"),
    "convert": ("tools.convert", "convert weights from and to Hugging Face's format"),
    "generate": ("tools.generate", "continue a text with a run's weights"),
}


@command
def main(arguments: Sequence[str]) -> int:
    """Run a program with the arguments after its name."""
    if not arguments or arguments[0] in ("--help", "-h"):
        print(
            "usage: titan-lite PROGRAM [ARGUMENT ...]      --help after a program's name prints its"
            " arguments\n"
        )
        print(*(f"  {name:10}{purpose}" for name, (_, purpose) in PROGRAMS.items()), sep="\n")
        print(
            f"\nshipped recipes: {', '.join(sorted(path.stem for path in SHIPPED.glob('*.toml')))}"
        )
        return 0 if arguments else 2
    name = arguments[0]
    if name not in PROGRAMS:
        known = f"; use one of {', '.join(PROGRAMS)}"
        raise ConfigError(
            f"titan-lite {name}: no such program{did_you_mean(name, PROGRAMS, otherwise=known)}"
        )
    sys.argv = ["titan-lite", *arguments[1:]]
    runpy.run_module(
        f"titan_lite.{PROGRAMS[name][0]}", run_name="__main__", alter_sys=True
    )  # as python -m
    return 0


def run() -> None:
    """Entry point of the installed command."""
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    run()
