"""Make one HTML page of one or several runs: curves, faults, buckets, recipes.

Needs neither a network nor torch.

    python -m titan_lite report RUN_FOLDER [RUN_FOLDER ...] [--output FILE]

RUN_FOLDER is a run's job.dump_folder; the page is written to report.html in the first one, or to
FILE. It shows these files:

    metrics.jsonl    every curve; resumes                 events.jsonl     checkpoints, skipped steps, warnings, failures
    config.toml      the resolved recipe                  compile.json     buckets; timeline.json: their timeline

The run may still be going on. page.html has the frame of the page, its style and its script.
"""

import html
import itertools
import json
import math
import operator
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from titan_lite.cli import Parser, command
from titan_lite.config import KEYS, ConfigError
from titan_lite.metrics.run_files import RecordError
from titan_lite.tools.report.run_record import RunRecord, read_run

MOST_ROWS = 4000  # rows drawn for a run; of more rows, windows keep their extremes
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
    """Return the folders' names, with as many parents as needed to be unique.

    Raises RecordError for a repeated folder.
    """
    parts = [folder.resolve().parts for folder in folders]
    for folder, own in zip(folders, parts, strict=True):
        if parts.count(own) > 1:
            raise RecordError(f"{folder} is given twice; use each run once")
    named = (
        ["/".join(own[-depth:]) for own in parts] for depth in range(1, max(map(len, parts)) + 1)
    )
    return next(names for names in named if len(set(names)) == len(names))


# Data for the script


def thin(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """Return about MOST_ROWS rows at most: the last one of each window, and those with extremes, so
    that no spike is lost.
    """
    if len(rows) <= MOST_ROWS:
        return rows
    width = math.ceil(len(rows) * 2 * len(EXTREMES) / MOST_ROWS)
    kept = {0, len(rows) - 1}
    for begin in range(0, len(rows), width):
        window = range(begin, min(begin + width, len(rows)))
        kept |= {place for place in window if rows[place].get("validation_loss") is not None} | {
            window[-1]
        }
        for name in EXTREMES:
            there = [place for place in window if rows[place].get(name) is not None]
            if there:
                kept |= {
                    choose(there, key=lambda place: rows[place][name]) for choose in (min, max)
                }
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
            if (kind := "failed" if event["event"] == "error" else event["event"])
            not in ("start", "done", "restart")
        ],
        "timelines": [
            {**each, "spans": [[*map(_round, span)] for span in each["spans"]]}
            for each in run.timelines
        ],
    }


def _round(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return float(f"{value:.7g}") if math.isfinite(value) else None  # JSON has no NaN


# The page without the script


def page(runs: Sequence[RunRecord]) -> str:
    parts = [
        f"<h1>{_text(', '.join(run.name for run in runs))}</h1>",
        (
            '<div class="muted">titan_lite report, written'
            f" {datetime.now().astimezone():%Y-%m-%d %H:%M %Z}</div>"
        ),
        *(
            f'<p class="note">{_text(run.name)}: {_text(note)}</p>'
            for run in runs
            for note in run.notes
        ),
        (
            "<div"
            f' class="cards">{"".join(_card(run, number) for number, run in enumerate(runs))}</div>'
        ),
        (
            "<noscript><p class='note'>The curves are drawn by a script, which is turned off"
            " here.</p></noscript>"
        ),
        (
            '<h2>Curves</h2><p class="muted">Point at one to read all of them; drag to look'
            " closer.</p>"
        ),
        '<div id="bar"></div><div id="charts"></div>',
        _sources(runs),
        _events(runs),
        _buckets(runs),
        _recipes(runs),
    ]
    data = json.dumps(
        [drawn(run, number) for number, run in enumerate(runs)], separators=(",", ":")
    )
    title = "titan_lite: " + ", ".join(run.name for run in runs)
    # Only "<" could end the script element.
    filled = {"title": _text(title), "body": "\n".join(parts), "data": data.replace("<", "\\u003c")}
    frame = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda found: filled[found[1]], frame)


def _card(run: RunRecord, number: int) -> str:
    """Return the results of a run; figures without a value are omitted."""

    def figure(name: str, choose: Callable[[list[float]], float], form: str) -> str:
        return form.format(choose(values)) if (values := run.column(name)) else ""

    newest = operator.itemgetter(-1)
    last, steps = run.rows[-1], run.recipe.get("training.steps")
    validation = run.column("validation_loss") or [math.nan]
    starts = [
        time
        for event in run.events
        if event["event"] in ("start", "resume") and (time := _when(event))
    ]
    resumed = sum(event["event"] == "resume" for event in run.events)
    lines = {
        "steps": f"{last['step']:,}" + (f" of {steps:,}" if type(steps) is int else ""),
        "tokens": _large(last["tokens"]),
        "loss": figure("loss", newest, "{:.4f}"),
        "validation loss": (
            figure("validation_loss", newest, "{:.4f}")
            + (f" (best {min(validation):.4f})" if min(validation) < validation[-1] else "")
        ),
        "tokens per second and device": figure("tps", statistics.median, "{:,.0f}"),
        "MFU": figure("mfu", statistics.median, "{:.1f}%"),
        "waiting for data": figure("data_wait", statistics.median, "{:.1f}%"),
        "peak memory": figure("memory_gib", max, "{:.2f} GiB"),
        "exposed (estimated)": exposed_share(run.compile_reports),
        "steps skipped": figure("skipped_steps", max, "{:,.0f}"),
        "training time": (
            f"{last['hours']:.2f} h" if last["hours"] > 2 else f"{60 * last['hours']:.1f} min"
        ),
        "started": starts[0][:16] if starts else "",
        "resumed": f"{resumed} time{'s' * (resumed > 1)}" if resumed else "",
    }
    listed = "".join(
        f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in lines.items() if value
    )
    return (
        f'<section class="card" style="--run: var(--c{number % 6})"><h3>{_text(run.name)}</h3>'
        "<div"
        f' class="muted">{_text(run.recipe.get("job.description", ""))}</div><dl>{listed}</dl></section>'
    )


def exposed_share(reports: Iterable[Mapping[str, Any]]) -> str:
    """Return the share of forward and backward, over all pipeline ranks, in which only
    communication runs (compile.json); "" if there is no communication.
    """
    times = [r["timeline"] for r in reports if r.get("timeline") and r.get("graph") != "inference"]
    exposed = sum(time.get("waited", time["exposed"]) for time in times)
    seconds, communication = (
        sum(time[name] for time in times) for name in ("seconds", "communication")
    )
    return f"{1e3 * exposed:.3g} of {1e3 * seconds:.3g} ms" if communication or exposed else ""


def _sources(runs: Sequence[RunRecord]) -> str:
    """Return the table of tokens and losses of each source of a mixture."""
    several, rows = len(runs) > 1, []
    for run in runs:
        tokens = {
            key: run.column(key)[-1]
            for key in dict.fromkeys(itertools.chain(*run.rows))
            if key.startswith("tokens_by_source/") and run.column(key)
        }
        for key, count in tokens.items():
            name, share = key.partition("/")[2], count / (sum(tokens.values()) or 1)
            losses = [run.column(f"{what}loss_by_source/{name}") for what in ("", "validation_")]
            cells = [
                name,
                _large(count),
                f"{100 * share:.1f}%",
                *(f"{each[-1]:.4f}" if each else "" for each in losses),
            ]
            rows.append(
                _row("td", [run.name] * several + cells, ["name"] * several + ["", *["figure"] * 4])
            )
    head = ["run"] * several + ["source", "tokens", "share", "loss", "validation loss"]
    return f"<h2>Sources</h2>{_table(_row('th', head), rows)}" if rows else ""


def _events(runs: Sequence[RunRecord]) -> str:
    several = len(runs) > 1
    looks = ["name"] * several + ["figure", "whole", "wide whole", "lines"]
    rows = []
    for run in runs:
        for event in (event for event in run.events if event["event"] != "checkpoint"):
            kind = WORDS.get(event["event"], event["event"])
            cells = [f"{event['step']:,}", kind, _when(event), str(event.get("text", ""))]
            rows.append(_row("td", [run.name] * several + cells, looks))
    saved = [
        f"{_text(run.name)}: checkpoints of steps {', '.join(f'{step:,}' for step in steps)}"
        for run in runs
        if (
            steps := sorted(
                {event["step"] for event in run.events if event["event"] == "checkpoint"}
            )
        )
    ]
    if not rows and not saved:
        return ""
    head = _row(
        "th",
        ["run"] * several + ["step", "what", "when", ""],
        [""] * several + ["figure", "", "wide", ""],
    )
    return f"<h2>Starts, faults and resumes</h2>{_table(head, rows)}" + "".join(
        f'<p class="muted">{line}</p>' for line in saved
    )


def _buckets(runs: Sequence[RunRecord]) -> str:
    parts = []
    for number, run in enumerate(runs):
        if not run.compile_reports:
            continue
        parts.append(f"<h3>{_text(run.name)}</h3>")
        for place, timeline in enumerate(run.timelines):
            lanes = timeline["lanes"]
            parts.append(
                f'<figure><p class="muted">{_text(timeline["title"])}, from above:'
                f' {_text(", ".join(lanes))}</p><svg id="timeline-{number}-{place}"'
                f' height="{36 + 32 * len(lanes)}" role="img" aria-label="timeline of'
                f' {_text(run.name)}, {_text(timeline["title"])}"></svg><figcaption'
                ' class="readout"></figcaption></figure>'
            )
        parts += map(_compile_report, run.compile_reports)
    if not parts:
        return ""
    legend = (
        '<p class="muted">Estimated for one pass: computation, and communication along each mesh'
        " axis; in red communication without computation.</p>"
    )
    return f"<h2>Buckets</h2>{legend if any(run.timelines for run in runs) else ''}{''.join(parts)}"


def _compile_report(report: Mapping[str, Any]) -> str:
    left = report["after"]
    counts = Counter(each["kind"] for each in left)
    merged = ", ".join(
        f"{before} {kind} → {counts[kind]}" for kind, before in report["before"].items()
    )
    where = "" if report.get("pp_rank") is None else f"pipeline rank {report['pp_rank']}, "
    rows = [
        (
            each["kind"],
            "".join(each["fqns"][:1])
            + (f" and {len(each['fqns']) - 1} more" if len(each["fqns"]) > 1 else ""),
            f"{each['nbytes'] / 2**20:,.2f}",
            *(
                "" if each.get(name) is None else f"{1e3 * each[name]:.3g}"
                for name in ("seconds", "under", "exposed")
            ),
        )
        for each in left
    ]
    summary = f"{where}{report['graph']}: {merged or 'no collectives of parameters'}"
    looks = ("", "", "figure", "figure", "figure wide", "figure")
    titles = ("kind", "parameters", "MiB", "ms", "under, ms", "exposed, ms")
    table = _table(_row("th", titles, looks), [_row("td", row, looks) for row in rows])
    return f"<details><summary>{_text(summary)}</summary>{table}</details>"


def _recipes(runs: Sequence[RunRecord]) -> str:
    """Return the table of keys in which runs differ, or in which a single run differs from the
    defaults, and that of all keys.
    """
    given = [run for run in runs if run.recipe]
    if not given:
        return ""
    keys = [*KEYS, *sorted({key for run in given for key in run.recipe} - KEYS.keys())]
    keys = [key for key in keys if any(key in run.recipe for run in given)]

    def defaults(key: str) -> Any:
        value = KEYS[key].default if key in KEYS else None
        return list(value) if isinstance(value, tuple) else value

    if len(given) > 1:
        own = [
            key
            for key in keys
            if key != "job.dump_folder" and len({_value(run.recipe.get(key)) for run in given}) > 1
        ]
        title = "Differences of the recipes" if own else "The recipes are the same"
    else:
        own = [key for key in keys if given[0].recipe[key] != defaults(key)]
        title = "The recipe, without defaults"

    def table(chosen: Sequence[str]) -> str:
        rows = [
            _row("td", [key, *(_value(run.recipe.get(key)) for run in given)]) for key in chosen
        ]
        return _table(_row("th", ["key", *(run.name for run in given)]), rows)

    return (
        f"<h2>{title}</h2>{table(own)}<details><summary>every key</summary>{table(keys)}</details>"
    )


def _table(head: str, rows: Sequence[str]) -> str:
    return f"<table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>" if rows else ""


def _row(tag: str, cells: Sequence[str], looks: Sequence[str] = ()) -> str:
    """Return a row of a table. looks: classes of the cells."""
    classes = (f' class="{look}"' if look else "" for look in looks)
    inside = itertools.zip_longest(cells, classes, fillvalue="")
    return f"<tr>{''.join(f'<{tag}{look}>{_text(cell)}</{tag}>' for cell, look in inside)}</tr>"


def _large(number: float) -> str:
    """Return a number in short, such as 1.23M for 1234567."""
    for size, sign in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= size:
            return f"{number / size:.3g}{sign}"
    return f"{number:,.0f}"


def _value(value: Any) -> str:
    return (
        "" if value is None else value if isinstance(value, str) else json.dumps(value, default=str)
    )  # TOML has dates


def _when(event: Mapping[str, Any]) -> str:
    """Return an event's time in the reader's zone, or "" without a time."""
    try:
        return f"{datetime.fromisoformat(event['time']).astimezone():%Y-%m-%d %H:%M:%S}"
    except (
        KeyError,
        TypeError,
        ValueError,
        OverflowError,
        OSError,
    ):  # the last two: years out of range
        return ""


def _text(text: Any) -> str:
    return html.escape(str(text))


@command()
def main(arguments: Sequence[str]) -> None:
    parser = Parser(__doc__)
    parser.add_argument(
        "folders", nargs="+", type=Path, metavar="RUN_FOLDER", help="job.dump_folder of a run"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="the page (default: report.html in the first folder)",
    )
    options = parser.parse_args(arguments)
    try:
        runs = [
            read_run(folder, name)
            for folder, name in zip(options.folders, name_runs(options.folders), strict=True)
        ]
        text = page(runs)
        path = options.output or options.folders[0] / "report.html"
        path.write_text(
            text, encoding="utf-8", errors="backslashreplace"
        )  # JSON may have halves of a surrogate pair
    except (RecordError, ConfigError, OSError) as error:
        wrong = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else error
        raise ConfigError(wrong) from None
    print(f"{path} written: open it in a browser")
