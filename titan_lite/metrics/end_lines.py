"""Log the results of compilation, and make the lines at the end of a run.

log_compile_reports(reports, dump_folder)
for line in end_lines(dump_folder, RunEnd(...)): logger.info(line)
"""

import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_lite.compile.report import CompileReport, describe, write_reports
from titan_lite.logging import logger
from titan_lite.metrics.goodput import goodput_line, time_spent
from titan_lite.metrics.run_files import last_start, read_metrics
from titan_lite.metrics.timelines import write_timelines


def log_compile_reports(reports: Sequence[CompileReport], folder: Path) -> None:
    """Log what the compile stage did, and write compile.json and timeline.json."""
    if not reports:
        return
    for line in describe(reports):
        logger.info(line)
    try:
        write_reports(reports, folder)
        write_timelines(reports, folder)
    except OSError as error:  # does not end the run
        logger.warning(f"no compile.json or timeline.json: {error.filename}: {error.strerror}")


@dataclass(frozen=True)
class RunEnd:
    """The end of a run."""

    stopped: bool  # by a signal; else done
    step: int
    tokens: int  # that were counted, over all ranks
    skipped_steps: int
    saved_steps: Sequence[int]  # on disk
    replica_groups: int = 1  # if none is lost
    bad_documents: str = ""  # words on documents that were left out
    tensorboard: bool = False
    command: str = ""  # that goes on with a stopped run


def end_lines(dump_folder: Path, end: RunEnd) -> list[str]:
    """Return the lines at the end of a run, with the metrics of metrics.jsonl."""
    path = dump_folder / "metrics.jsonl"
    metrics = read_metrics(path)
    lines = [ending(end, metrics)]
    lines += speed(metrics, since=last_start(path))
    lines += filter(None, [goodput_line(time_spent(dump_folder, end.replica_groups))])
    saved = ", ".join(f"step-{step}" for step in end.saved_steps)
    lines.append(f"checkpoints: {saved or 'none'}")
    folder = shlex.quote(str(dump_folder))
    look = f"to look at: python -m titan_lite report {folder}"
    if end.tensorboard:
        look += f"; tensorboard --logdir {folder}"
    lines.append(look)
    if end.stopped:
        lines.append(f"to resume: {end.command}")
    return lines


def ending(end: RunEnd, metrics: Mapping[int, Mapping[str, Any]]) -> str:
    """Return the line that says how the run ended, with its last losses."""
    how = "stopped" if end.stopped else "done"
    skipped = "1 step" if end.skipped_steps == 1 else f"{end.skipped_steps} steps"
    line = f"{how}: step {end.step}, {end.tokens:,} tokens, {skipped} skipped{end.bad_documents}"
    for name in ("loss", "validation_loss"):
        steps = [step for step, values in metrics.items() if values.get(name) is not None]
        if steps:
            last = steps[-1]
            line += f"; {name.replace('_', ' ')} {metrics[last][name]:.4f}"
            if last != end.step:
                line += f" at step {last}"
    return line


def speed(metrics: Mapping[int, Mapping[str, Any]], since: int) -> list[str]:
    """Return a line on the steps after `since`, none if there are none."""

    def values_of(name: str) -> list[float]:
        return [
            values[name]
            for step, values in metrics.items()
            if step > since and values.get(name) is not None
        ]

    tps = values_of("tps")
    if not tps:
        return []
    line = f"speed: {statistics.median(tps):,.0f} tokens per second and device"
    if mfu := values_of("mfu"):
        line += f", MFU {statistics.median(mfu):.1f}%"
    if full := values_of("mfu_full_attention"):
        line += f" ({statistics.median(full):.1f}% with attention counted as full)"
    line += f", waiting for data {statistics.median(values_of('data_wait')):.1f}% (medians)"
    line += f"; peak memory {max(values_of('memory_gib')):.2f} GiB"
    return [line]
