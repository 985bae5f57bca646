"""Reads what a run has left in its folder; needs the standard library only.

for step, values in read_metrics(folder / "metrics.jsonl").items(): ...
run = read_run(folder, "a name")          # all of it; raises RecordError for what is damaged
"""

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titan_lite.config.toml import read_toml

ENDS = {"done", "stop", "failed", "error"}  # events of an attempt that ended with a word


class RecordError(ValueError):
    """A folder without a run, or with a damaged one; the message names the file, the line, and what to do."""


@dataclass
class RunRecord:
    folder: Path
    name: str
    rows: list[dict[str, float]]  # by step: what counts of metrics.jsonl, with "tokens" and "hours" of training so far
    events: list[dict[str, Any]]  # as in events.jsonl, with the resumes
    recipe: dict[str, Any] = field(default_factory=dict)  # {"training.steps": 1000, ...}; empty without config.toml
    receipts: list[dict] = field(default_factory=list)  # compile.json
    timelines: list[dict[str, Any]] = field(default_factory=list)  # of `_timelines`
    notes: list[str] = field(default_factory=list)  # on lines left out

    def column(self, name: str) -> list[float]:
        return [row[name] for row in self.rows if row.get(name) is not None]


@contextmanager
def as_written(path: Path) -> Iterator[None]:
    """Within: a file that is not JSON, or lacks something, or has it of another type, is RecordError."""
    try:
        yield
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise RecordError(f"{path}: not what a run writes ({error!r}); remove the file, and the page is made without") from None
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{path}: not valid JSON: {error}; remove the file, and the page is made without") from None


def read_lines(path: Path) -> Iterator[tuple[int, dict | None]]:
    """(number, object) of each line that is not empty; None for a line that is not an object, as a kill may leave one."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                entry = None
            yield number, entry if isinstance(entry, dict) else None


def read_metrics(path: Path) -> dict[int, dict[str, float]]:
    """metrics.jsonl -> {step: values}, of each step what the last run that did it wrote. A torn line is left out."""
    result: dict[int, dict[str, float]] = {}
    for _, entry in read_lines(path):
        if entry and "resumed_from" in entry:
            result = {step: values for step, values in result.items() if step <= entry["resumed_from"]}
        elif entry and "step" in entry:
            result.setdefault(entry["step"], {}).update(entry)
    return dict(sorted(result.items()))


def step_seconds(path: Path) -> list[float]:
    """metrics.jsonl -> step_time of each window since the run was last started, but the first, in which code is compiled."""
    entries = [entry for _, entry in read_lines(path) if entry]
    since = max((place for place, entry in enumerate(entries) if "resumed_from" in entry), default=0)
    return [entry["step_time"] for entry in entries[since:] if entry.get("step_time") is not None][1:]


def read_run(folder: Path, name: str) -> RunRecord:
    """Raises RecordError, and ConfigError for a damaged config.toml."""
    if not folder.is_dir():
        raise RecordError(f"{folder}: no such folder; name a run's job.dump_folder, such as outputs/debug_model")
    path = folder / "metrics.jsonl"
    if not path.is_file():
        inside = sorted(str(found.parent) for found in folder.glob("*/metrics.jsonl"))
        hint = f"; the runs in it are {', '.join(inside)}" if inside else "; name a run's job.dump_folder"
        raise RecordError(f"{folder} has no metrics.jsonl{hint}")
    rows, resumes, notes = read_rows(path)
    if not rows:
        raise RecordError(f"{path} has no step yet; a run writes one every metrics.log_freq steps")
    events, more = read_events(folder / "events.jsonl")
    # Both are written at a start, resumes once there are metrics. Where events.jsonl is missing, resumes are alone.
    starts = [event for event in events if event["event"] == "start"]
    for event, resume in zip(reversed(starts), reversed(resumes), strict=False):
        event.update(resume)
        if lost := event.get("lost"):
            lost["step"] = max(lost["step"], resume["reached"])
    run = RunRecord(folder, name, rows, [*resumes[: max(0, len(resumes) - len(starts))], *events], notes=notes + more)
    tables = read_toml(folder / "config.toml") if (folder / "config.toml").is_file() else {}
    sections = {section: keys for section, keys in tables.items() if isinstance(keys, dict)}
    run.recipe = {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}
    run.receipts = _read_json(folder / "compile.json", list)
    with as_written(folder / "timeline.json"):
        run.timelines = _timelines(_read_json(folder / "timeline.json", dict))
    return run


def read_rows(path: Path) -> tuple[list[dict[str, float]], list[dict[str, Any]], list[str]]:
    """(rows by step, a "resume" event for each resume, notes on torn lines) of metrics.jsonl. Raises RecordError."""
    rows: dict[int, dict[str, float]] = {}
    resumes, notes = [], []
    for (number, entry), (_, after) in itertools.pairwise([*read_lines(path), (0, {"resumed_from": 0})]):
        if entry is None:
            if after is None or "resumed_from" not in after:
                raise RecordError(f"{path}, line {number}: not valid JSON, in the midst of the file; remove the line")
            notes.append(f"{path.name}, line {number}, was cut short when the run was killed, and is left out")
            continue
        if type(entry.get("resumed_from", entry.get("step"))) is not int:
            raise RecordError(f"{path}, line {number}: neither a step nor a resume: {_short(json.dumps(entry))}; remove the line")
        if "resumed_from" in entry:
            since = entry["resumed_from"]
            again = [step for step in rows if step > since]
            text = f"resumed from step {since}" if since else "started again from the beginning"
            text += f"; steps {since + 1} to {max(again)} of before do not count" if again else ""
            resumes.append({"event": "resume", "step": since, "text": text, "reached": max(rows, default=0)})
            rows = {step: values for step, values in rows.items() if step <= since}
            continue
        for name, value in entry.items():
            if value is not None and type(value) not in (int, float):
                raise RecordError(f"{path}, line {number}: {name} = {_short(json.dumps(value))} is no number; remove the line")
        rows.setdefault(entry["step"], {}).update(entry)
    ordered = [rows[step] for step in sorted(rows)]
    tokens, hours, last = 0.0, 0.0, 0.0
    for row in ordered:
        tokens = max(tokens, row.get("tokens_seen") or 0)
        if row.get("step_time") is not None:
            hours += (row["step"] - last) * row["step_time"] / 3600
            last = row["step"]
        row["tokens"], row["hours"] = tokens, hours
    return ordered, resumes, notes


def read_events(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The events in their order, with one for each attempt that ended without a word; and notes on lines left out."""
    events: list[dict[str, Any]] = []
    notes, going = [], False  # an attempt that has not ended
    for number, entry in read_lines(path) if path.is_file() else ():
        if entry is None or type(entry.get("step")) is not int or not isinstance(entry.get("event"), str):
            notes.append(f"{path.name}, line {number}, is no event, and is left out")
            continue
        event = entry["event"]
        if going and event in ("start", "restart"):
            last = max(events[-1]["step"], entry["step"] if event == "restart" else 0)
            entry["lost"] = {"event": "failed", "step": last, "text": "ended without a word, as a run does that is killed"}
            events.append(entry["lost"])
            going = False
        going = event == "start" or (going and event not in ENDS)
        events.append(entry)
    return events, notes


def _read_json(path: Path, kind: type) -> Any:
    """A list or dict, empty where there is no file. Raises RecordError."""
    with as_written(path):
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else kind()
        if not isinstance(found, kind):
            raise TypeError(f"a {type(found).__name__}")
    return found


def _timelines(trace: dict) -> list[dict[str, Any]]:
    """A Chrome trace, each process a pipeline rank: title, lanes, graphs and, in milliseconds, spans [number of the lane, start,
    length, exposed, name], computation without gaps as one."""
    found: dict[int, dict[str, Any]] = {}

    def of(event: dict) -> dict[str, Any]:
        return found.setdefault(event.get("pid", 0), {"title": "", "lanes": [], "graphs": [], "spans": []})

    events = trace.get("traceEvents", ())
    for event in events:
        if event.get("ph") == "M" and event["name"] == "process_name":
            of(event)["title"] = event["args"]["name"]
        elif event.get("ph") == "M" and event["name"] == "thread_name":
            of(event)["lanes"].append(event["args"]["name"])
    for bar in sorted((event for event in events if event.get("ph") == "X"), key=lambda bar: bar["ts"]):
        start, length, graph, lane = bar["ts"] / 1e3, bar["dur"] / 1e3, bar["cat"], bar["tid"]
        spans, graphs = of(bar)["spans"], of(bar)["graphs"]
        if not graphs or graphs[-1]["name"] != graph:
            graphs.append({"name": graph, "start": start, "end": start})
        graphs[-1]["end"] = max(graphs[-1]["end"], start + length)
        if lane:
            spans.append([lane, start, length, bar["args"]["exposed_us"] / 1e3, bar["name"]])
            continue
        before = next((span for span in reversed(spans) if span[0] == 0), None)
        if before and start - before[1] - before[2] < 1e-6 and before[4] == f"{graph}: computation":
            before[2] = start + length - before[1]
        else:
            spans.append([0, start, length, 0, f"{graph}: computation"])
    return [found[pid] for pid in sorted(found) if found[pid]["spans"]]


def _short(text: str) -> str:
    return text if len(text) < 60 else f"{text[:57]}..."
