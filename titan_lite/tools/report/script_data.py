"""Choose what the page's script draws of a run: its curves and marks, as JSON."""

import math
from collections.abc import Mapping
from typing import Any

from titan_lite.tools.report.markup import rounded
from titan_lite.tools.report.run_record import RunRecord

MAX_ROWS = 4000  # of metrics that are drawn for a run; of more, windows keep their extremes
EXTREMES = ("loss", "grad_norm", "tps", "step_time", "memory_gib", "data_wait")
AXES = {"step", "time", "tokens", "hours"}  # of a row of metrics; the rest are curves
# of each layer; a picture has the loads (sections.experts)
OF_LAYERS = ("expert_balance/", "expert_load_max/", "expert_load_min/")
OF_TASKS = "evaluation/"  # which tasks have as scores
MARKED = ("resume", "checkpoint", "skip", "failed", "stop", "slow", "warning")  # page.html: KINDS
NOT_MARKED = ("start", "first step", "done", "phase done", "restart")  # events


def script_data(run: RunRecord, number: int) -> dict[str, Any]:
    """Return what the script draws of run `number` of the page."""
    rows = thin(run.rows)
    curves = {
        name
        for row in rows
        for name, value in row.items()
        if value is not None and not name.startswith(OF_LAYERS)
    } - AXES
    return {
        "name": run.name,
        "number": number,
        "step": [row["step"] for row in rows],
        "tokens": [row["tokens"] for row in rows],
        "hours": [rounded(row["hours"]) for row in rows],
        "values": {name: [rounded(row.get(name)) for row in rows] for name in sorted(curves)},
        "marks": [mark(event) for event in run.events if event["event"] not in NOT_MARKED],
    }


def mark(event: Mapping[str, Any]) -> dict[str, Any]:
    kind = "failed" if event["event"] in ("error", "killed", "copy killed") else event["event"]
    if kind not in MARKED:  # of another version
        kind = "other"
    return {"kind": kind, "step": event["step"], "text": str(event.get("text", ""))}


def thin(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """Return about MAX_ROWS rows at most, so that no spike is lost.

    Kept are the first row, the last one of each window, those with a validation or an evaluation,
    and those with the least and the greatest value of each of EXTREMES.
    """
    if len(rows) <= MAX_ROWS:
        return rows
    width = math.ceil(len(rows) * 2 * len(EXTREMES) / MAX_ROWS)
    kept = {0}
    for begin in range(0, len(rows), width):
        window = range(begin, min(begin + width, len(rows)))
        kept.add(window[-1])
        kept.update(with_value(rows, window, "validation_loss"))
        kept.update(i for i in window if any(name.startswith(OF_TASKS) for name in rows[i]))
        for name in EXTREMES:
            indices = with_value(rows, window, name)
            if indices:
                kept.add(min(indices, key=lambda index: rows[index][name]))
                kept.add(max(indices, key=lambda index: rows[index][name]))
    return [rows[index] for index in sorted(kept)]


def with_value(rows: list[dict[str, float]], window: range, name: str) -> list[int]:
    return [index for index in window if rows[index].get(name) is not None]
