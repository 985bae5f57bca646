"""Make, plan, rank and show changes of a recipe: promising single changes, grids of values, and the
layouts of a search.

changes = candidates(layout, machine)                  # [{"activation_checkpoint.mode": "none"}, ...]
changes = grid(["training.local_batch_size=1,2"])      # [{"training.local_batch_size": "1"}, ...]
rows = plan_changes(lay_out, changes, machine)         # the fastest that fits first
print("\\n".join(table(rows)))
"""

import itertools
from collections.abc import Callable, Iterable, Sequence

from tqdm import tqdm

from titan_lite.compile.compile import CompileError
from titan_lite.config import KEYS, ConfigError
from titan_lite.config.load import nearest_key
from titan_lite.cost.machine import GIB, Machine
from titan_lite.tools.plan.summary import Plan, make_plans, what_binds
from titan_lite.tools.plan.trace import PlannedLayout

Change = dict[str, str]  # {"section.key": value as on a command line}
Row = tuple[Change, Plan | str]  # (change, its plan or why there is none)
CHECKPOINTING = ("none", "selective", "full")


class Stopped(KeyboardInterrupt):
    """Ctrl-C or SIGTERM while planning.

    rows: the plans until then, ranked; said: lines about them, for stdout.
    """

    def __init__(self, rows: "Sequence[Row]", wanted: int):
        self.rows, self.planned, self.wanted = (
            rows,
            sum(isinstance(plan, Plan) for _, plan in rows),
            wanted,
        )
        super().__init__(f"stopped after {self.planned} of {wanted} plans")
        self.said: list[str] = [f"PARTIAL: {self}", *table(rows)] if self.planned else []


def candidates(layout: PlannedLayout, machine: Machine) -> list[Change]:
    """Return single changes of the recipe that may help; some may be refused when they are laid
    out.
    """
    config, degrees = layout.config, layout.degrees
    parallelism, compile = config.parallelism, config.compile
    found: list[Change] = [
        {"activation_checkpoint.mode": mode}
        for mode in CHECKPOINTING
        if mode != config.activation_checkpoint.mode
    ]
    batch = config.training.local_batch_size
    found += [{"training.local_batch_size": str(size)} for size in (batch // 2, 2 * batch) if size]
    for axis, key in (("tp", "tensor_parallel_degree"), ("pp", "pipeline_parallel_degree")):
        for degree in (degrees[axis] // 2, 2 * degrees[axis]):
            if degree:
                found.append(
                    {
                        f"parallelism.{key}": str(degree),
                        "parallelism.data_parallel_shard_degree": "-1",
                    }
                )
    if degrees["pp"] > 1 and parallelism.pipeline_parallel_schedule == "1F1B":
        found.append({"parallelism.pipeline_parallel_schedule": "Interleaved1F1B"})
    inside = degrees["cp"] * degrees["tp"]  # with HSDP, a copy of the model has the ranks of a node
    copies = degrees["dp_shard"] * inside // machine.ranks_per_node
    if inside < machine.ranks_per_node and copies > 1 and degrees["dp_shard"] % copies == 0:
        found.append(
            {
                "parallelism.data_parallel_replicate_degree": str(degrees["dp_replicate"] * copies),
                "parallelism.data_parallel_shard_degree": str(degrees["dp_shard"] // copies),
            }
        )
    if not compile.compiles("model"):
        found.append({"compile.enable": "true"})
    elif compile.bucketing == "block" and not layout.gathers_once:
        found.append({"compile.bucketing": "greedy"})
    if layout.microbatches > 1:
        found.append(
            {"parallelism.fsdp_communication": "microbatch" if layout.gathers_once else "step"}
        )
    if not layout.gathers_once and parallelism.fsdp_reshard_after_forward == "default":
        found.append({"parallelism.fsdp_reshard_after_forward": "never"})
    return found


def grid(sweeps: Sequence[str]) -> list[Change]:
    """Return all combinations of sweeps "section.key=value,value"; [] without sweeps.

    Raises ConfigError.
    """
    axes: list[list[tuple[str, str]]] = []
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
        if any(key == axis[0][0] for axis in axes):
            raise ConfigError(
                f"--sweep {sweep}: {key} has values already; use one --sweep with all of them"
            )
        axes.append([(key, word) for word in dict.fromkeys(words)])
    return [dict(combination) for combination in itertools.product(*axes)] if axes else []


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
    plans = make_plans([layout for _, layout in layouts], machine.nominal_slow_fast(), full)
    alone = len(layouts) == 1
    try:
        with tqdm(total=len(layouts), desc="planned", leave=False, disable=alone) as bar:
            for (change, _), plan in zip(layouts, plans, strict=True):
                if isinstance(plan, CompileError) and not change:
                    raise ConfigError(str(plan)) from plan
                rows.append((change, str(plan) if isinstance(plan, CompileError) else plan))
                bar.update()
                bar.set_postfix_str(_best_of(rows, name or words_of))
    except KeyboardInterrupt:
        raise Stopped(ranked([*rows, *refused]), len(layouts)) from None
    return ranked([*rows, *refused])


def _best_of(rows: Iterable[Row], name: Callable[[Change], str]) -> str:
    """Return the speed and the change of the fastest plan that fits, "" if none does."""
    fit = fitting(ranked(rows))
    if not fit:
        return ""
    change, plan = fit[0]
    speed = plan.tokens_per_second(plan.steps[0])
    return f"best {speed:,.0f} tokens/s per GPU: {name(change) or 'unchanged'}"


def ranked(rows: Iterable[Row]) -> list[Row]:
    """Sort rows: plans that fit, by tokens per second; plans that do not fit; changes without a
    plan.
    """

    def place(row: Row) -> tuple[int, float]:
        plan = row[1]
        return (
            (2, 0.0)
            if isinstance(plan, str)
            else (not plan.fits, -plan.tokens_per_second(plan.steps[0]))
        )

    return sorted(rows, key=place)


def fitting(rows: Iterable[Row]) -> list[tuple[Change, Plan]]:
    return [(change, plan) for change, plan in rows if isinstance(plan, Plan) and plan.fits]


def words_of(change: Change) -> str:
    return ", ".join(f"{key}={value}" for key, value in change.items())


def table(rows: Sequence[Row], name: Callable[[Change], str] = words_of) -> list[str]:
    """Return a line for each row, after a line with the names of the columns."""
    lines = [f"{'tokens/s per GPU':>18}  {'MFU %':>8}  {'GiB':>6}  {'fits':<4}  change; bottleneck"]
    for change, plan in rows:
        speed = mfu = memory = fits = "-"
        why = plan
        if isinstance(plan, Plan):
            _, slow, fast = plan.steps
            speed = f"{plan.tokens_per_second(slow):,.0f} to {plan.tokens_per_second(fast):,.0f}"
            mfu = f"{100 * plan.mfu(slow):.0f} to {100 * plan.mfu(fast):.0f}"
            memory, fits, why = (
                f"{plan.memory.total / GIB:.1f}",
                "yes" if plan.fits else "no",
                what_binds(plan),
            )
        lines.append(f"{speed:>18}  {mfu:>8}  {memory:>6}  {fits:<4}  {name(change)}; {why}")
    return lines


def best_changes(plan: Plan, rows: Sequence[Row]) -> list[str]:
    """Return lines on the three changes that fit and give the most tokens per second.

    rows: ranked, with that of the plan.
    """
    changed = [(change, other) for change, other in rows if change and isinstance(other, Plan)]
    fit = fitting(changed)
    base = plan.tokens_per_second(plan.steps[0])
    gains = [
        (other.tokens_per_second(other.steps[0]) / base - 1, change, other) for change, other in fit
    ]
    gains = [each for each in gains if each[0] > 0.005 or not plan.fits][:3]
    lines = ["", f"best changes, of {len(changed)} planned"]
    for gain, change, other in gains:
        memory = (other.memory.total - plan.memory.total) / GIB
        batch = (
            f", {other.layout.tokens:,} tokens per step"
            if other.layout.tokens != plan.layout.tokens
            else ""
        )
        lines.append(
            f"  {100 * gain:+5.1f}% tokens/s, {memory:+6.1f} GiB{batch}: {words_of(change)}"
        )
    none = (
        f"  none: of {len(fit)} that fit, none is faster"
        if plan.fits
        else "  none: none fits; use more ranks"
    )
    return lines if gains else [*lines, none]
