"""Log the results of compilation, and make the lines at the end of a run.

log_compile_reports(reports, dump_folder)
for line in end_lines(dump_folder, "done", ...): logger.info(line)
"""

import statistics
from collections.abc import Sequence
from pathlib import Path

from titan_lite.compile.report import (
    CompileReport,
    describe,
    milliseconds,
    rank_timelines,
    write_reports,
)
from titan_lite.logging import logger
from titan_lite.metrics.run_files import last_start, read_metrics
from titan_lite.metrics.timelines import write_timelines


def log_compile_reports(reports: Sequence[CompileReport], folder: Path) -> None:
    """Log what the compile stage did, and write compile.json and the timelines."""
    if not reports:
        return
    for line in describe(reports):
        logger.info(line)
    try:
        write_reports(reports, folder)
        write_timelines(reports, folder)
    except OSError as error:  # does not end the run
        logger.warning(f"no compile.json or timeline: {error.filename}: {error.strerror}")


def end_lines(
    dump_folder: Path,
    how: str,
    *,
    step: int,
    tokens: int,
    skipped: int,
    reports: Sequence[CompileReport],
    steps_on_disk: Sequence[int],
    bad_documents: str = "",
    tensorboard: bool = False,
    again: str = "",
) -> list[str]:
    """Return the lines at the end of a run, with figures of metrics.jsonl.

    how: "done" or "stopped". again: the command that resumes the run. The speed is that of the
    steps after the last resume.
    """
    path = dump_folder / "metrics.jsonl"
    rows, since = read_metrics(path), last_start(path)
    column = {
        name: [row[name] for at, row in rows.items() if at > since and row.get(name) is not None]
        for name in ("tps", "mfu", "mfu_full_attention", "data_wait", "memory_gib")
    }
    losses = ""
    for name in ("loss", "validation_loss"):
        if latest := [(at, row[name]) for at, row in rows.items() if row.get(name) is not None][
            -1:
        ]:
            (at, loss), *_ = latest
            losses += (
                f"; {name.replace('_', ' ')} {loss:.4f}{f' at step {at}' if at != step else ''}"
            )
    lines = [
        f"{how}: step {step}, {tokens:,} tokens, {skipped} step{'s' * (skipped != 1)}"
        f" skipped{bad_documents}{losses}"
    ]
    if column["tps"]:
        mfu = f", MFU {statistics.median(column['mfu']):.1f}%" if column["mfu"] else ""
        if column["mfu_full_attention"]:
            mfu += (
                f" ({statistics.median(column['mfu_full_attention']):.1f}% with attention counted"
                " as full)"
            )
        lines.append(
            f"speed: {statistics.median(column['tps']):,.0f} tokens per second and device{mfu},"
            f" waiting for data {statistics.median(column['data_wait']):.1f}% (medians); peak"
            f" memory {max(column['memory_gib']):.2f} GiB"
        )
    if ranks := rank_timelines(reports):
        times = [timeline for timelines in ranks.values() for timeline in timelines]
        exposed, seconds = (
            milliseconds(sum(getattr(each, name) for each in times))
            for name in ("waited", "seconds")
        )
        over = f" over {len(ranks)} pipeline ranks" if len(ranks) > 1 else ""
        lines.append(
            f"communication: {exposed} of {seconds} exposed{over}, estimated (compile.json)"
        )
    lines.append(f"checkpoints: {', '.join(f'step-{step}' for step in steps_on_disk) or 'none'}")
    board = f"; tensorboard --logdir {dump_folder}" if tensorboard else ""
    lines.append(f"to look at: python -m titan_lite report {dump_folder}{board}")
    if how == "stopped":
        lines.append(f"to go on: {again}")
    return lines
