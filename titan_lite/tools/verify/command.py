"""Verify that a parallel layout computes the same as one process, at any number of ranks.

    titan-lite verify RECIPE [--world-size N] [--section.key value ...]
    titan-lite verify RECIPE --processes [--layouts LAYOUT ...] [--world-size N] [--steps N]

    LAYOUT: recipe (default), all, or degrees such as dp_shard=2,tp=2

By default nothing is started: the graphs of a small model with the recipe's own degrees are traced
after all passes, and are evaluated in float64 for all ranks, in this process. The loss and every
gradient on every rank are compared with the plain model. What graphs do not have is listed.

With --processes, a scaled-down proxy of the recipe is trained on up to eight CPU processes and in
one: with optimizer, loader, float8 matmuls, pipeline transfers and eager mode, at degrees of 2.

Exit code 0: all layouts agree; 1: one does not; 2: wrong recipe or command line.
"""

import argparse
import resource
from collections.abc import Sequence

from titan_lite import rules
from titan_lite.cli import Parser, at_least_one, command
from titan_lite.config import Config, ConfigError, read_config
from titan_lite.config.errors import shown
from titan_lite.config.phases import describe_phase
from titan_lite.models.shapes import shape_of, shape_words
from titan_lite.recipe import own_ranks
from titan_lite.tools.plan.command import find_hardware, lay_out
from titan_lite.tools.verify.check import Verdict, check_layout
from titan_lite.tools.verify.processes import verify
from titan_lite.tools.verify.proxy import (
    Degrees,
    every_layout,
    layout_of,
    name_of,
    parse_layout,
    ranks_of_degrees,
)


@command(gone=1)  # 0 would say that all layouts agree
def main(arguments: Sequence[str]) -> int:
    parser = build_parser()
    options, overrides = parser.parse_with_overrides(arguments)
    config, wrong = read_config(options.recipe, overrides)
    rules.check_keys(config, wrong)
    for name in ("layouts", "steps"):
        if getattr(options, name) and not options.processes:
            raise ConfigError(
                f"--{name} has no effect without --processes: graphs are those of the recipe's own"
                " degrees; give these as --parallelism keys, or add --processes"
            )
    agree = []
    for phase in config.phases:
        if len(config.phases) > 1:
            print(describe_phase(phase), flush=True)
        agree.append(agrees(phase.alone(), options))
    return 0 if all(agree) else 1


def agrees(config: Config, options: argparse.Namespace) -> bool:
    """Verify a recipe without phases, print the verdict, and return it."""
    if options.processes:
        return verify(config, layouts_of(config, options), steps=options.steps or 5)
    world_size = options.world_size or own_ranks(config, options.recipe)
    world_size = world_size or ranks_of_degrees(config)
    memory = find_hardware(None, config).memory * 2**30  # whether weights are gathered once a step
    verdict = check_layout(config, lay_out(config, world_size, memory))
    print("\n".join(verdict_lines(config, verdict)), flush=True)
    return verdict.agrees


def build_parser() -> Parser:
    parser = Parser(__doc__)
    parser.add_argument(
        "recipe", help="a TOML file; options of the form --section.key value change it"
    )
    parser.add_argument(
        "--world-size",
        type=at_least_one,
        metavar="N",
        help="ranks (default: N of the recipe's line `# world_size: N`, or those of its degrees,"
        " with 4 for data_parallel_shard_degree = -1)",
    )
    parser.add_argument(
        "--processes", action="store_true", help="train a proxy on real processes instead"
    )
    parser.add_argument(
        "--layouts",
        nargs="+",
        metavar="LAYOUT",
        help="what to verify with --processes (default: recipe)",
    )
    parser.add_argument(
        "--steps", type=at_least_one, metavar="N", help="steps with --processes (default: 5)"
    )
    return parser


def layouts_of(config: Config, options: argparse.Namespace) -> list[Degrees]:
    """Return the degrees of the layouts that are trained. Raises ConfigError."""
    names = options.layouts or ["recipe"]
    if options.world_size and "recipe" not in names:
        raise ConfigError(
            f"--world-size {options.world_size} has no effect with --layouts"
            f" {' '.join(names)}: it is for --layouts recipe; leave it out"
        )
    layouts: list[Degrees] = []
    has_experts = shape_of(config.model).n_experts > 0
    for name in names:
        if name == "all":
            layouts += every_layout(has_experts)
        elif name == "recipe":
            layouts.append(layout_of(config, options.world_size))
        else:
            layouts.append(parse_layout(name))
            if layouts[-1]["ep"] > 1 and not has_experts:
                raise ConfigError(
                    f"--layouts {name}: ep = {layouts[-1]['ep']} has no effect with model.name ="
                    f" {shown(config.model.name)}, a dense family; leave it out"
                )
    return layouts


def verdict_lines(config: Config, verdict: Verdict) -> list[str]:
    """Return what a check has found, in words."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    if verdict.agrees:
        result = (
            f"equal to one process: the loss and {verdict.parameters} gradients on every rank; the"
            f" largest relative error is {verdict.error:.1e}"
        )
    else:
        result = "DIFFERS from one process:"
    shown_differences = verdict.differences[:SHOWN]
    more = len(verdict.differences) - len(shown_differences)
    return [
        f"{shape_words(config.model)} on {verdict.ranks:,} ranks: {name_of(verdict.degrees)}",
        f"checked by evaluation at {verdict.ranks:,} ranks, in float64, of the graphs of this"
        f" recipe at small sizes, after all passes: {', '.join(verdict.stages)}",
        result,
        *(f"  {difference}" for difference in shown_differences),
        *([f"  and {more} more"] if more else []),
        *([f"first wrong value: {verdict.first_wrong}"] if verdict.first_wrong else []),
        *(f"not covered: {what}" for what in verdict.not_covered),
        f"{verdict.traces} ranks traced, {verdict.seconds:.0f} s, {peak:.1f} GiB",
    ]


SHOWN = 6  # differences
