"""Read the lines that a run has written to metrics.jsonl and events.jsonl. Imports no torch.

    for step, values in read_metrics(folder / "metrics.jsonl").items(): ...
    for window in timed_windows(folder / "metrics.jsonl"): ...

All files of a run are read by tools/report/run_record.py.
"""

import itertools
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

# events that end an attempt, or a phase, after which another start follows
ENDINGS = {"done", "phase done", "stop", "failed", "error", "killed"}
FILE_OF_EXPERTS = "experts.json"  # the shares of experts (features/moe/load.py)


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield (number, object) of each line that is not empty; None for a line that is not an object,
    which a kill may leave.

    A missing file has no lines.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, _parse_object(line)


def _parse_object(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


# metrics.jsonl: a line is a step or a resume


def read_metrics(path: Path) -> dict[int, dict[str, float]]:
    """Return {step: values} of metrics.jsonl, with the last values of each step.

    A torn line is skipped.
    """
    return dict(sorted(_read_history(path).rows.items()))


def last_start(path: Path) -> int:
    """Return the step that the last run in metrics.jsonl resumed from, 0 if it did not resume."""
    for entry in reversed(valid_entries(path)):
        if "resumed_from" in entry:
            return entry["resumed_from"]
    return 0


def valid_entries(path: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl that are a step or a resume."""
    return [entry for _, entry in read_lines(path) if entry is not None and _is_entry(entry)]


def _is_entry(line: Mapping[str, Any]) -> bool:
    """Return True if a line of metrics.jsonl is a step or a resume."""
    return "step" in line or "resumed_from" in line


@dataclass(frozen=True)
class Window:
    """The steps from one line of metrics.jsonl to the next."""

    steps: int
    seconds: float
    tokens: float  # of all ranks, padding excluded
    tokens_per_second: float  # of one rank
    memory_gib: float


def timed_windows(path: Path) -> list[Window]:
    """Return the windows of metrics.jsonl since the last start that trained, without the first one,
    in which code is compiled.
    """
    entries: list[dict[str, Any]] = []
    resumed = False
    for entry in valid_entries(path):
        if "resumed_from" in entry:
            resumed = True
            continue
        if resumed:
            entries = []
            resumed = False
        entries.append(entry)
    needed = ("step_time", "tps", "tokens_seen", "memory_gib")
    timed = [entry for entry in entries if all(entry.get(name) is not None for name in needed)]
    windows = []
    for before, entry in itertools.pairwise(timed):
        steps = entry["step"] - before["step"]
        windows.append(
            Window(
                steps=steps,
                seconds=steps * entry["step_time"],
                tokens=entry["tokens_seen"] - before["tokens_seen"],
                tokens_per_second=entry["tps"],
                memory_gib=entry["memory_gib"],
            )
        )
    return windows


def read_rows(path: Path) -> tuple[list[dict[str, float]], list[dict[str, Any]], list[str]]:
    """Return (rows by step, a "resume" event for each resume, notes on skipped lines) of
    metrics.jsonl.

    A row also has "tokens" and "hours" of training so far.
    """
    history = _read_history(path)
    ordered = [history.rows[step] for step in sorted(history.rows)]
    _add_totals(ordered)
    return ordered, history.resumes, history.notes


class _History(NamedTuple):
    """What metrics.jsonl tells of a run. A resume replaces the steps after it."""

    rows: dict[int, dict[str, float]]  # the values of a step, by step
    resumes: list[dict[str, Any]]  # an event each
    notes: list[str]  # on lines that were skipped


def _read_history(path: Path) -> _History:
    rows: dict[int, dict[str, float]] = {}
    resumes: list[dict[str, Any]] = []
    notes: list[str] = []
    for number, entry in read_lines(path):
        if entry is None or not _is_entry(entry):
            notes.append(f"{path.name}, line {number}, is not a step, and is skipped")
        elif "resumed_from" in entry:
            resumes.append(_resume_event(entry["resumed_from"], rows))
            rows = {step: row for step, row in rows.items() if step <= entry["resumed_from"]}
        else:
            rows.setdefault(entry["step"], {}).update(entry)
    return _History(rows, resumes, notes)


def _resume_event(resumed_from: int, rows: Mapping[int, Any]) -> dict[str, Any]:
    """Return an event for a resume. rows: those of the steps before it, by step."""
    text = "started again from the beginning"
    if resumed_from:
        text = f"resumed from step {resumed_from}"
    last = max(rows, default=0)
    if last > resumed_from:
        text += f"; the earlier steps {resumed_from + 1} to {last} do not count"
    return {"event": "resume", "step": resumed_from, "text": text, "reached": last}


def _add_totals(rows: list[dict[str, float]]) -> None:
    """Add "tokens" and "hours" of training so far to the rows, which are ordered by step."""
    tokens = 0.0
    hours = 0.0
    last_timed_step = 0.0
    for row in rows:
        tokens = max(tokens, row.get("tokens_seen") or 0)
        if row.get("step_time") is not None:
            hours += (row["step"] - last_timed_step) * row["step_time"] / 3600
            last_timed_step = row["step"]
        row["tokens"] = tokens
        row["hours"] = hours


# events.jsonl


def read_events(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the events in order, and notes on skipped lines.

    An attempt that ended without an event gets one, which the event of the next start has as
    "lost", too.
    """
    events: list[dict[str, Any]] = []
    notes: list[str] = []
    is_running = False  # an attempt has not ended
    for number, event in read_lines(path):
        if event is None or "event" not in event:
            notes.append(f"{path.name}, line {number}, is not an event, and is skipped")
            continue
        kind = event["event"]
        if is_running and kind in ("start", "restart"):
            last_step = event["step"] if kind == "restart" else 0
            event["lost"] = {
                "event": "failed",
                "step": max(events[-1]["step"], last_step),
                "text": "ended without a message, such as by SIGKILL",
            }
            events.append(event["lost"])
            is_running = False
        is_running = kind == "start" or (is_running and kind not in ENDINGS)
        events.append(event)
    return events, notes


def step_reached(folder: Path) -> int:
    """Return the newest step of which the run's last start has written; 0 if there is none."""
    steps = [0]
    with suppress(OSError):
        steps += read_metrics(folder / "metrics.jsonl")
        events, _ = read_events(folder / "events.jsonl")
        steps += [event["step"] for event in events[-1:]]
    return max(steps)
