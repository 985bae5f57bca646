"""What a recipe will cost, before anyone rents a GPU: step time, tokens a second, memory, and what waits for what.

    python -m titan_lite.plan train_configs/llama3_405b.toml
    python -m titan_lite.plan train_configs/llama3_8b.toml --world-size 128 --hardware h200 --set training.local_batch_size=1
    python -m titan_lite.plan train_configs/llama3_70b.toml --changes           # and what is one change away: minutes
    python -m titan_lite.plan train_configs/llama3_70b.toml --sweep parallelism.tensor_parallel_degree=2,4,8

The real model is made parallel, compiled and scheduled by the code that trains it, on fake tensors in a world that is not there,
and priced on a machine that is numbers (compiler/hardware.py). Nothing runs, no weight is made, no tokenizer or data is looked
at, and no GPU or network is needed. Exit code 0: planned, whether it fits or not (--json says "fits"); 2: something is wrong.

What an eager recipe keeps for backward is taken for what a compiler would keep, which is less.
"""

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from titan_lite.config import Config, ConfigError, gradient_accumulation_steps, load_config


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        """One line, without the usage."""
        self.exit(2, f"error: {message}\n")


def main(arguments: list[str]) -> int:
    parser = Parser(
        prog="python -m titan_lite.plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("recipe", help="a TOML file")
    parser.add_argument("--world-size", type=int, help="ranks; without, as the recipe's line `# world_size: N` says")
    parser.add_argument(
        "--hardware", help="a profile such as h100, or the path of a .toml file; default: compile.machine, or h100"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="any key of the recipe, repeatable"
    )
    parser.add_argument("--tokens", type=float, default=0.0, help="a token budget, such as 15e12, to tell days and GPU-hours of")
    parser.add_argument("--full", action="store_true", help="trace every block, instead of two depths and a line through them")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--json", action="store_true", help="for machines")
    what.add_argument(
        "--changes", action="store_true", help="plan what is one change away, too, and tell the three that help most"
    )
    what.add_argument(
        "--sweep", action="append", default=[], metavar="SECTION.KEY=A,B,C", help="plan a grid (repeatable), and rank it"
    )
    try:
        print(plan_recipe(parser.parse_args(arguments)))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def plan_recipe(options: argparse.Namespace) -> str:
    overrides = [f"--{override}" for override in options.set]
    config, _ = load_config(options.recipe, overrides)
    world_size = world_size_of(Path(options.recipe)) if options.world_size is None else options.world_size
    if world_size < 1:
        raise ConfigError(f"--world-size {world_size} is no number of ranks; 8 would work")
    # torch is imported only now: a wrong recipe is told at once
    from titan_lite.compiler.stage import CompileError
    from titan_lite.planner.changes import Change, best_changes, candidates, grid, ranked
    from titan_lite.planner.report import Plan, as_json, describe, make_plans

    machine = find_hardware(options.hardware or config.compile.machine or "h100")
    wanted = grid(options.sweep)
    if not options.sweep:
        wanted = [{}, *(candidates(lay_out(config, world_size), machine) if options.changes else ())]
    layouts: list[tuple[Change, Any]] = []
    refused: list[tuple[Change, str]] = []
    for change in wanted:
        try:
            changed, _ = load_config(options.recipe, [*overrides, *(f"--{key}={value}" for key, value in change.items())])
            layouts.append((change, lay_out(changed, world_size)))
        except ConfigError as error:
            if not change:
                raise
            refused.append((change, str(error)))

    rows: list[tuple[Change, Plan | str]] = []
    plans = make_plans([each for _, each in layouts], machine, options.full) if layouts else ()
    for number, ((change, _), plan) in enumerate(zip(layouts, plans, strict=True), 1):
        if isinstance(plan, CompileError) and not change:
            raise ConfigError(str(plan)) from plan
        rows.append((change, str(plan) if isinstance(plan, CompileError) else plan))
        if len(layouts) > 1 and sys.stderr.isatty():
            print(f"\r{number} of {len(layouts)} planned", end="\n" if number == len(layouts) else "", file=sys.stderr)
    if options.sweep:
        return "\n".join(ranked([*rows, *refused]))
    (_, base), *others = [(change, each) for change, each in rows if isinstance(each, Plan)]
    if options.json:
        return as_json(base)
    return "\n".join([*describe(base, options.tokens), *(best_changes(base, others) if options.changes else ())])


def lay_out(config: Config, world_size: int) -> Any:
    """The recipe in such a world. Raises ConfigError where it could not run, or cannot be planned."""
    from titan_lite.check import check_layout, gathers_once
    from titan_lite.planner.trace import Layout

    model, degrees, pipeline = check_layout(config, world_size)
    if config.parallelism.enable_async_tensor_parallel:
        raise ConfigError(
            "parallelism.enable_async_tensor_parallel = true is not planned: Inductor's pass needs GPUs; --set "
            "parallelism.enable_async_tensor_parallel=false would work, and waits for tensor parallelism are then an upper bound"
        )
    if config.compile.compiles("model") and config.compile.bucketing == "measured":
        raise ConfigError(
            'compile.bucketing = "measured" is decided by a run; --set compile.bucketing=greedy, or block, would work'
        )
    accumulation = gradient_accumulation_steps(config.training, degrees["dp_replicate"] * degrees["dp_shard"])
    once = gathers_once(config.parallelism, accumulation * pipeline.microbatches)
    return Layout(config, world_size, model, degrees, pipeline, accumulation, once)


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
