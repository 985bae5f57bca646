"""Plan, rank and show changes of a recipe: grids of values, and the layouts of a search.

changes = grid(["training.local_batch_size=1,2"])   # [{"training.local_batch_size": "1"}, ...]
rows = ranked(plan_changes(lay_out, changes, machine))      # the fastest that fits first
print("\\n".join(table(rows)))
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from tqdm import tqdm

from titan_lite.compile.errors import CompileError
from titan_lite.config import KEYS, ConfigError
from titan_lite.config.nearest import nearest_key
from titan_lite.cost.machine import GIB, Machine
from titan_lite.tools.plan.plan import Plan, make_plans
from titan_lite.tools.plan.summary import what_binds
from titan_lite.tools.plan.trace import PlannedLayout

Change = dict[str, str]  # {"section.key": value as on a command line}
Row = tuple[Change, Plan | str]  # (change, its plan or why there is none)
Words = Mapping[str, str]  # what a change says about each subject, such as a key


def grid(sweeps: Sequence[str]) -> list[Change]:
    """Return all combinations of sweeps "section.key=value,value"; [] without sweeps.

    Raises ConfigError.
    """
    if not sweeps:
        return []
    choices: dict[str, list[str]] = {}  # by key
    for sweep in sweeps:
        key, _, values = sweep.partition("=")
        words = [word.strip() for word in values.split(",") if word.strip()]
        if not key or not words:
            raise ConfigError(
                f"--sweep {sweep}: use a key and values, such as"
                " parallelism.tensor_parallel_degree=1,2,4"
            )
        if key not in KEYS:
            raise ConfigError(f"--sweep {sweep}: unknown key {key}{nearest_key(key)}")
        if key in choices:
            raise ConfigError(
                f"--sweep {sweep}: {key} has values already; use one --sweep with all of them"
            )
        choices[key] = list(dict.fromkeys(words))
    return [
        dict(zip(choices, combination, strict=True))
        for combination in itertools.product(*choices.values())
    ]


def plan_changes(
    lay_out: Callable[[Change], PlannedLayout],
    wanted: Iterable[Change],
    machine: Machine,
    full: bool = False,
    words: Callable[[Change], Words] | None = None,
) -> Iterator[Row]:
    """Yield a row for each change, as soon as it is planned; first those that cannot run.

    lay_out: raises ConfigError if the changed recipe cannot run. words: describes a change.
    """
    layouts: list[tuple[Change, PlannedLayout]] = []
    for change in wanted:
        try:
            layouts.append((change, lay_out(change)))
        except ConfigError as error:
            yield change, str(error)
    plans = make_plans([layout for _, layout in layouts], machine, full)
    rows: list[Row] = []
    with tqdm(total=len(layouts), desc="planned") as bar:  # its end stays, with the best
        for (change, _), plan in zip(layouts, plans, strict=True):
            row = (change, str(plan) if isinstance(plan, CompileError) else plan)
            rows.append(row)
            bar.update()
            bar.set_postfix_str(_best_of(rows, words or keys_of))
            yield row


def _best_of(rows: Iterable[Row], words: Callable[[Change], Words]) -> str:
    """Return the speed and the change of the fastest plan that fits, "" if none does."""
    fit = fitting(ranked(rows))
    if not fit:
        return ""
    change, plan = fit[0]
    speed = plan.tokens_per_second(plan.nominal)
    return f"best {speed:,.0f} tokens/s per GPU: {', '.join(words(change).values()) or 'unchanged'}"


def ranked(rows: Iterable[Row]) -> list[Row]:
    """Sort rows: plans that fit with room, by tokens per second; tight ones; those that do not fit;
    changes without a plan.
    """
    classes = ("yes", "tight", "no")

    def order(row: Row) -> tuple[int, float]:
        _, plan = row
        if isinstance(plan, str):
            return len(classes), 0.0
        return classes.index(fit_word(plan)), -plan.tokens_per_second(plan.nominal)

    return sorted(rows, key=order)


def fitting(rows: Iterable[Row]) -> list[tuple[Change, Plan]]:
    return [(change, plan) for change, plan in rows if isinstance(plan, Plan) and plan.fits]


def keys_of(change: Change) -> Words:
    return {key: f"{key}={value}" for key, value in change.items()}


def table(
    rows: Sequence[Row],
    words: Callable[[Change], Words] = keys_of,
    reason: Callable[[Plan], str] = what_binds,
) -> list[str]:
    """Return a line for each row, after a line with the names of the columns, and before it one
    with what all changes have in common.

    words: describes a change. reason: of the speed of a plan.
    """
    described = [words(change) for change, _ in rows]
    common = _common(described)
    lines = [f"all: {', '.join(common.values())}"] if common else []
    lines.append(f"{_columns('tokens/s per GPU', 'MFU %', 'GiB', 'fits')}  change; reason")
    for (_, plan), each in zip(rows, described, strict=True):
        if isinstance(plan, str):
            columns = _columns("-", "-", "-", "-")
            why = plan
        else:
            slow = plan.slow
            fast = plan.fast
            columns = _columns(
                f"{plan.tokens_per_second(slow):,.0f} to {plan.tokens_per_second(fast):,.0f}",
                f"{100 * plan.mfu(slow):.0f} to {100 * plan.mfu(fast):.0f}",
                f"{plan.memory.total / GIB:.1f}",
                fit_word(plan),
            )
            why = reason(plan)
        own = ", ".join(text for subject, text in each.items() if subject not in common)
        lines.append(f"{columns}  {own}; {why}")
    return lines


def _common(described: Sequence[Words]) -> Words:
    """Return what several changes say alike; {} for one."""
    if len(described) < 2:
        return {}
    first, *others = described
    return {
        subject: text
        for subject, text in first.items()
        if all(other.get(subject) == text for other in others)
    }


def fit_word(plan: Plan) -> str:
    if not plan.fits:
        return "no"
    return "tight" if plan.is_tight else "yes"


def _columns(speed: str, mfu: str, memory: str, fits: str) -> str:
    return f"{speed:>18}  {mfu:>8}  {memory:>6}  {fits:<5}"
