"""Read the lines that a run has written to metrics.jsonl and events.jsonl. Imports no torch.

    for step, values in read_metrics(folder / "metrics.jsonl").items(): ...
    for window in timed_windows(folder / "metrics.jsonl"): ...

All files of a run are read by tools/report/run_record.py.
"""

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENDINGS = {"done", "stop", "failed", "error", "killed"}  # events that end an attempt
EVENT_KEYS = ("step", "event", "time", "text", "facts")  # of a line of events.jsonl
FILE_OF_EXPERTS = "experts.json"  # the shares of experts (features/moe/load.py)
MAX_LINE_BYTES = 2**20  # a longer line is not valid


class RecordError(ValueError):
    """An error: a folder has no run, or a damaged one.

    The message names the file, the line, and what to do.
    """


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield (number, object) of each line that is not empty; None for a line that is not an object,
    which a kill may leave.

    A line of more than MAX_LINE_BYTES gives None, too. A missing file has no lines.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number in itertools.count(1):
            line = file.readline(MAX_LINE_BYTES)
            if not line:
                return
            if len(line) == MAX_LINE_BYTES:
                while len(file.readline(MAX_LINE_BYTES)) == MAX_LINE_BYTES:
                    pass
                yield number, None
            elif line.strip():
                yield number, _parse_object(line)


def _parse_object(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None


# metrics.jsonl: a line is a step or a resume


def read_metrics(path: Path) -> dict[int, dict[str, float]]:
    """Return {step: values} of metrics.jsonl, with the last values of each step.

    A torn line is skipped.
    """
    metrics: dict[int, dict[str, float]] = {}
    for entry in valid_entries(path):
        if "resumed_from" in entry:
            resumed_from = entry["resumed_from"]
            metrics = {step: values for step, values in metrics.items() if step <= resumed_from}
        else:
            metrics.setdefault(entry["step"], {}).update(entry)
    return dict(sorted(metrics.items()))


def last_start(path: Path) -> int:
    """Return the step that the last run in metrics.jsonl resumed from, 0 if it did not resume."""
    for entry in reversed(valid_entries(path)):
        if "resumed_from" in entry:
            return entry["resumed_from"]
    return 0


def valid_entries(path: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl that are a step or a resume."""
    return [entry for _, entry in read_lines(path) if entry is not None and not _fault(entry)]


def _fault(entry: Mapping[str, Any]) -> str:
    """Return why a line is neither a step nor a resume, or "" if it is one."""
    name = "resumed_from" if "resumed_from" in entry else "step"
    if type(entry.get(name)) is not int or entry[name] < 0:
        return f"{name} = {entry.get(name)!r:.60}: expected a whole number from 0 on"
    for name, value in entry.items():
        if value is not None and type(value) not in (int, float):
            return f"{name} = {value!r:.60}: expected a number"
    return ""


@dataclass(frozen=True)
class Window:
    """The steps from one line of metrics.jsonl to the next."""

    begins_after: int  # step
    steps: int
    seconds: float
    tokens: float  # of all ranks, padding excluded
    tokens_per_second: float  # of one rank
    memory_gib: float


def timed_windows(path: Path) -> list[Window]:
    """Return the windows of metrics.jsonl since the last start, without the first one, in which
    code is compiled.
    """
    entries: list[dict[str, Any]] = []
    for entry in valid_entries(path):
        if "resumed_from" in entry:
            entries = []
        else:
            entries.append(entry)
    needed = ("step_time", "tps", "tokens_seen", "memory_gib")
    timed = [entry for entry in entries if all(entry.get(name) is not None for name in needed)]
    windows = []
    for before, entry in itertools.pairwise(timed):
        steps = entry["step"] - before["step"]
        windows.append(
            Window(
                begins_after=before["step"],
                steps=steps,
                seconds=steps * entry["step_time"],
                tokens=entry["tokens_seen"] - before["tokens_seen"],
                tokens_per_second=entry["tps"],
                memory_gib=entry["memory_gib"],
            )
        )
    return windows


def read_rows(path: Path) -> tuple[list[dict[str, float]], list[dict[str, Any]], list[str]]:
    """Return (rows by step, a "resume" event for each resume, notes on torn lines) of
    metrics.jsonl.

    A row also has "tokens" and "hours" of training so far. Raises RecordError for a line that is
    not valid, unless a kill has cut it off.
    """
    rows: dict[int, dict[str, float]] = {}
    resumes: list[dict[str, Any]] = []
    notes: list[str] = []
    lines = list(read_lines(path))
    for index, (number, entry) in enumerate(lines):
        if entry is None:
            next_entry = lines[index + 1][1] if index + 1 < len(lines) else {"resumed_from": 0}
            if next_entry is None or "resumed_from" not in next_entry:
                raise RecordError(
                    f"{path}, line {number}: not valid JSON, in the middle of the file; remove the"
                    " line"
                )
            notes.append(
                f"{path.name}, line {number}, was cut off when the run was killed, and is skipped"
            )
            continue
        if fault := _fault(entry):
            raise RecordError(
                f"{path}, line {number}: neither a step nor a resume: {fault}; remove the line"
            )
        if "resumed_from" in entry:
            resumes.append(_resume_event(entry["resumed_from"], rows))
            rows = {step: row for step, row in rows.items() if step <= entry["resumed_from"]}
        else:
            finite = {
                name: value
                for name, value in entry.items()
                if value is None or math.isfinite(value)
            }
            rows.setdefault(entry["step"], {}).update(finite)
    ordered = [rows[step] for step in sorted(rows)]
    _add_totals(ordered)
    return ordered, resumes, notes


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
    for number, entry in read_lines(path):
        if entry is None or not _is_event(entry):
            notes.append(f"{path.name}, line {number}, is not an event, and is skipped")
            continue
        event = {name: entry[name] for name in EVENT_KEYS if name in entry}
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


def _is_event(entry: Mapping[str, Any]) -> bool:
    texts = (entry.get("time") or "", entry.get("text") or "", entry.get("event"))
    facts = entry.get("facts") or {}
    return (
        type(entry.get("step")) is int
        and all(isinstance(text, str) for text in texts)
        and isinstance(facts, dict)
        and all(isinstance(fact, str) for fact in facts.values())
    )
