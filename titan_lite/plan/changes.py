"""Changes of a recipe that are worth planning, and grids of values.

changes = candidates(layout, machine)              # [{"activation_checkpoint.mode": "none"}, ...]
grid("training.local_batch_size=1,2")              # [{"training.local_batch_size": "1"}, ...]
best_changes(plan, rows)                           # the three that help most
"""

import itertools
from collections.abc import Sequence

from titan_lite.compiler.hardware import Machine
from titan_lite.config import KEYS, ConfigError
from titan_lite.plan.memory import GIB
from titan_lite.plan.rank import Change, Row, fitting, words_of
from titan_lite.plan.summary import Plan
from titan_lite.plan.trace import PlannedLayout

CHECKPOINTING = ("none", "selective", "full")


def candidates(layout: PlannedLayout, machine: Machine) -> list[Change]:
    """One step away from the recipe, each; some may be refused when they are laid out."""
    config, degrees = layout.config, layout.degrees
    parallelism, compile = config.parallelism, config.compile
    found: list[Change] = [
        {"activation_checkpoint.mode": mode} for mode in CHECKPOINTING if mode != config.activation_checkpoint.mode
    ]
    batch = config.training.local_batch_size
    found += [{"training.local_batch_size": str(size)} for size in (batch // 2, 2 * batch) if size]
    for axis, key in (("tp", "tensor_parallel_degree"), ("pp", "pipeline_parallel_degree")):
        for degree in (degrees[axis] // 2, 2 * degrees[axis]):
            if degree:
                found.append({f"parallelism.{key}": str(degree), "parallelism.data_parallel_shard_degree": "-1"})
    if degrees["pp"] > 1 and parallelism.pipeline_parallel_schedule == "1F1B":
        found.append({"parallelism.pipeline_parallel_schedule": "Interleaved1F1B"})
    inside = degrees["cp"] * degrees["tp"]  # of a copy of the model: as many ranks as a node has
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
        found.append({"parallelism.fsdp_communication": "microbatch" if layout.gathers_once else "step"})
    if not layout.gathers_once and parallelism.fsdp_reshard_after_forward == "default":
        found.append({"parallelism.fsdp_reshard_after_forward": "never"})
    return found


def grid(sweeps: Sequence[str]) -> list[Change]:
    """Every combination of "section.key=value,value" each; of none, none. Raises ConfigError."""
    axes = []
    for sweep in sweeps:
        key, _, values = sweep.partition("=")
        words = [word.strip() for word in values.split(",") if word.strip()]
        if key not in KEYS or not words:
            raise ConfigError(f"--sweep {sweep}: write a key and values, such as parallelism.tensor_parallel_degree=1,2,4")
        axes.append([(key, word) for word in words])
    return [dict(combination) for combination in itertools.product(*axes)] if axes else []


def best_changes(plan: Plan, rows: Sequence[Row], count: int = 3) -> list[str]:
    """The changes that fit and give the most tokens a second. rows: ranked, with the plan's own."""
    changed = [(change, other) for change, other in rows if change and isinstance(other, Plan)]
    fit = fitting(changed)
    base = plan.tokens_per_second(plan.steps[0])
    gains = [(other.tokens_per_second(other.steps[0]) / base - 1, change, other) for change, other in fit]
    gains = [each for each in gains if each[0] > 0.005 or not plan.fits][:count]
    lines = ["", f"changes that help most, of {len(changed)} that were planned"]
    for gain, change, other in gains:
        memory = (other.memory.total - plan.memory.total) / GIB
        batch = f", {other.layout.tokens:,} tokens a step" if other.layout.tokens != plan.layout.tokens else ""
        lines.append(f"  {100 * gain:+5.1f}% tokens/s, {memory:+6.1f} GiB{batch}: {words_of(change)}")
    none = f"  none: of {len(fit)} that fit, no one is faster" if plan.fits else "  none: no one fits; more ranks would be needed"
    return lines if gains else [*lines, none]
