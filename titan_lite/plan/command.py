"""What a recipe will cost, before anyone rents a GPU: step time, tokens a second, memory, and what waits for what.

    python -m titan_lite.plan train_configs/llama3_405b.toml
    python -m titan_lite.plan train_configs/llama3_8b.toml --world-size 128 --hardware h200 --set training.local_batch_size=1
    python -m titan_lite.plan train_configs/llama3_70b.toml --changes           # and what is one change away: minutes
    python -m titan_lite.plan train_configs/llama3_70b.toml --sweep parallelism.tensor_parallel_degree=2,4,8
    python -m titan_lite.plan train_configs/llama3_8b.toml --world-size 64 --search     # the best layout that fits: minutes
    python -m titan_lite.plan train_configs/llama3_8b.toml --picture plan.png --trace plan.json
    python -m titan_lite.plan --calibrate outputs/llama3_8b      # a real run's machine, as a profile for --hardware

The real model is made parallel, compiled and scheduled by the code that trains it, on fake tensors in a world that is not there,
and priced on a machine that is numbers (compiler/hardware.py). Nothing runs, no weight is made, no tokenizer or data is looked
at, and no GPU or network is needed. Exit code 0: planned, whether it fits or not (--json says "fits"); 2: something is wrong.
"""

import argparse
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from titan_lite.config import Config, ConfigError
from titan_lite.config.recipe import load_config
from titan_lite.logging import Parser, show

SEARCHED = 12  # plans of a search, where the command line does not say


def main(arguments: list[str]) -> int:
    parser = Parser(
        prog="python -m titan_lite.plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("recipe", nargs="?", help="a TOML file")
    parser.add_argument("--world-size", type=int, help="ranks; without, as the recipe's line `# world_size: N` says")
    parser.add_argument(
        "--hardware", help="a profile such as h100, or the path of a .toml file; default: compile.machine, or h100"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="any key of the recipe, repeatable"
    )
    parser.add_argument("--tokens", type=float, default=0.0, help="a token budget, such as 15e12, to tell days and GPU-hours of")
    parser.add_argument("--full", action="store_true", help="trace every block, instead of two depths and a line through them")
    parser.add_argument("--picture", type=Path, metavar="PNG", help="draw the step, and one microbatch's graphs")
    parser.add_argument("--trace", type=Path, metavar="JSON", help="the same for Perfetto and chrome://tracing")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--json", action="store_true", help="for machines")
    what.add_argument(
        "--changes", action="store_true", help="plan what is one change away, too, and tell the three that help most"
    )
    what.add_argument(
        "--sweep", action="append", default=[], metavar="SECTION.KEY=A,B,C", help="plan a grid (repeatable), and rank it"
    )
    what.add_argument(
        "--search",
        type=int,
        nargs="?",
        const=SEARCHED,
        metavar="PLANS",
        help="find the degrees, local batch size, checkpointing, schedule and bucketing that are fastest on so many ranks, at "
        f"as many tokens a step; PLANS: how many of them to plan, of all that are priced by formula (default {SEARCHED})",
    )
    what.add_argument(
        "--calibrate", type=Path, metavar="RUN_FOLDER", help="fit the machine's profile to what a run has measured, and write it"
    )
    try:
        show(answer(parser.parse_args(arguments)))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def answer(options: argparse.Namespace) -> str:
    drawn = [name for name in ("picture", "trace") if getattr(options, name)]
    if drawn and (options.sweep or options.search is not None or options.calibrate):
        raise ConfigError(f"--{drawn[0]} shows one plan; without --sweep, --search and --calibrate it would work")
    for name in drawn:
        folder = getattr(options, name).resolve().parent
        if not folder.is_dir():
            raise ConfigError(f"--{name} {getattr(options, name)}: there is no folder {folder}; one that exists would work")
    if options.search is not None and options.search < 1:
        raise ConfigError(f"--search {options.search} plans nothing; {SEARCHED} would work")
    if options.calibrate:
        if options.recipe:
            raise ConfigError(
                "--calibrate takes the recipe of its run, RUN_FOLDER/config.toml; without one before it, it would work"
            )
        from titan_lite.plan.calibrate import calibrate_run

        return "\n".join(calibrate_run(options.calibrate, lay_out, options.hardware and find_hardware(options.hardware)))
    if not options.recipe:
        raise ConfigError("no recipe; train_configs/llama3_8b.toml would work")
    return plan_recipe(options)


class Recipe:
    """A recipe with what the command line sets, in a world; and changes of it."""

    def __init__(self, options: argparse.Namespace):
        self.path, self.overrides = options.recipe, [f"--{override}" for override in options.set]
        self.config, _ = load_config(self.path, self.overrides)
        self.world_size = world_size_of(Path(self.path)) if options.world_size is None else options.world_size
        if self.world_size < 1:
            raise ConfigError(f"--world-size {self.world_size} is no number of ranks; 8 would work")

    def lay_out(self, change: dict[str, str] | None = None) -> Any:
        changes = [f"--{key}={value}" for key, value in (change or {}).items()]
        config = load_config(self.path, [*self.overrides, *changes])[0] if changes else self.config
        return lay_out(config, self.world_size)


def plan_recipe(options: argparse.Namespace) -> str:
    recipe = Recipe(options)
    # torch is imported only now: a wrong recipe is told at once
    from titan_lite.plan.changes import best_changes, candidates, grid, ranked
    from titan_lite.plan.summary import Plan, as_json, describe

    machine = find_hardware(options.hardware or recipe.config.compile.machine or "h100")
    if options.search is not None:
        return "\n".join(search(recipe, machine, options))
    wanted = grid(options.sweep) or [{}, *(candidates(recipe.lay_out(), machine) if options.changes else ())]
    rows = plan_changes(recipe, wanted, machine, options.full)
    if options.sweep:
        return "\n".join(ranked(rows))
    (_, base), *others = [(change, each) for change, each in rows if isinstance(each, Plan)]
    if options.picture or options.trace:
        from titan_lite.plan.picture import draw_plan, write_plan_trace

        if options.picture:
            draw_plan(base, options.picture)
        if options.trace:
            write_plan_trace(base, options.trace)
    if options.json:
        return as_json(base)
    return "\n".join([*describe(base, options.tokens), *(best_changes(base, others) if options.changes else ())])


def plan_changes(recipe: Recipe, wanted: Iterable[dict[str, str]], machine: Any, full: bool = False) -> list[tuple[Any, Any]]:
    """(change, plan) of each, or (change, why it cannot be); those that cannot be laid out last.

    Raises ConfigError for what is wrong with the recipe as it is, which is the change {}.
    """
    from titan_lite.compiler.stage import CompileError
    from titan_lite.plan.summary import make_plans

    layouts: list[tuple[dict[str, str], Any]] = []
    refused: list[tuple[dict[str, str], str]] = []
    for change in wanted:
        try:
            layouts.append((change, recipe.lay_out(change)))
        except ConfigError as error:
            if not change:
                raise
            refused.append((change, str(error)))
    rows: list[tuple[dict[str, str], Any]] = []
    plans = make_plans([each for _, each in layouts], machine, full) if layouts else iter(())
    for (change, _), plan in zip(layouts, shown(plans, len(layouts), "planned"), strict=True):
        if isinstance(plan, CompileError) and not change:
            raise ConfigError(str(plan)) from plan
        rows.append((change, str(plan) if isinstance(plan, CompileError) else plan))
    return [*rows, *refused]


def search(recipe: Recipe, machine: Any, options: argparse.Namespace) -> list[str]:
    """What was looked at, a ranked table, and why the others lost."""
    from titan_lite.plan.changes import ranked
    from titan_lite.plan.search import differing, fits, guess, label, space, why_lost
    from titan_lite.plan.summary import Plan

    sequences = recipe.config.training.global_batch_size
    if sequences == -1:
        try:
            sequences = recipe.lay_out().rows
        except ConfigError as error:
            raise ConfigError(
                f"--search keeps the tokens of a step, which --set training.global_batch_size=N says: {error}"
            ) from error
    found, refused, large = [], 0, 0
    tried = list(space(recipe.config, recipe.world_size, machine, sequences))
    for change in shown(tried, len(tried), "priced by formula"):
        try:
            its = guess(recipe.lay_out(change), machine)
        except ConfigError:
            refused += 1
            continue
        if fits(its, machine):
            found.append((its.seconds, change))
        else:
            large += 1
    found.sort(key=lambda each: each[0])
    lines = [
        f"{len(tried):,} layouts of {recipe.world_size} ranks with {sequences:,} sequences a step: {refused:,} cannot run, "
        f"{large:,} cannot fit, by what parameters, optimizer and kept activations need alone; of {len(found):,} the "
        f"{min(options.search, len(found))} fastest by formula were planned"
    ]
    rows = plan_changes(recipe, [change for _, change in found[: options.search]], machine, options.full)
    if bests := best_first(rows, Plan):
        others = other_buckets(recipe, bests[0][0])
        rows += plan_changes(recipe, [{**bests[0][0], **each} for each in others], machine, options.full)
    lines += ["", *ranked(rows, label)]
    bests = best_first(rows, Plan)
    if not bests:
        return [*lines, "", "no layout fits; more ranks, fewer sequences a step or shorter ones would be needed"]
    (change, best), *losers = bests
    losers += [row for row in rows if isinstance(row[1], Plan) and not row[1].fits]
    lines += ["", "why the others lost"]
    lines += [f"  {why_lost(plan, best)}: {label(its)}" for its, plan in losers]
    return [*lines, "", "best: " + " ".join(f"--set {key}={value}" for key, value in differing(recipe.config, change).items())]


def best_first(rows: Sequence[tuple[Any, Any]], kind: type) -> list[tuple[Any, Any]]:
    fit = [(change, plan) for change, plan in rows if isinstance(plan, kind) and plan.fits]  # type: ignore[attr-defined]
    return sorted(fit, key=lambda row: -row[1].tokens_per_second(row[1].steps[0]))


def other_buckets(recipe: Recipe, change: dict[str, str]) -> list[dict[str, str]]:
    """Ways to bucket beside the recipe's own; none where weights are gathered once a step, which has its own buckets."""
    layout = recipe.lay_out(change)
    if not layout.config.compile.compiles("model") or layout.gathers_once:
        return []
    return [{"compile.bucketing": way} for way in ("block", "greedy") if way != layout.config.compile.bucketing]


def shown(each: Iterable[Any], count: int, done: str) -> Iterator[Any]:
    """With a progress bar, on a terminal."""
    from tqdm import tqdm

    yield from tqdm(each, total=count, desc=done, disable=count < 2 or not sys.stderr.isatty(), leave=False, file=sys.stderr)


def lay_out(config: Config, world_size: int) -> Any:
    """The recipe in such a world. Raises ConfigError where it could not run, or cannot be planned."""
    from titan_lite.layout import make_layout
    from titan_lite.plan.trace import PlannedLayout

    layout = make_layout(config, world_size)
    if config.parallelism.enable_async_tensor_parallel:
        raise ConfigError(
            "parallelism.enable_async_tensor_parallel = true is not planned: Inductor's pass needs GPUs; --set "
            "parallelism.enable_async_tensor_parallel=false would work, and waits for tensor parallelism are then an upper bound"
        )
    if config.compile.compiles("model") and config.compile.bucketing == "measured":
        raise ConfigError(
            'compile.bucketing = "measured" is decided by a run; --set compile.bucketing=greedy, or block, would work'
        )
    return PlannedLayout(**vars(layout), config=config)


def find_hardware(name: str) -> Any:
    from titan_lite.compiler.hardware import PROFILES, load_machine

    profile = next((known for known in PROFILES if known.casefold() == name.casefold()), name)
    if profile not in PROFILES and not profile.endswith(".toml"):
        raise ConfigError(f"--hardware {name} is not known; {', '.join(PROFILES)} or the path of a .toml file would work")
    if profile not in PROFILES and not Path(profile).is_file():
        raise ConfigError(f"--hardware {name}: no such file; {', '.join(PROFILES)} or another path would work")
    return load_machine(profile)


def world_size_of(recipe: Path) -> int:
    """As its comment says, in which the shipped recipes tell what they are for."""
    said = re.search(r"^# world_size: (\d+)$", recipe.read_text(encoding="utf-8"), re.MULTILINE)
    if said is None:
        raise ConfigError(f"{recipe} has no line `# world_size: N`; --world-size 8 would say for how many ranks to plan")
    return int(said[1])
