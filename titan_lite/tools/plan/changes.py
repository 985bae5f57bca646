"""Plan, rank and show changes of a recipe: grids of values, the layouts of a search, and changes
that need less memory.

    changes = grid(["training.local_batch_size=1,2"])   # [{"training.local_batch_size": "1"}, ...]
    rows = plan_changes(lay_out, changes, machine)      # the fastest that fits first
    print("\\n".join(table(rows)))
"""

import itertools
from collections.abc import Callable, Iterable, Sequence

from tqdm import tqdm

from titan_lite.compile.compile import CompileError
from titan_lite.config import KEYS, Config, ConfigError, flatten
from titan_lite.config.nearest import nearest_key
from titan_lite.cost.machine import GIB, Machine
from titan_lite.tools.plan.plan import Plan, make_plans
from titan_lite.tools.plan.summary import what_binds
from titan_lite.tools.plan.trace import PlannedLayout

Change = dict[str, str]  # {"section.key": value as on a command line}
Row = tuple[Change, Plan | str]  # (change, its plan or why there is none)
MODE = "activation_checkpoint.mode"
# From the most memory and the least recomputation to the opposite.
CHECKPOINTING: tuple[Change, ...] = (
    {MODE: "none"},
    {MODE: "selective", "activation_checkpoint.selective_ac_option": "op"},
    {MODE: "selective", "activation_checkpoint.selective_ac_option": "op/2"},
    {MODE: "full"},
)


class Stopped(KeyboardInterrupt):
    """Ctrl-C or SIGTERM while planning.

    rows: the plans until then, ranked; lines: text about them, for stdout.
    """

    def __init__(self, rows: "Sequence[Row]", wanted: int):
        self.rows = rows
        self.planned = sum(isinstance(plan, Plan) for _, plan in rows)
        self.wanted = wanted
        super().__init__(f"stopped after {self.planned} of {wanted} plans")
        self.lines: list[str] = []
        if self.planned:
            self.lines = [f"PARTIAL: {self}", *table(rows)]


def checkpointing_of(config: Config) -> Change | None:
    """Return the one of CHECKPOINTING that a recipe has; None for every n-th block."""
    keys = flatten(config)
    for way in CHECKPOINTING:
        if all(keys[key] == value for key, value in way.items()):
            return way
    return None


def smaller_changes(layout: PlannedLayout) -> list[Change]:
    """Return changes that need less memory and keep the tokens of a step, the nearest first: more
    activation checkpointing, weights gathered once a microbatch, and fewer sequences at once.
    """
    used = checkpointing_of(layout.config)
    more: Sequence[Change] = CHECKPOINTING[-1:]
    if used is not None:
        more = CHECKPOINTING[CHECKPOINTING.index(used) + 1 :]
    communications: list[Change] = [{}]
    if layout.gathers_once:
        communications.append({"parallelism.fsdp_communication": "microbatch"})
    key = "training.local_batch_size"
    if layout.degrees["pp"] > 1:
        key = "parallelism.pipeline_parallel_microbatch_size"
    same_tokens: Change = {}
    if layout.config.training.global_batch_size == -1:
        same_tokens = {"training.global_batch_size": str(layout.sequences_per_step)}
    batches: list[Change] = [{}]
    size = layout.microbatch_size
    while size % 2 == 0:
        size //= 2
        batches.append({key: str(size), **same_tokens})
    combined = [
        {**batch, **communication, **checkpointing}
        for batch, communication, checkpointing in itertools.product(
            batches, communications, ({}, *more)
        )
    ]
    return [change for change in combined if change]


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
    name: Callable[[Change], str] | None = None,
) -> list[Row]:
    """Return a row for each change, ranked.

    lay_out: raises ConfigError if the changed recipe cannot run. name: describes a change. Raises
    ConfigError if the unchanged recipe, which is the change {}, is wrong. Raises Stopped.
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
    plans = make_plans([layout for _, layout in layouts], machine, full)
    try:
        with tqdm(
            total=len(layouts), desc="planned", leave=False, disable=len(layouts) == 1
        ) as bar:
            for (change, _), plan in zip(layouts, plans, strict=True):
                if isinstance(plan, CompileError):
                    if not change:
                        raise ConfigError(str(plan)) from plan
                    rows.append((change, str(plan)))
                else:
                    rows.append((change, plan))
                bar.update()
                bar.set_postfix_str(_best_of(rows, name or keys_of))
    except KeyboardInterrupt:
        raise Stopped(ranked([*rows, *refused]), len(layouts)) from None
    return ranked([*rows, *refused])


def _best_of(rows: Iterable[Row], name: Callable[[Change], str]) -> str:
    """Return the speed and the change of the fastest plan that fits, "" if none does."""
    fit = fitting(ranked(rows))
    if not fit:
        return ""
    change, plan = fit[0]
    speed = plan.tokens_per_second(plan.nominal)
    return f"best {speed:,.0f} tokens/s per GPU: {name(change) or 'unchanged'}"


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


def keys_of(change: Change) -> str:
    return ", ".join(f"{key}={value}" for key, value in change.items())


def table(rows: Sequence[Row], name: Callable[[Change], str] = keys_of) -> list[str]:
    """Return a line for each row, after a line with the names of the columns.

    name: describes a change.
    """
    lines = [f"{_columns('tokens/s per GPU', 'MFU %', 'GiB', 'fits')}  change; bottleneck"]
    for change, plan in rows:
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
            why = what_binds(plan)
        lines.append(f"{columns}  {name(change)}; {why}")
    return lines


def fit_word(plan: Plan) -> str:
    if not plan.fits:
        return "no"
    return "tight" if plan.is_tight else "yes"


def _columns(speed: str, mfu: str, memory: str, fits: str) -> str:
    return f"{speed:>18}  {mfu:>8}  {memory:>6}  {fits:<5}"
