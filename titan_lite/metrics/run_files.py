"""Read what a run has written to its folder. Imports no torch.

for step, values in read_metrics(folder / "metrics.jsonl").items(): ...
run = read_run(folder, "a name")          # everything; raises RecordError for a damaged file
"""

import itertools
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titan_lite.config.load import read_toml

ENDS = {"done", "stop", "failed", "error"}  # events that end an attempt
LONGEST = 1 << 20  # bytes in a line
EVENT = ("step", "event", "time", "text")  # keys of a line of events.jsonl


class RecordError(ValueError):
    """An error: a folder has no run, or a damaged one.

    The message names the file, the line, and what to do.
    """


@dataclass
class RunRecord:
    folder: Path
    name: str
    rows: list[
        dict[str, float]
    ]  # by step: the valid lines of metrics.jsonl, with "tokens" and "hours" of training so far
    events: list[dict[str, Any]]  # those of events.jsonl, and the resumes
    recipe: dict[str, Any] = field(
        default_factory=dict
    )  # {"training.steps": 1000, ...}; empty without config.toml
    compile_reports: list[dict] = field(default_factory=list)  # compile.json
    timelines: list[dict[str, Any]] = field(default_factory=list)  # from `_timelines`
    notes: list[str] = field(default_factory=list)  # on lines that were skipped

    def column(self, name: str) -> list[float]:
        return [row[name] for row in self.rows if row.get(name) is not None]


def read_lines(path: Path) -> Iterator[tuple[int, dict | None]]:
    """Yield (number, object) of each line that is not empty; None for a line that is not an object,
    which a kill may leave.

    A line of more than LONGEST bytes gives None, too. A missing file has no lines.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
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
    """Return {step: values} of metrics.jsonl, with the last values of each step.

    A torn line is skipped.
    """
    result: dict[int, dict[str, float]] = {}
    for entry in _entries(path):
        if "resumed_from" in entry:
            result = {
                step: values for step, values in result.items() if step <= entry["resumed_from"]
            }
        else:
            result.setdefault(entry["step"], {}).update(entry)
    return dict(sorted(result.items()))


def last_start(path: Path) -> int:
    """Return the step from which the last run in metrics.jsonl went on, 0 if it did not resume."""
    return next(
        (entry["resumed_from"] for entry in reversed(_entries(path)) if "resumed_from" in entry), 0
    )


def _entries(path: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl that are a step or a resume."""
    return [entry for _, entry in read_lines(path) if entry is not None and not _wrong(entry)]


def _wrong(entry: dict[str, Any]) -> str:
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
    entries = _entries(path)
    since = max(
        (place for place, entry in enumerate(entries) if "resumed_from" in entry), default=0
    )
    names = ("step_time", "tps", "tokens_seen", "memory_gib")
    timed = [
        entry for entry in entries[since:] if all(entry.get(name) is not None for name in names)
    ]
    return [
        Window(
            begins_after=before["step"],
            steps=entry["step"] - before["step"],
            seconds=(entry["step"] - before["step"]) * entry["step_time"],
            tokens=entry["tokens_seen"] - before["tokens_seen"],
            tokens_per_second=entry["tps"],
            memory_gib=entry["memory_gib"],
        )
        for before, entry in itertools.pairwise(timed)
    ]


def read_run(folder: Path, name: str) -> RunRecord:
    """Read a run's folder. Raises RecordError, and ConfigError for a damaged config.toml."""
    if not folder.is_dir():
        raise RecordError(
            f"{folder}: no such folder; use a run's job.dump_folder, such as outputs/debug_model"
        )
    path = folder / "metrics.jsonl"
    if not path.is_file():
        inside = sorted(str(found.parent) for found in folder.glob("*/metrics.jsonl"))
        hint = (
            f"; use one of its runs: {', '.join(inside)}"
            if inside
            else "; use a run's job.dump_folder"
        )
        raise RecordError(f"{folder} has no metrics.jsonl{hint}")
    rows, resumes, notes = read_rows(path)
    if not rows:
        raise RecordError(f"{path} has no step yet; a run writes one every metrics.log_freq steps")
    events, more = read_events(folder / "events.jsonl")
    # A start writes both, a resume once there are metrics. Without events.jsonl there are only
    # resumes.
    starts = [event for event in events if event["event"] == "start"]
    for event, resume in zip(reversed(starts), reversed(resumes), strict=False):
        event.update(resume)
        if lost := event.get("lost"):
            lost["step"] = max(lost["step"], resume["reached"])
    run = RunRecord(
        folder,
        name,
        rows,
        [*resumes[: max(0, len(resumes) - len(starts))], *events],
        notes=notes + more,
    )
    tables = read_toml(folder / "config.toml") if (folder / "config.toml").is_file() else {}
    sections = {section: keys for section, keys in tables.items() if isinstance(keys, dict)}
    run.recipe = {
        f"{section}.{key}": value
        for section, keys in sections.items()
        for key, value in keys.items()
    }
    try:
        json.dumps(run.recipe, default=str)
    except (
        ValueError,
        RecursionError,
    ) as error:  # a number of too many digits, or nested too deeply
        raise RecordError(f"{folder / 'config.toml'}: not a run's recipe: {error}") from None
    run.compile_reports = _read_json(folder / "compile.json", [])
    trace = _read_json(folder / "timeline.json", {})
    with _damage(folder / "compile.json"):
        for report in run.compile_reports:
            _check_compile_report(report)
    with _damage(folder / "timeline.json"):
        run.timelines = _timelines(trace)
    return run


def read_rows(path: Path) -> tuple[list[dict[str, float]], list[dict[str, Any]], list[str]]:
    """Return (rows by step, a "resume" event for each resume, notes on torn lines) of
    metrics.jsonl. Raises RecordError.
    """
    rows: dict[int, dict[str, float]] = {}
    resumes, notes = [], []
    for (number, entry), (_, after) in itertools.pairwise(
        [*read_lines(path), (0, {"resumed_from": 0})]
    ):
        if entry is None:
            if after is None or "resumed_from" not in after:
                raise RecordError(
                    f"{path}, line {number}: not valid JSON, in the middle of the file; remove the"
                    " line"
                )
            notes.append(
                f"{path.name}, line {number}, was cut off when the run was killed, and is skipped"
            )
            continue
        if wrong := _wrong(entry):
            raise RecordError(
                f"{path}, line {number}: neither a step nor a resume: {wrong}; remove the line"
            )
        if "resumed_from" in entry:
            since = entry["resumed_from"]
            again = [step for step in rows if step > since]
            text = f"resumed from step {since}" if since else "started again from the beginning"
            text += f"; the earlier steps {since + 1} to {max(again)} do not count" if again else ""
            resumes.append(
                {"event": "resume", "step": since, "text": text, "reached": max(rows, default=0)}
            )
            rows = {step: values for step, values in rows.items() if step <= since}
            continue
        finite = {
            name: value for name, value in entry.items() if value is None or math.isfinite(value)
        }
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
    """Return the events in order, with one for each attempt that ended without an event, and notes
    on skipped lines.
    """
    events: list[dict[str, Any]] = []
    notes, going = [], False  # an attempt that has not ended
    for number, entry in read_lines(path) if path.is_file() else ():
        if entry is None or not _is_event(entry):
            notes.append(f"{path.name}, line {number}, is not an event, and is skipped")
            continue
        entry = {name: entry[name] for name in EVENT if name in entry}
        event = entry["event"]
        if going and event in ("start", "restart"):
            last = max(events[-1]["step"], entry["step"] if event == "restart" else 0)
            entry["lost"] = {
                "event": "failed",
                "step": last,
                "text": "ended without a message, such as by SIGKILL",
            }
            events.append(entry["lost"])
            going = False
        going = event == "start" or (going and event not in ENDS)
        events.append(entry)
    return events, notes


def _is_event(entry: dict[str, Any]) -> bool:
    texts = (entry.get("time") or "", entry.get("text") or "", entry.get("event"))
    return type(entry.get("step")) is int and all(isinstance(text, str) for text in texts)


def _check_compile_report(report: dict[str, Any]) -> None:
    """Raise KeyError for an entry of compile.json without what the page shows, and TypeError for
    another type.
    """
    missing = [key for key in ("graph", "before", "after") if key not in report]
    if report.get("timeline") is not None:
        times = ("communication", "exposed", "seconds")
        missing += [key for key in times if key not in report["timeline"]]
    if missing:
        raise KeyError(missing[0])


def _read_json(path: Path, otherwise: Any) -> Any:
    """Return the content of a file, or `otherwise`, which is of its type, if there is none.

    Raises RecordError.
    """
    if not path.is_file():
        return otherwise
    with _damage(path):
        content = json.loads(path.read_text(encoding="utf-8"))
        if type(content) is not type(otherwise):
            raise TypeError(f"it is a {type(content).__name__}")
        return content


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    """Return a context that reads what a file has.

    Raises RecordError if it is not what a run writes.
    """
    try:
        yield
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise RecordError(
            f"{path}: not as a run writes it ({why:.200}); remove the file to make the page"
            " without it"
        ) from None


def _timelines(trace: dict) -> list[dict[str, Any]]:
    """Return a timeline for each process (pipeline rank) of a Chrome trace: title, lanes, graphs,
    and spans [number of the lane, start, length, exposed, name] in milliseconds. Computation
    without gaps is one span.
    """
    found: dict[int, dict[str, Any]] = {}

    def of(event: dict) -> dict[str, Any]:
        return found.setdefault(
            event.get("pid", 0), {"title": "", "lanes": [], "graphs": [], "spans": []}
        )

    events = trace.get("traceEvents", ())
    for event in events:
        if event.get("ph") == "M" and event["name"] == "process_name":
            of(event)["title"] = event["args"]["name"]
        elif event.get("ph") == "M" and event["name"] == "thread_name":
            of(event)["lanes"].append(event["args"]["name"])
    for bar in sorted(
        (event for event in events if event.get("ph") == "X"), key=lambda bar: bar["ts"]
    ):
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
