"""Read all that a run has written to its folder. Imports no torch.

run = read_run(folder, "a name")          # raises ConfigError if there is none
run.rows[-1]["loss"], run.recipe["training.steps"]
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from titan_lite.config import ConfigError
from titan_lite.config.load import read_toml, without_gone
from titan_lite.config.nearest import RENAMED
from titan_lite.metrics.run_files import FILE_OF_EXPERTS, read_events, read_rows

T = TypeVar("T")


@dataclass
class RunRecord:
    """A run, as its folder has it."""

    folder: Path
    name: str
    rows: list[dict[str, float]]  # of metrics.jsonl by step, with "tokens" and "hours" so far
    events: list[dict[str, Any]]  # of events.jsonl, and the resumes
    # {"training.steps": 1000, ...}; empty without config.toml
    recipe: dict[str, Any] = field(default_factory=dict)
    compile_reports: list[dict[str, Any]] = field(default_factory=list)  # compile.json
    experts: dict[str, Any] = field(default_factory=dict)  # experts.json; empty of a dense model
    notes: list[str] = field(default_factory=list)  # on lines that were skipped
    # of the steps that were saved, those that are there; None if the folder of steps is not
    steps_there: list[int] | None = None

    def column(self, name: str) -> list[float]:
        return [row[name] for row in self.rows if row.get(name) is not None]


def read_run(folder: Path, name: str) -> RunRecord:
    """Read a run's folder. Raises ConfigError if it has no run, or a damaged file."""
    path = _metrics_file(folder)
    rows, resumes, notes = read_rows(path)
    if not rows:
        raise ConfigError(f"{path} has no step yet; a run writes one every metrics.log_freq steps")
    events, more_notes = read_events(folder / "events.jsonl")
    run = RunRecord(
        folder=folder,
        name=name,
        rows=rows,
        events=_with_resumes(events, resumes),
        recipe=_read_recipe(folder / "config.toml"),
        notes=notes + more_notes,
    )
    run.steps_there = _steps_there(run)
    run.compile_reports = _read_json(folder / "compile.json", default=[])
    run.experts = _read_json(folder / FILE_OF_EXPERTS, default={})
    return run


def _steps_there(run: RunRecord) -> list[int] | None:
    """Return the steps that the run's folder has; None if it has been copied without any."""
    folder = run.folder / run.recipe.get("checkpoint.folder", "checkpoint")
    saved = {event["step"] for event in run.events if event["event"] == "checkpoint"}
    if not folder.is_dir():
        return None
    return sorted(step for step in saved if (folder / f"step-{step}").is_dir())


def _metrics_file(folder: Path) -> Path:
    """Return metrics.jsonl of a run's folder. Raises ConfigError if there is none."""
    if not folder.is_dir():
        raise ConfigError(
            f"{folder}: no such folder; use a run's job.dump_folder, such as outputs/debug_model"
        )
    path = folder / "metrics.jsonl"
    if path.is_file():
        return path
    runs = sorted(str(inner.parent) for inner in folder.glob("*/metrics.jsonl"))
    hint = "use a run's job.dump_folder"
    if runs:
        hint = f"use one of its runs: {', '.join(runs)}"
    raise ConfigError(f"{folder} has no metrics.jsonl; {hint}")


def _with_resumes(
    events: list[dict[str, Any]], resumes: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the events, with what metrics.jsonl says of resumes.

    A start writes an event with the step it begins after, and a resume once there are metrics.
    Resumes before the first start come first: without events.jsonl there are only resumes. Other
    resumes without a start are of a replica group that takes over the files of a lost one, of
    which events tell.
    """
    starts = [event for event in events if event["event"] == "start"]
    before_starts: list[dict[str, Any]] = []
    for resume in reversed(resumes):
        if not starts:
            before_starts.insert(0, resume)
            continue
        places = [i for i, start in enumerate(starts) if start["step"] == resume["step"]]
        if not places:
            continue
        start = starts[places[-1]]
        starts = starts[: places[-1]]
        start.update(resume)
        if lost := start.get("lost"):
            lost["step"] = max(lost["step"], resume["reached"])
    return [*before_starts, *events]


def _read_recipe(path: Path) -> dict[str, Any]:
    """Return {"section.key": value} of a run's config.toml, with the names that keys have now;
    empty if there is none.
    """
    if not path.is_file():
        return {}
    values = {
        f"{section}.{key}": value
        for section, keys in without_gone(read_toml(path)).items()
        if isinstance(keys, dict)  # not [[phases]]
        for key, value in keys.items()
    }
    return {RENAMED.get(key, key): value for key, value in values.items()}


def _read_json(path: Path, default: T) -> T:
    """Return the content of a file, or `default` if there is none.

    Raises ConfigError if it is not JSON, as of a run that writes it just now.
    """
    if not path.is_file():
        return default
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(
            f"{path}: not valid JSON ({error}); remove the file to make the page without it"
        ) from None
