"""Predict the cost of a recipe without a GPU: step time, tokens per second, memory, and exposed
communication.

    python -m titan_lite plan train_configs/llama3_405b.toml
    python -m titan_lite plan RECIPE --world-size 128 --hardware h200 --training.local_batch_size 1
    python -m titan_lite plan RECIPE --sweep parallelism.tensor_parallel_degree=2,4,8
    python -m titan_lite plan RECIPE --world-size 64 --search   # the best layout that fits
    python -m titan_lite plan RECIPE --tokens 1T --price-per-gpu-hour 2.5     # days and money
    python -m titan_lite plan RECIPE --trace plan.json      # the step's timeline, for Perfetto
    python -m titan_lite plan RECIPE --compare outputs/llama3_8b  # beside a run that has ended

The real model is parallelized, compiled and scheduled by the code that trains it, on fake tensors
with a fake process group. A cost model of a machine (cost/machine.py) gives the time. Nothing runs,
no weights are allocated, no tokenizer or data is read, and no GPU or network is needed. Exit code
0: planned, whether it fits or not (--json has "fits"); 2: an error.
"""

import argparse
import dataclasses
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from titan_lite import rules
from titan_lite.cli import Parser, at_least_one, command
from titan_lite.config import (
    Config,
    ConfigError,
    FaultTolerance,
    find_recipe,
    load_config,
    read_config,
    world_size_of,
)
from titan_lite.config.batch_sizes import number_of_tokens
from titan_lite.config.load import option
from titan_lite.config.phases import describe_phase
from titan_lite.distributed.layout import Layout
from titan_lite.feature import features_of
from titan_lite.logging import print_line
from titan_lite.rules.mistakes import raise_mistakes

if TYPE_CHECKING:  # these import torch, which is slow: a wrong recipe fails before
    from titan_lite.cost.machine import Machine
    from titan_lite.metrics.run_files import Window
    from titan_lite.tools.plan.plan import Plan
    from titan_lite.tools.plan.summary import Budget
    from titan_lite.tools.plan.trace import PlannedLayout

SEARCHED = 12  # plans of a search by default
LEAST_NUMBER = math.ulp(0.0)  # above 0


@command()
def main(arguments: Sequence[str]) -> None:
    options, overrides = build_parser().parse_with_overrides(arguments)
    print(answer(options, overrides))


def build_parser() -> Parser:
    parser = Parser(__doc__, needs_arguments=False)
    parser.add_argument(
        "recipe", nargs="?", help="a TOML file; options of the form --section.key value change it"
    )
    parser.add_argument(
        "--world-size",
        type=at_least_one,
        help="ranks (default: N of the line `# world_size: N` of the recipe, or of one it extends)",
    )
    parser.add_argument(
        "--hardware",
        help=(
            "a profile such as h100, or the path of a .toml file; default: compile.machine, or h100"
        ),
    )
    parser.add_argument(
        "--tokens",
        type=number(1, "above 0, such as 15e12 or 15T", parse=number_of_tokens),
        default=0.0,
        help="a token budget, such as 15T, to print its days and GPU-hours",
    )
    parser.add_argument(
        "--price-per-gpu-hour",
        type=number(LEAST_NUMBER, "above 0, such as 2.5"),
        default=0.0,
        metavar="PRICE",
        help="the price of a GPU-hour, such as 2.5, to print that of the training",
    )
    parser.add_argument(
        "--expert-imbalance",
        type=number(1, "from 1 on, such as 1.2"),
        default=1.0,
        metavar="FACTOR",
        help=(
            "with expert parallelism: tokens of the experts of the rank that has most, relative to"
            " the mean (default 1: equally loaded)"
        ),
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="trace every block, instead of extrapolating from two depths",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="JSON",
        help="write the step, and one microbatch's graphs, for Perfetto and chrome://tracing",
    )
    answers = parser.add_mutually_exclusive_group()
    answers.add_argument("--json", action="store_true", help="print JSON")
    answers.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="SECTION.KEY=A,B,C",
        help="plan a grid (repeatable), and rank it",
    )
    answers.add_argument(
        "--search",
        type=at_least_one,
        nargs="?",
        const=SEARCHED,
        metavar="PLANS",
        help=(
            "find the fastest degrees, local batch size, checkpointing and schedule for this number"
            " of ranks and tokens per step; PLANS: number of layouts that fit to plan, the fastest"
            f" by formula first (default {SEARCHED})"
        ),
    )
    answers.add_argument(
        "--compare",
        type=Path,
        metavar="RUN_FOLDER",
        help="print step time, tokens per second and memory beside those of a run of this recipe",
    )
    return parser


def number(
    least: float, instead: str, parse: Callable[[str], float] = float
) -> Callable[[str], float]:
    """Return a `type` of add_argument: a number of at least `least`. instead: what an error says to
    use.
    """

    def checked(text: str) -> float:
        with suppress(ValueError, OverflowError):
            value = parse(text)
            if least <= value < math.inf:
                return value
        raise argparse.ArgumentTypeError(f"{text}: use a number {instead}")

    return checked


def refuse_options_without_effect(options: argparse.Namespace) -> None:
    """Raise ConfigError for an option without effect beside another one."""
    prints_no_plan = {
        "sweep": bool(options.sweep),
        "search": options.search is not None,
        "compare": options.compare is not None,
    }
    overruled_by = {
        "trace": prints_no_plan,
        "tokens": {**prints_no_plan, "json": options.json},
        "price_per_gpu_hour": {**prints_no_plan, "json": options.json},
        "world_size": {"compare": options.compare is not None},
    }
    for name, others in overruled_by.items():
        given = [other for other, is_given in others.items() if is_given]
        if given and getattr(options, name):
            raise ConfigError(
                f"--{name.replace('_', '-')} has no effect with --{given[0]}; leave one of them out"
            )


def check_imbalance(imbalance: float, config: Config) -> None:
    """Raise ConfigError for an imbalance of experts that no rank can have."""
    if imbalance > 1 and config.parallelism.expert_parallel_degree == 1:
        raise ConfigError(
            f"--expert-imbalance {imbalance:g} has no effect with"
            " parallelism.expert_parallel_degree = 1, where a rank computes all experts of its"
            " tokens; leave it out"
        )


def check_target(path: Path | None) -> None:
    """Raise ConfigError if --trace cannot be written since its folder does not exist."""
    if path is None:
        return
    folder = path.resolve().parent
    if not folder.is_dir():
        raise ConfigError(f"--trace {path}: there is no folder {folder}; use one that exists")


@dataclass(frozen=True)
class Subject:
    """The subject of a plan: a recipe, a number of ranks, a machine."""

    recipe: str
    overrides: list[str]  # of the command line
    config: Config
    world_size: int
    machine: "Machine"
    expert_imbalance: float = 1.0

    def lay_out(self, change: dict[str, str]) -> "PlannedLayout":
        """Return the layout of the changed recipe. Raises ConfigError if it cannot run."""
        config = self.config
        if change:
            keys = dict(change)
            for feature in features_of(self.config):
                keys |= feature.turned_off_by(change)
            changes = [option(key, value) for key, value in keys.items()]
            config = load_config(self.recipe, [*self.overrides, *changes])
        for feature in features_of(config):
            raise_mistakes(config, feature.mistakes_on(config, self.machine))
        layout = lay_out(config, self.world_size, self.machine.memory * 2**30)
        return dataclasses.replace(layout, expert_imbalance=self.expert_imbalance)


def answer(options: argparse.Namespace, overrides: list[str]) -> str:
    """Return the text that the options ask for."""
    refuse_options_without_effect(options)
    check_target(options.trace)
    if not options.recipe:
        raise ConfigError("no recipe; use one such as train_configs/llama3_8b.toml")
    config, wrong = read_config(options.recipe, overrides)
    rules.check_keys(config, wrong)
    if len(config.phases) > 1:
        refuse_with_phases(options)
    groups = config.fault_tolerance.replica_groups
    windows: list[Window] = []
    if options.compare:
        from titan_lite.tools.plan.compare import ranks_of, read_windows

        windows = read_windows(options.compare, config)
        world_size = ranks_of(windows)
    else:
        world_size = options.world_size or world_size_of(find_recipe(Path(options.recipe)))
        world_size *= groups
    note = ""
    if groups > 1:
        more, note = as_one_world(config, world_size)
        overrides = [*overrides, *more]
        config = load_config(options.recipe, overrides)
    machine = find_hardware(options.hardware, config)
    check_imbalance(options.expert_imbalance, config)
    subject = Subject(
        options.recipe, overrides, config, world_size, machine, options.expert_imbalance
    )
    if options.search is not None:
        lines = search_lines(subject, options.search, options.full)
    elif options.sweep:
        lines = sweep_lines(subject, options.sweep, options.full)
    elif options.compare:
        lines = comparison_lines(subject, windows, options.full)
    elif len(config.phases) > 1:
        lines = phase_lines(subject, options)
    else:
        lines = plan_lines(subject, options)
    if note and options.json:  # the output has the object alone
        print_line(note)
        note = ""
    return "\n".join([*filter(None, [note]), *lines])


def as_one_world(config: Config, world_size: int) -> tuple[list[str], str]:
    """Return the options that make groups that may be lost to replicas of one world, and what a
    plan of it leaves out, in a line.

    Each group takes as many local batches of a step as the busiest one. world_size: ranks of all
    groups. Raises ConfigError if a group cannot run on its ranks.
    """
    groups = config.fault_tolerance.replica_groups
    options = [option(f"fault_tolerance.{name}", str(value)) for name, value in FaultTolerance()]
    options.append(option("parallelism.data_parallel_replicate_degree", str(groups)))
    layout = Layout.from_config(config, world_size // groups)
    sequences = layout.sequences_per_step
    planned = layout.shared_evenly(sequences)
    if config.training.global_batch_size != -1:
        options.append(option("training.global_batch_size", str(planned)))
    note = (
        f"planned as one world of {world_size} ranks: the sum over {groups} replica groups"
        " (fault_tolerance.replica_groups) overlaps with backward in a plan, and comes after it in"
        " a run"
    )
    if planned != sequences:
        note += (
            f"; a step of the run has {sequences} sequences, which {groups} groups cannot share"
            f" evenly, and takes as long as the {planned} of the plan: its tokens, a step or a"
            f" second, are {sequences / planned:.0%} of the planned ones"
        )
    return options, note


def search_lines(subject: Subject, count: int, full: bool) -> list[str]:
    """Return the lines of a search. Raises ConfigError if no layout shares the tokens of a step."""
    from titan_lite.tools.plan.search import Search, space

    config = subject.config
    ranks = subject.world_size
    sequences, origin = sequences_per_step(subject)
    changes = list(space(config, ranks, subject.machine, sequences))
    if not changes:
        raise ConfigError(
            f"--search: no layout of {ranks} ranks shares {sequences:,} sequences per step"
            f" ({origin}); use --training.global_batch_size=N, such as {ranks * 8}"
        )
    tokens = sequences * config.training.seq_len
    title = f"{ranks} ranks; {sequences:,} sequences per step = {tokens:,} tokens ({origin})"
    search = Search(subject.lay_out, subject.machine, full)
    search.run(changes, count)
    return [title, *search.lines(config)]


def sequences_per_step(subject: Subject) -> tuple[int, str]:
    """Return the sequences of a step, which all layouts of a search share, and where they are from.

    The recipe's own layout need not run on these ranks: then it has the sequences of the ranks that
    it is for. Raises ConfigError.
    """
    sequences = subject.config.training.global_batch_size
    if sequences != -1:
        return sequences, "training.global_batch_size"
    rank_counts = [subject.world_size]
    with suppress(ConfigError):
        rank_counts.append(world_size_of(find_recipe(Path(subject.recipe))))
    for ranks in rank_counts:
        with suppress(ConfigError):
            layout = Layout.from_config(subject.config, ranks)  # not checked by rules
            return layout.sequences_per_step, f"the recipe's, on {ranks} ranks"
    raise ConfigError(
        "--search needs the tokens of a step, and the degrees of the recipe have another product"
        f" than {subject.world_size} ranks; use --training.global_batch_size=N"
    )


def sweep_lines(subject: Subject, sweeps: list[str], full: bool) -> list[str]:
    """Return the table of a sweep."""
    from titan_lite.tools.plan.changes import grid, plan_changes, ranked, table

    changes = grid(sweeps)
    wrong: list[str] = []
    for key, value in dict.fromkeys(pair for change in changes for pair in change.items()):
        wrong += read_config(subject.recipe, [*subject.overrides, option(key, value)])[1]
    if wrong:
        raise ConfigError(*dict.fromkeys(wrong))
    rows = plan_changes(subject.lay_out, changes, subject.machine, full)
    return table(ranked(rows))


def comparison_lines(subject: Subject, windows: "list[Window]", full: bool) -> list[str]:
    from titan_lite.tools.plan.compare import describe_comparison
    from titan_lite.tools.plan.plan import make_plan

    plan = make_plan(subject.lay_out({}), subject.machine, full)
    return describe_comparison(plan, windows)


def plan_lines(subject: Subject, options: argparse.Namespace) -> list[str]:
    """Return the plan of the recipe, and write its trace."""
    from titan_lite.tools.plan.plan import make_plan
    from titan_lite.tools.plan.spans import write_plan_trace
    from titan_lite.tools.plan.summary import as_json, describe

    plan = make_plan(subject.lay_out({}), subject.machine, options.full)
    if options.trace:
        write_plan_trace(plan, options.trace)
    if options.json:
        return [as_json(plan)]
    return describe(plan, budget_of(plan, options))


def refuse_with_phases(options: argparse.Namespace) -> None:
    """Raise ConfigError for an option that plans one recipe."""
    for name in ("sweep", "search", "compare", "trace", "json", "tokens"):
        if getattr(options, name):
            raise ConfigError(
                f"--{name} is for one recipe, and {options.recipe} has [[phases]]; use the recipe"
                " of a phase, without that table"
            )


def phase_lines(subject: Subject, options: argparse.Namespace) -> list[str]:
    """Return a line on each phase of the recipe, and one on their sum."""
    from titan_lite.tools.plan.plan import make_plan
    from titan_lite.tools.plan.summary import PlannedPhase, describe_phases

    planned = []
    for phase in subject.config.phases:
        alone = dataclasses.replace(subject, config=phase.alone())
        plan = make_plan(alone.lay_out({}), subject.machine, options.full)
        planned.append(PlannedPhase(describe_phase(phase), phase.phase, plan))
    return describe_phases(planned, options.price_per_gpu_hour)


def budget_of(plan: "Plan", options: argparse.Namespace) -> "Budget":
    """Return what the options ask for. The time that failures cost is told beside a number of
    tokens or a price, of a recipe that saves.
    """
    from titan_lite.tools.plan.goodput import goodput_of
    from titan_lite.tools.plan.summary import Budget

    goodput = 1.0
    if plan.layout.config.checkpoint.enable and (options.tokens or options.price_per_gpu_hour):
        goodput = goodput_of(plan)
    return Budget(options.tokens, options.price_per_gpu_hour, goodput)


def lay_out(config: Config, world_size: int, memory: float = math.inf) -> "PlannedLayout":
    """Return the layout of a recipe on devices of `memory` bytes.

    Raises ConfigError if it cannot run or be planned.
    """
    layout = Layout.from_config(config, world_size, device_memory=memory)
    rules.check(config, layout)  # before torch is imported

    from titan_lite.tools.plan.trace import PlannedLayout

    return PlannedLayout(**vars(layout), config=config)


def find_hardware(hardware: str | None, config: Config) -> "Machine":
    """Return the profile of --hardware, in upper or lower case, or that of a file.

    By default compile.machine, or H100.
    """
    from titan_lite.cost.profiles import PROFILES, load_machine

    name = hardware or config.compile.machine or "h100"
    written = f'compile.machine = "{config.compile.machine}"'
    if hardware:
        written = f"--hardware {hardware}"
    profiles = {profile.casefold(): profile for profile in PROFILES}
    return load_machine(profiles.get(name.casefold(), name), written)
