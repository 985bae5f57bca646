"""Compare a plan with a run that has ended: step time, tokens per second and memory, side by side.

windows = read_windows(Path("outputs/llama3_8b"), config)   # of its metrics.jsonl
print("\\n".join(describe_comparison(plan, windows)))       # for `ranks_of(windows)` ranks
"""

import statistics
from collections.abc import Sequence
from pathlib import Path

from titan_lite.config import Config, ConfigError, flatten, load_config
from titan_lite.cost.machine import GIB
from titan_lite.metrics.run_files import Window, timed_windows
from titan_lite.models.shapes import shape_words
from titan_lite.tools.plan.plan import Plan

# Tables and keys that no plan depends on.
NOT_PLANNED = (
    *("job", "lr_scheduler", "checkpoint", "data", "validation", "metrics", "profiling", "comm"),
    *("fault_tolerance", "debug"),
    *("model.tokenizer_path", "training.steps", "training.gc_freq", "optimizer.lr"),
    "compile.dump_graphs",
)


def read_windows(folder: Path, config: Config) -> list[Window]:
    """Return the windows of steps that a run of `config` recorded, without the first one, which
    compiles.

    Raises ConfigError if the folder has no run, one of another recipe, or no window but the first.
    """
    written = f"--compare {folder}"
    metrics = folder / "metrics.jsonl"
    recipe = folder / "config.toml"
    for path in (metrics, recipe):
        if not path.is_file():
            raise ConfigError(f"{written}: no {path.name} in it; use a run's job.dump_folder")
    recipe_of_run = load_config(recipe, [])
    if len(recipe_of_run.phases) > 1:
        raise ConfigError(f"{written}: its run has [[phases]]; use a run of one phase")
    of_run = flatten(recipe_of_run)
    for key, value in flatten(config).items():
        is_planned = not {key, key.partition(".")[0]} & {*NOT_PLANNED}
        if is_planned and of_run[key] != value:
            raise ConfigError(
                f"{written}: its run had {key} = {of_run[key]!r}, and this recipe has {value!r};"
                f" use the run's own, {recipe}"
            )
    windows = timed_windows(metrics)
    if not windows:
        raise ConfigError(
            f"{written}: no step to compare: all were in the first window (metrics.log_freq) after"
            " the last start, in which code is compiled; use a run with more steps"
        )
    return windows


def ranks_of(windows: Sequence[Window]) -> int:
    """Return the number of ranks of a run: its tokens by those of one rank."""
    tokens_of_rank = sum(window.seconds * window.tokens_per_second for window in windows)
    return round(sum(window.tokens for window in windows) / tokens_of_rank)


def describe_comparison(plan: Plan, windows: Sequence[Window]) -> list[str]:
    """Return a table of planned and measured step time, speed and memory."""
    nominal = plan.nominal
    slow = plan.slow
    fast = plan.fast
    layout = plan.layout
    measured_step = statistics.median(window.seconds / window.steps for window in windows)
    measured_speed = statistics.median(window.tokens_per_second for window in windows)
    measured_memory = max(window.memory_gib for window in windows)
    steps = (nominal.seconds, fast.seconds, slow.seconds)
    speeds = tuple(plan.tokens_per_second(step) for step in (nominal, slow, fast))
    return [
        (
            f"{shape_words(layout.config.model)}, world size {layout.world_size}, planned on"
            f" {plan.machine.name}"
        ),
        "",
        f"{'':<20}{'planned':>10}{'80% range':>22}{'measured':>12}{'planned / measured':>20}",
        _row("step, s", "{:.3g}", steps, measured_step),
        _row("tokens/s per rank", "{:,.0f}", speeds, measured_speed),
        _row("memory, GiB", "{:.2f}", (plan.memory.reserved / GIB,), measured_memory),
        "",
        (
            f"measured: medians of {len(windows)} windows of metrics.log_freq steps; memory is the"
            " peak of the first rank, reserved on a GPU, and resident with Python and torch on"
            " a CPU"
        ),
    ]


def _row(name: str, form: str, planned: Sequence[float], measured: float) -> str:
    """Return a line of the table. planned: (nominal, least, most), or the nominal value alone."""
    nominal, *ends = planned
    interval = " to ".join(form.format(end) for end in ends)
    values = f"{form.format(nominal):>10}{interval:>22}{form.format(measured):>12}"
    return f"{name:<20}{values}{nominal / measured:>20.2f}"
