"""Reads what a run has left in its folder; needs the standard library only.

for step, values in read_metrics(folder / "metrics.jsonl").items(): ...
run = read_run(folder, "a name")          # all of it; raises RecordError for what is damaged
"""

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titan_lite.config.toml import read_toml
from titan_lite.outside import (
    ANY,
    BYTES,
    COUNT,
    NUMBER,
    WORD,
    Damaged,
    Form,
    faults,
    maybe,
    one_of,
    open_regular,
    optional,
    read_json,
)

ENDS = {"done", "stop", "failed", "error"}  # events of an attempt that ended with a word
LONGEST = 1 << 20  # bytes of a line
_VALUE = Form("a number", lambda value: NUMBER.holds(value) or (type(value) is float and not math.isfinite(value)))
_ROW = {"step": BYTES, WORD: maybe(_VALUE)}
_RESUME = {"resumed_from": BYTES}
_EVENT = {"step": BYTES, "event": WORD, "time": maybe(WORD), "text": maybe(WORD)}
_TIMES = {"communication": NUMBER, "exposed": NUMBER, "seconds": NUMBER, WORD: ANY}
_RECEIPT = {
    "graph": WORD,
    "before": {WORD: COUNT},
    "after": [{"kind": WORD, "fqns": [WORD], "nbytes": COUNT, **dict.fromkeys(("seconds", "under", "exposed"), maybe(NUMBER))}],
    "timeline": maybe(_TIMES),
    "pp_rank": maybe(COUNT),
}
_SPAN = {"ph": one_of("X"), "name": WORD, "cat": WORD, "ts": NUMBER, "dur": NUMBER, "tid": COUNT, "args": {"exposed_us": NUMBER}}
_NAMED = {"ph": one_of("M"), "name": WORD, "args": {"name": WORD}}
_TRACE = {"traceEvents": [(_SPAN | {"pid": optional(COUNT)}, _NAMED | {"pid": optional(COUNT)})]}


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


def read_lines(path: Path) -> Iterator[tuple[int, dict | None]]:
    """(number, object) of each line that is not empty; None for a line that is not an object, as a kill may leave one.

    A line of more than LONGEST bytes is none, either. Raises Damaged: no regular file. A file that is not there has none.
    """
    if not path.exists() or path.is_dir():
        return
    with open_regular(path) as file:
        for number in itertools.count(1):
            line = file.readline(LONGEST)
            if len(line) == LONGEST:
                while len(file.readline(LONGEST)) == LONGEST:
                    pass
                line = b"too long"
            if not line:
                return
            if not line.strip():
                continue
            try:
                entry = json.loads(line.decode("utf-8", "replace"))
            except (ValueError, RecursionError):
                entry = None
            yield number, entry if isinstance(entry, dict) else None


def read_metrics(path: Path) -> dict[int, dict[str, float]]:
    """metrics.jsonl -> {step: values}, of each step what the last run that did it wrote. A torn line is left out."""
    result: dict[int, dict[str, float]] = {}
    for entry in _entries(path):
        if "resumed_from" in entry:
            result = {step: values for step, values in result.items() if step <= entry["resumed_from"]}
        else:
            result.setdefault(entry["step"], {}).update(entry)
    return dict(sorted(result.items()))


def _entries(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that are a step or a resume."""
    return [entry for _, entry in read_lines(path) if entry is not None and not _wrong(entry)]


def _wrong(entry: dict[str, Any]) -> str:
    """Why a line is neither a step nor a resume; empty: it is one."""
    return next(faults(entry, _RESUME if "resumed_from" in entry else _ROW), "")


def step_seconds(path: Path, after: int = 0) -> list[float]:
    """metrics.jsonl -> step_time of each window since the run was last started, but the first, in which code is compiled, and but
    those that begin before step `after` is done."""
    entries = _entries(path)
    since = max((place for place, entry in enumerate(entries) if "resumed_from" in entry), default=0)
    windows = [entry for entry in entries[since:] if entry.get("step_time") is not None]
    return [window["step_time"] for before, window in itertools.pairwise(windows) if before["step"] >= after]


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
    try:
        json.dumps(run.recipe, default=str)
    except (ValueError, RecursionError) as error:  # a number of too many digits, or nested too deeply
        raise RecordError(f"{folder / 'config.toml'}: not a run's recipe: {error}") from None
    run.receipts = _read_json(folder / "compile.json", [_RECEIPT], [])
    run.timelines = _timelines(_read_json(folder / "timeline.json", _TRACE, {"traceEvents": []}))
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
        if wrong := _wrong(entry):
            raise RecordError(f"{path}, line {number}: neither a step nor a resume: {wrong}; remove the line")
        if "resumed_from" in entry:
            since = entry["resumed_from"]
            again = [step for step in rows if step > since]
            text = f"resumed from step {since}" if since else "started again from the beginning"
            text += f"; steps {since + 1} to {max(again)} of before do not count" if again else ""
            resumes.append({"event": "resume", "step": since, "text": text, "reached": max(rows, default=0)})
            rows = {step: values for step, values in rows.items() if step <= since}
            continue
        finite = {name: value for name, value in entry.items() if value is None or math.isfinite(value)}
        rows.setdefault(entry["step"], {}).update(finite)
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
        if entry is None or any(faults(entry, _EVENT)):
            notes.append(f"{path.name}, line {number}, is no event, and is left out")
            continue
        entry = {name: entry[name] for name in _EVENT if name in entry}
        event = entry["event"]
        if going and event in ("start", "restart"):
            last = max(events[-1]["step"], entry["step"] if event == "restart" else 0)
            entry["lost"] = {"event": "failed", "step": last, "text": "ended without a word, as a run does that is killed"}
            events.append(entry["lost"])
            going = False
        going = event == "start" or (going and event not in ENDS)
        events.append(entry)
    return events, notes


def _read_json(path: Path, form: Any, otherwise: Any) -> Any:
    """The content of a file, or, where there is none, `otherwise`. Raises RecordError."""
    try:
        return read_json(path, form) if path.exists() else otherwise
    except Damaged as damage:
        raise RecordError(f"{path.parent}: {damage}; remove the file, and the page is made without") from None


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
