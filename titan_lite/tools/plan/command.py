"""Predict the cost of a recipe without a GPU: step time, tokens per second, memory, and exposed
communication.

    python -m titan_lite plan train_configs/llama3_405b.toml
    python -m titan_lite plan train_configs/llama3_8b.toml --world-size 128 --hardware h200 --training.local_batch_size 1
    python -m titan_lite plan train_configs/llama3_70b.toml --changes           # also single changes that help: minutes
    python -m titan_lite plan train_configs/llama3_70b.toml --sweep parallelism.tensor_parallel_degree=2,4,8
    python -m titan_lite plan train_configs/llama3_8b.toml --world-size 64 --search     # the best layout that fits: minutes
    python -m titan_lite plan train_configs/llama3_405b.toml --scale            # on 512 to 100,000 ranks: start, saves, failures
    python -m titan_lite plan train_configs/llama3_8b.toml --picture plan.png --trace plan.json
    python -m titan_lite plan train_configs/llama3_8b.toml --compare outputs/llama3_8b      # beside a run that has ended

The real model is parallelized, compiled and scheduled by the code that trains it, on fake tensors
with a fake process group. A cost model of a machine (cost/machine.py) gives the time. Nothing runs,
no weights are allocated, no tokenizer or data is read, and no GPU or network is needed. Exit code
0: planned, whether it fits or not (--json has "fits"); 2: an error.
"""

import argparse
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titan_lite import rules
from titan_lite.cli import Parser, at_least_one, command
from titan_lite.config import Config, ConfigError, find_recipe, load_config
from titan_lite.config.load import option
from titan_lite.distributed.layout import Layout

SEARCHED = 12  # plans of a search by default


@command()
def main(arguments: Sequence[str]) -> None:
    parser = Parser(__doc__, needs_arguments=False)
    add, either = parser.add_argument, parser.add_mutually_exclusive_group().add_argument
    add("recipe", nargs="?", help="a TOML file; options of the form --section.key value change it")
    add(
        "--world-size",
        type=at_least_one,
        help="ranks (default: N of the recipe's line `# world_size: N`)",
    )
    add(
        "--hardware",
        help=(
            "a profile such as h100, or the path of a .toml file; default: compile.machine, or h100"
        ),
    )
    add(
        "--tokens",
        type=above_zero,
        default=0.0,
        help="a token budget, such as 15e12, to print its days and GPU-hours",
    )
    add(
        "--full",
        action="store_true",
        help="trace every block, instead of extrapolating from two depths",
    )
    add("--picture", type=Path, metavar="PNG", help="draw the step, and one microbatch's graphs")
    add(
        "--trace",
        type=Path,
        metavar="JSON",
        help="write the same for Perfetto and chrome://tracing",
    )
    either("--json", action="store_true", help="print JSON")
    either(
        "--changes",
        action="store_true",
        help="also plan single changes, and print the three that help most",
    )
    either(
        "--sweep",
        action="append",
        default=[],
        metavar="SECTION.KEY=A,B,C",
        help="plan a grid (repeatable), and rank it",
    )
    either(
        "--scale",
        action="store_true",
        help="also extend the plan to 512, 4,096, 16,384 and 100,000 ranks",
    )
    search = (
        "find the fastest degrees, local batch size, checkpointing, schedule and bucketing for"
        " this number of ranks and tokens per step; PLANS: number of layouts to plan, of all that"
        f" are estimated by formula (default {SEARCHED})"
    )
    either("--search", type=at_least_one, nargs="?", const=SEARCHED, metavar="PLANS", help=search)
    compare = "print step time, tokens per second and memory beside those of a run of this recipe"
    either("--compare", type=Path, metavar="RUN_FOLDER", help=compare)
    options, overrides = parser.parse_with_overrides(arguments)
    try:
        print(answer(options, overrides))
    except KeyboardInterrupt as stopped:
        print(
            *getattr(stopped, "said", ()), sep="\n", end="\n" * hasattr(stopped, "said"), flush=True
        )
        raise KeyboardInterrupt(*stopped.args or ("stopped before anything was planned",)) from None


def above_zero(text: str) -> float:
    """Return an option's value as a number, as `type` of add_argument."""
    try:
        if 0 < (number := float(text)) < math.inf:
            return number
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text}: use a number above 0, such as 15e12")


def refuse_idle(options: argparse.Namespace) -> None:
    """Raise ConfigError for an option without effect beside another one."""
    several = {
        "sweep": options.sweep,
        "search": options.search is not None,
        "compare": options.compare,
    }
    idle = {"picture": several, "trace": several, "tokens": several | {"json": options.json}}
    idle["world_size"] = {"compare": options.compare}
    for name, others in idle.items():
        other = next((other for other, given in others.items() if given), "")
        if other and getattr(options, name):
            raise ConfigError(
                f"--{name.replace('_', '-')} has no effect with --{other}; leave one of them out"
            )


def answer(options: argparse.Namespace, overrides: list[str]) -> str:
    refuse_idle(options)
    for name in (name for name in ("picture", "trace") if getattr(options, name)):
        folder = getattr(options, name).resolve().parent
        if not folder.is_dir():
            raise ConfigError(
                f"--{name} {getattr(options, name)}: there is no folder {folder}; use one that"
                " exists"
            )
    if not options.recipe:
        raise ConfigError("no recipe; use one such as train_configs/llama3_8b.toml")
    return plan_recipe(options, overrides)


def plan_recipe(options: argparse.Namespace, overrides: list[str]) -> str:
    config = load_config(options.recipe, overrides)
    rules.check_keys(config)
    if options.compare:
        from titan_lite.tools.plan.compare import (
            after_ramp,
            describe_comparison,
            ranks_of,
            read_windows,
        )

        windows = read_windows(options.compare, config)
        world_size = ranks_of(windows)
    else:
        world_size = options.world_size or world_size_of(find_recipe(Path(options.recipe)))

    def idle_async_tp(change: dict[str, str]) -> bool:
        return (
            config.parallelism.enable_async_tensor_parallel
            and change.get("parallelism.tensor_parallel_degree") == "1"
        )

    def lay_out_changed(change: dict[str, str]) -> Any:
        changes = [option(key, value) for key, value in change.items()]
        if idle_async_tp(change):
            changes.append("--parallelism.no-enable_async_tensor_parallel")  # else an error
        changed = load_config(options.recipe, [*overrides, *changes]) if changes else config
        if changed.float8.enable and "float8_e4m3fn" not in machine.tflops:
            wrong = f"float8.enable = true: {machine.name} has no peak of float8"
            raise ConfigError(
                f"{wrong}; use --float8.no-enable, another machine, or tflops.float8_e4m3fn in its"
                " file"
            )
        if not machine.is_cpu:
            rules.raise_mistakes(changed, rules.float8_has_results_on_gpus(changed))
        return lay_out(changed, world_size, machine.memory * 2**30)

    # imported here, since torch is slow to import, and a wrong recipe fails before
    from titan_lite.tools.plan.changes import best_changes, candidates, grid, plan_changes, table
    from titan_lite.tools.plan.picture import draw_plan, write_plan_trace
    from titan_lite.tools.plan.scale import check_scale, describe_scale
    from titan_lite.tools.plan.search import lighter, search
    from titan_lite.tools.plan.summary import as_json, describe, make_plan

    machine = find_hardware(options, config)
    if options.search is not None:
        return "\n".join(
            search(config, world_size, lay_out_changed, machine, options.search, options.full)
        )
    if options.sweep:
        return "\n".join(
            table(plan_changes(lay_out_changed, grid(options.sweep), machine, options.full))
        )
    if options.scale:
        check_scale(lay_out_changed({}))
    if options.compare:
        layout = lay_out_changed({})
        if layout.ramp:
            windows = after_ramp(windows, layout.ramp[-1][1], options.compare)
        plan = make_plan(layout, machine.nominal_slow_fast(), options.full)
        return "\n".join(describe_comparison(plan, windows))
    others = candidates(lay_out_changed({}), machine) if options.changes else []
    off = {"parallelism.enable_async_tensor_parallel": "false"}
    others = [change | off if idle_async_tp(change) else change for change in others]
    rows = plan_changes(lay_out_changed, [{}, *others], machine, options.full)
    base = next(plan for change, plan in rows if not change)
    assert not isinstance(base, str)
    if options.picture:
        draw_plan(base, options.picture)
    if options.trace:
        write_plan_trace(base, options.trace)
    if options.json:
        return as_json(base)
    if options.scale:
        return "\n".join([*describe(base, options.tokens), "", *describe_scale(base)])
    if options.changes:
        return "\n".join([*describe(base, options.tokens), *best_changes(base, rows)])
    less = plan_changes(lay_out_changed, lighter(base, lay_out_changed), machine, options.full)
    return "\n".join(
        describe(
            base,
            options.tokens,
            next((plan for _, plan in less if not isinstance(plan, str)), None),
        )
    )


def lay_out(config: Config, world_size: int, memory: float = math.inf) -> Any:
    """Return the layout of a recipe on devices of `memory` bytes.

    Raises ConfigError if it cannot run or be planned.
    """
    layout = Layout.from_config(config, world_size)
    rules.check(config, layout)  # before torch is imported

    from titan_lite.distributed.memory import choose_fsdp_communication
    from titan_lite.tools.plan.trace import PlannedLayout

    layout = choose_fsdp_communication(config, layout, memory)
    return PlannedLayout(**vars(layout), config=config)


def find_hardware(options: argparse.Namespace, config: Config) -> Any:
    """Return the profile that the user names, in upper or lower case, or that of his file; by
    default H100.
    """
    from titan_lite.cost.profiles import PROFILES, load_machine

    name = options.hardware or config.compile.machine or "h100"
    known = {profile.casefold(): profile for profile in PROFILES}
    written = f'compile.machine = "{config.compile.machine}"'
    if options.hardware:
        written = f"--hardware {options.hardware}"
    return load_machine(known.get(name.casefold(), name), written)


def world_size_of(recipe: Path) -> int:
    """Return the number of ranks in a recipe's comment. Raises ConfigError if there is none."""
    found = re.search(r"^# world_size: (\d+)$", recipe.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise ConfigError(
            f"{recipe} has no line `# world_size: N`; use --world-size 8, or another number of"
            " ranks"
        )
    return int(found[1])
