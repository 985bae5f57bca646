"""Changes of a recipe, planned and ranked: what a sweep, a search and the changes that help most have in common.

rows = plan_changes(lay_out, [{}, {"training.local_batch_size": "2"}], machine)     # the fastest that fits first
print("\\n".join(table(rows)))
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from tqdm import tqdm

from titan_lite.compiler.hardware import Machine
from titan_lite.compiler.stage import CompileError
from titan_lite.config import ConfigError
from titan_lite.plan.memory import GIB
from titan_lite.plan.summary import Plan, make_plans, what_binds
from titan_lite.plan.trace import PlannedLayout

Change = dict[str, str]  # {"section.key": value as on a command line}
Row = tuple[Change, Plan | str]  # a change, and its plan or why there is none
Each = TypeVar("Each")


def plan_changes(
    lay_out: Callable[[Change], PlannedLayout], wanted: Iterable[Change], machine: Machine, full: bool = False
) -> list[Row]:
    """A row each, ranked. lay_out: raises ConfigError where a recipe so changed cannot run.

    Raises ConfigError for what is wrong with the recipe as it is, which is the change {}.
    """
    layouts: list[tuple[Change, PlannedLayout]] = []
    rows: list[Row] = []
    refused: list[Row] = []
    for change in wanted:
        try:
            layouts.append((change, lay_out(change)))
        except ConfigError as error:
            if not change:
                raise
            refused.append((change, str(error)))
    plans = make_plans([layout for _, layout in layouts], machine.spread(), full)
    for (change, _), plan in zip(layouts, with_progress(plans, len(layouts), "planned"), strict=True):
        if isinstance(plan, CompileError) and not change:
            raise ConfigError(str(plan)) from plan
        rows.append((change, str(plan) if isinstance(plan, CompileError) else plan))
    return ranked([*rows, *refused])


def ranked(rows: Iterable[Row]) -> list[Row]:
    """In order: plans that fit, by tokens a second; plans that do not; changes without a plan."""

    def place(row: Row) -> tuple[int, float]:
        plan = row[1]
        return (2, 0.0) if isinstance(plan, str) else (not plan.fits, -plan.tokens_per_second(plan.steps[0]))

    return sorted(rows, key=place)


def fitting(rows: Iterable[Row]) -> list[tuple[Change, Plan]]:
    return [(change, plan) for change, plan in rows if isinstance(plan, Plan) and plan.fits]


def words_of(change: Change) -> str:
    return ", ".join(f"{key}={value}" for key, value in change.items())


def table(rows: Sequence[Row], name: Callable[[Change], str] = words_of) -> list[str]:
    """A line a row, under a line that names the columns."""
    lines = [f"{'tokens/s a GPU':>18}  {'MFU %':>8}  {'GiB':>6}  {'fits':<4}  change; what binds"]
    for change, plan in rows:
        speed = mfu = memory = fits = "-"
        why = plan
        if isinstance(plan, Plan):
            _, slow, fast = plan.steps
            speed = f"{plan.tokens_per_second(slow):,.0f} to {plan.tokens_per_second(fast):,.0f}"
            mfu = f"{100 * plan.mfu(slow):.0f} to {100 * plan.mfu(fast):.0f}"
            memory, fits, why = f"{plan.memory.total / GIB:.1f}", "yes" if plan.fits else "no", what_binds(plan)
        lines.append(f"{speed:>18}  {mfu:>8}  {memory:>6}  {fits:<4}  {name(change)}; {why}")
    return lines


def with_progress(each: Iterable[Each], count: int, done: str) -> Iterator[Each]:
    """Show a progress bar on a terminal."""
    yield from tqdm(each, total=count, desc=done, disable=count < 2 or not sys.stderr.isatty(), leave=False, file=sys.stderr)
