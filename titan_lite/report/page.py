"""A run, or several beside each other, as one HTML page: curves, faults, buckets, recipes. It needs no network, and no torch.

    python -m titan_lite.report RUN_FOLDER [RUN_FOLDER ...] [--output FILE]

RUN_FOLDER is a run's job.dump_folder; the page is written to report.html in the first one, or to FILE. It has what the run wrote:

    metrics.jsonl    every curve; resumes                 events.jsonl     checkpoints, skipped steps, warnings, failures
    config.toml      the recipe, as it was resolved       compile.json     buckets; timeline.json: when each travels

Works while the run goes on. report.html beside this file is the page's frame, its style and its script.
"""

import argparse
import html
import itertools
import json
import math
import re
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from titan_lite.config import KEYS
from titan_lite.metrics.records import RecordError, RunRecord, as_written, read_run

MOST_ROWS = 4000  # of a run that are drawn; of more, windows of them keep their extremes
EXTREMES = ("loss", "grad_norm", "tps", "step_time", "memory_gib", "data_wait")
WORDS = {
    "start": "started",
    "stop": "stopped",
    "skip": "step skipped",
    "slow": "slow rank",
    "resume": "resumed",
    "error": "failed",
    "restart": "restarted",
}


def name_runs(folders: Sequence[Path]) -> list[str]:
    """The folders' names, with as many parents as tell them apart. Raises RecordError for one that is named twice."""
    parts = [folder.resolve().parts for folder in folders]
    for folder, own in zip(folders, parts, strict=True):
        if parts.count(own) > 1:
            raise RecordError(f"{folder} is named twice; name each run once")
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(own[-depth:]) for own in parts]
        if len(set(names)) == len(names):
            break
    return names


# What the script draws


def thin(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """At most about MOST_ROWS of them: of each window its last row, and those with extremes, so that no spike is lost."""
    if len(rows) <= MOST_ROWS:
        return rows
    width = math.ceil(len(rows) * 2 * len(EXTREMES) / MOST_ROWS)
    kept = {0, len(rows) - 1}
    for begin in range(0, len(rows), width):
        window = range(begin, min(begin + width, len(rows)))
        kept |= {place for place in window if rows[place].get("validation_loss") is not None} | {window[-1]}
        for name in EXTREMES:
            there = [place for place in window if rows[place].get(name) is not None]
            if there:
                kept |= {choose(there, key=lambda place: rows[place][name]) for choose in (min, max)}
    return [rows[place] for place in sorted(kept)]


def drawn(run: RunRecord, number: int) -> dict[str, Any]:
    rows = thin(run.rows)
    names = {name for row in rows for name, value in row.items() if value is not None}
    names -= {"step", "time", "tokens", "hours"}
    return {
        "name": run.name,
        "number": number,
        "step": [row["step"] for row in rows],
        "tokens": [row["tokens"] for row in rows],
        "hours": [_round(row["hours"]) for row in rows],
        "values": {name: [_round(row.get(name)) for row in rows] for name in sorted(names)},
        "marks": [
            {"kind": kind, "step": event["step"], "text": str(event.get("text", ""))}
            for event in run.events
            if (kind := "failed" if event["event"] == "error" else event["event"]) not in ("start", "done", "restart")
        ],
        "timeline": run.timeline and {**run.timeline, "spans": [[*map(_round, span)] for span in run.timeline["spans"]]},
    }


def _round(value: Any) -> Any:
    return float(f"{value:.7g}") if isinstance(value, float) and math.isfinite(value) else value


# What is on the page without the script


def page(runs: Sequence[RunRecord]) -> str:
    parts = [
        f"<h1>{_text(', '.join(run.name for run in runs))}</h1>",
        f'<div class="muted">titan_lite report, written {datetime.now().astimezone():%Y-%m-%d %H:%M %Z}</div>',
        *(f'<p class="note">{_text(run.name)}: {_text(note)}</p>' for run in runs for note in run.notes),
        f'<div class="cards">{"".join(_card(run, number) for number, run in enumerate(runs))}</div>',
        "<noscript><p class='note'>The curves are drawn by a script, which is turned off here.</p></noscript>",
        '<h2>Curves</h2><p class="muted">Point at one to read all of them; drag to look closer.</p>',
        '<div id="bar"></div><div id="charts"></div>',
        _events(runs),
        _buckets(runs),
        _recipes(runs),
    ]
    data = json.dumps([drawn(run, number) for number, run in enumerate(runs)], separators=(",", ":"))
    title = "titan_lite: " + ", ".join(run.name for run in runs)
    # In a script element only "<" could end it.
    filled = {"title": _text(title), "body": "\n".join(parts), "data": data.replace("<", "\\u003c")}
    frame = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda found: filled[found[1]], frame)


def _card(run: RunRecord, number: int) -> str:
    """What a run came to, in figures."""
    last = run.rows[-1]
    steps = run.recipe.get("training.steps")
    starts = [event for event in run.events if event["event"] in ("start", "resume") and _when(event)]
    validation, loss = run.column("validation_loss"), run.column("loss")
    lines = {"steps": f"{last['step']:,}" + (f" of {steps:,}" if steps else ""), "tokens": _large(last["tokens"])}
    if loss:
        lines["loss"] = f"{loss[-1]:.4f}"
    if validation:
        lines["validation loss"] = f"{validation[-1]:.4f}" + (
            f" (best {min(validation):.4f})" if min(validation) < validation[-1] else ""
        )
    for name, title, form in (
        ("tps", "tokens a second and device", "{:,.0f}"),
        ("mfu", "MFU", "{:.1f}%"),
        ("data_wait", "waiting for data", "{:.1f}%"),
    ):
        if values := run.column(name):
            lines[title] = form.format(statistics.median(values))
    if values := run.column("memory_gib"):
        lines["peak memory"] = f"{max(values):.2f} GiB"
    with as_written(run.folder / "compile.json"):
        if exposed := exposed_share(run.receipts):
            lines["exposed (estimated)"] = exposed
    if run.column("skipped_steps"):
        lines["steps skipped"] = f"{max(run.column('skipped_steps')):,.0f}"
    lines["training time"] = f"{last['hours']:.2f} h" if last["hours"] > 2 else f"{60 * last['hours']:.1f} min"
    if starts:
        lines["started"] = _when(starts[0])[:16]
    if resumed := sum(event["event"] == "resume" for event in run.events):
        lines["resumed"] = f"{resumed} time{'s' * (resumed > 1)}"
    listed = "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in lines.items())
    return (
        f'<section class="card" style="--run: var(--c{number % 6})"><h3>{_text(run.name)}</h3>'
        f'<div class="muted">{_text(run.recipe.get("job.description", ""))}</div><dl>{listed}</dl></section>'
    )


def exposed_share(receipts: Iterable[Mapping[str, Any]]) -> str:
    """Of compile.json: seconds a pass of forward and backward in which nothing computes; empty where none communicates."""
    times = [r["timeline"] for r in receipts if r.get("timeline") and r.get("graph") != "inference" and not r.get("pp_rank")]
    communication, exposed, seconds = (sum(time[name] for time in times) for name in ("communication", "exposed", "seconds"))
    return f"{1e3 * exposed:.3g} of {1e3 * seconds:.3g} ms" if communication else ""


def _events(runs: Sequence[RunRecord]) -> str:
    several = len(runs) > 1
    rows = []
    for run in runs:
        for event in run.events:
            if event["event"] == "checkpoint":
                continue
            name = WORDS.get(event["event"], event["event"])
            cells = [run.name] * several + [f"{event['step']:,}", name, _when(event), str(event.get("text", ""))]
            looks = ["name"] * several + ["figure", "whole", "wide whole", "lines"]
            rows.append(_row("td", cells, looks))
    saved = [
        f"{_text(run.name)}: checkpoints of steps {', '.join(f'{step:,}' for step in steps)}"
        for run in runs
        if (steps := sorted({event["step"] for event in run.events if event["event"] == "checkpoint"}))
    ]
    if not rows and not saved:
        return ""
    head = _row("th", ["run"] * several + ["step", "what", "when", ""], [""] * several + ["figure", "", "wide", ""])
    table = f"<table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>" if rows else ""
    return f"<h2>Starts, faults and resumes</h2>{table}" + "".join(f'<p class="muted">{line}</p>' for line in saved)


def _buckets(runs: Sequence[RunRecord]) -> str:
    parts = []
    for number, run in enumerate(runs):
        if not run.receipts:
            continue
        parts.append(f"<h3>{_text(run.name)}</h3>")
        if run.timeline:
            parts.append(
                f'<figure><svg id="timeline-{number}" height="100" role="img" aria-label="timeline of {_text(run.name)}"></svg>'
                '<figcaption class="readout"></figcaption></figure>'
            )
        with as_written(run.folder / "compile.json"):
            parts += map(_receipt, run.receipts)
    if not parts:
        return ""
    legend = (
        '<p class="muted">As estimated for one pass: computation above, parameters\' all-gathers and reductions below it; in red '
        "what of these nothing computes under.</p>"
    )
    return f"<h2>Buckets</h2>{legend if any(run.timeline for run in runs) else ''}{''.join(parts)}"


def _receipt(receipt: Mapping[str, Any]) -> str:
    left = receipt["after"]
    counts = {kind: sum(each["kind"] == kind for each in left) for kind in receipt["before"]}
    merged = ", ".join(f"{before} {kind} → {counts[kind]}" for kind, before in receipt["before"].items())
    where = "" if receipt.get("pp_rank") is None else f"pipeline rank {receipt['pp_rank']}, "
    rows = [
        (
            each["kind"],
            each["fqns"][0] + (f" and {len(each['fqns']) - 1} more" if len(each["fqns"]) > 1 else ""),
            f"{each['nbytes'] / 2**20:,.2f}",
            *("" if each[name] is None else f"{1e3 * each[name]:.3g}" for name in ("seconds", "under", "exposed")),
        )
        for each in left
    ]
    summary = f"{where}{receipt['graph']}: {merged or 'no collectives of parameters'}"
    looks = ("", "", "figure", "figure", "figure wide", "figure")
    titles = ("kind", "parameters", "MiB", "ms", "under, ms", "exposed, ms")
    body = "".join(_row("td", row, looks) for row in rows)
    table = f"<table><thead>{_row('th', titles, looks)}</thead><tbody>{body}</tbody></table>" if rows else ""
    return f"<details><summary>{_text(summary)}</summary>{table}</details>"


def _recipes(runs: Sequence[RunRecord]) -> str:
    """Where they differ, or where one differs from the defaults; then all of it."""
    given = [run for run in runs if run.recipe]
    if not given:
        return ""
    keys = [*KEYS, *sorted({key for run in given for key in run.recipe} - KEYS.keys())]
    keys = [key for key in keys if any(key in run.recipe for run in given)]

    def defaults(key: str) -> Any:
        return list(value) if isinstance(value := KEYS[key].default if key in KEYS else None, tuple) else value

    if len(given) > 1:
        own = [key for key in keys if key != "job.dump_folder" and len({_value(run.recipe.get(key)) for run in given}) > 1]
        title = "Where the recipes differ" if own else "The recipes are the same"
    else:
        own = [key for key in keys if given[0].recipe[key] != defaults(key)]
        title = "The recipe, where it is not the default"

    def table(chosen: Sequence[str]) -> str:
        head = _row("th", ["key", *(run.name for run in given)])
        body = "".join(_row("td", [key, *(_value(run.recipe.get(key)) for run in given)]) for key in chosen)
        return f"<table><thead>{head}</thead><tbody>{body}</tbody></table>" if chosen else ""

    return f"<h2>{title}</h2>{table(own)}<details><summary>every key</summary>{table(keys)}</details>"


def _row(tag: str, cells: Sequence[str], looks: Sequence[str] = ()) -> str:
    """Of a table. looks: classes of the cells."""
    classes = (f' class="{look}"' if look else "" for look in looks)
    inside = itertools.zip_longest(cells, classes, fillvalue="")
    return f"<tr>{''.join(f'<{tag}{look}>{_text(cell)}</{tag}>' for cell, look in inside)}</tr>"


def _large(number: float) -> str:
    """1234567 -> 1.23M"""
    for size, sign in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= size:
            return f"{number / size:.3g}{sign}"
    return f"{number:,.0f}"


def _value(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)


def _when(event: Mapping[str, Any]) -> str:
    """An ISO time in the reader's zone; empty where there is none."""
    try:
        return f"{datetime.fromisoformat(event['time']).astimezone():%Y-%m-%d %H:%M:%S}"
    except (KeyError, TypeError, ValueError):
        return ""


def _text(text: Any) -> str:
    return html.escape(str(text))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m titan_lite.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUN_FOLDER", help="job.dump_folder of a run")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the page (default: report.html in the first folder)")
    options = parser.parse_args(arguments)
    try:
        runs = [read_run(folder, name) for folder, name in zip(options.folders, name_runs(options.folders), strict=True)]
        text = page(runs)
        path = options.output or options.folders[0] / "report.html"
        path.write_text(text, encoding="utf-8")
    except RecordError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    print(f"{path} written: open it in a browser")
    return 0
