"""Say which share of a run's time went into productive steps, and where the rest went.

    spent = time_spent(folder, groups=1)    # {"productive steps": 10_600.0, ...}
    goodput_line(spent)  # "goodput: 91.2% of 3.2 h in productive steps; start 4.1%, saving 3.0%"

The times are those of metrics.jsonl and events.jsonl, over all starts of the run:

    start         from the process to its first step, and what its first steps take longer
    validation
    evaluation    scores in tasks
    saving        that training waits for
    waiting       of a replica group for others (fault_tolerance)
    recovery      of a group that takes the state of another one
    undone        steps that did not count, since a group was lost in them
    recomputed    steps after the checkpoint that a later start resumed from
    missing       groups that were lost: their share of productive steps
    not running   the rest: between two starts, and what a killed process or a launcher did last

Imports no torch.
"""

import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from titan_lite.metrics.run_files import read_events, valid_entries

SECONDS_OF = "seconds_"  # the beginning of a metric: seconds since the line before, by their cause
COUNTED = "productive steps"
LEAST_SHARE = 5e-4  # of a cause that is named


def goodput_line(spent: Mapping[str, float]) -> str:
    """Return what `time_spent` returns in a line; "" without a step."""
    if not spent[COUNTED]:
        return ""
    total = sum(spent.values())
    shares = {cause: seconds / total for cause, seconds in spent.items()}
    line = f"goodput: {shares.pop(COUNTED):.1%} of {duration(total)} in {COUNTED}"
    lost = [
        f"{cause} {share:.1%}"
        for cause, share in sorted(shares.items(), key=lambda item: -item[1])
        if share > LEAST_SHARE
    ]
    return f"{line}; {', '.join(lost)}" if lost else line


def duration(seconds: float) -> str:
    """Return seconds as hours, minutes or seconds."""
    if seconds > 7200:
        return f"{seconds / 3600:,.1f} h"
    return f"{seconds / 60:.1f} min" if seconds > 120 else f"{seconds:.1f} s"


@dataclass
class _Window:
    """The steps of a process from one line of metrics.jsonl to the next."""

    first: int
    last: int
    seconds: float  # of a step
    groups: float  # that took part


def time_spent(folder: Path, groups: int = 1) -> dict[str, float]:
    """Return the seconds of all starts of a run so far, by what they went into.

    groups: that it has if none is lost.
    """
    spent: dict[str, float] = defaultdict(float)
    spent[COUNTED] = 0.0
    kept: list[_Window] = []
    attempt: list[_Window] = []
    step = 0
    for entry in valid_entries(folder / "metrics.jsonl"):
        if "resumed_from" in entry:
            kept += _without_start(attempt, spent)
            step = entry["resumed_from"]
            kept = _without_recomputed(kept, step, spent)
            attempt = []
            continue
        for name, value in entry.items():
            if name.startswith(SECONDS_OF) and value is not None:
                spent[name.removeprefix(SECONDS_OF)] += value
        if entry.get("step_time") is not None:
            last = entry["step"]
            window = _Window(step + 1, last, entry["step_time"], entry.get("copies", groups))
            attempt.append(window)
            step = last
    kept += _without_start(attempt, spent)
    for window in kept:
        seconds = (window.last - window.first + 1) * window.seconds
        present = min(1.0, window.groups / groups)
        spent[COUNTED] += seconds * present
        spent["missing"] += seconds * (1 - present)
    wall_time, starts = _wall_time_and_starts(folder)
    spent["start"] += starts
    spent["not running"] = max(0.0, wall_time - sum(spent.values()))
    return dict(spent)


def _without_start(attempt: list[_Window], spent: dict[str, float]) -> list[_Window]:
    """Return the windows of a process, of which the first one takes as long as later ones; what it
    takes longer, as for compilation, counts to the start.
    """
    if len(attempt) < 2:
        return attempt
    first, *later = attempt
    usual = min(first.seconds, statistics.median(window.seconds for window in later))
    steps = first.last - first.first + 1
    spent["start"] += steps * (first.seconds - usual)
    return [_Window(first.first, first.last, usual, first.groups), *later]


def _without_recomputed(
    windows: list[_Window], step: int, spent: dict[str, float]
) -> list[_Window]:
    """Return the steps up to `step`; those after it are recomputed."""
    kept = []
    for window in windows:
        last = min(window.last, step)
        steps = max(0, last - window.first + 1)
        spent["recomputed"] += (window.last - window.first + 1 - steps) * window.seconds
        if steps:
            kept.append(_Window(window.first, last, window.seconds, window.groups))
    return kept


def _wall_time_and_starts(folder: Path) -> tuple[float, float]:
    """Return (seconds from the first start to the last event, seconds of all starts)."""
    moments: list[float] = []
    starts: list[float] = []
    is_starting = False  # a run, and not a replica group beside others
    events, _ = read_events(folder / "events.jsonl")
    for event in events:
        if "time" in event:  # that of a kill is not known
            moments.append(datetime.fromisoformat(event["time"]).timestamp())
        if event["event"] == "start":
            is_starting = True
        if is_starting and "seconds" in event:
            starts.append(_seconds_before_first_step(event["seconds"]))
            is_starting = False
    if not moments:
        return 0.0, 0.0
    first_start = starts[0] if starts else 0.0  # its event comes at the end
    return max(moments) - min(moments) + first_start, sum(starts)


def _seconds_before_first_step(parts: Mapping[str, float]) -> float:
    """Return the seconds of a start (start_times.py) that no line of metrics.jsonl has."""
    return sum(
        seconds for part, seconds in parts.items() if part not in ("first step", "validation")
    )
