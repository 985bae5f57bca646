"""The sections of the page, as HTML: results, sources, events, buckets, recipes."""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from titan_lite.config import KEYS
from titan_lite.metrics.goodput import duration, goodput_line, time_spent
from titan_lite.text import first_names
from titan_lite.tools.report.markup import (
    large,
    local_time,
    milliseconds,
    moment,
    recipe_value,
    row,
    table,
    text,
)
from titan_lite.tools.report.run_record import RunRecord

COLORS = 6  # of runs, in page.html
# Tokens of an expert relative to the mean of its layer: at most, color, words
LOADS = (
    (0.0, "#000000", "no token"),
    (0.5, "#8c2d04", "up to 0.5 of the mean"),
    (0.8, "#fe9929", "to 0.8"),
    (1.25, "#d9d9d9", "to 1.25"),
    (2.0, "#6baed6", "to 2"),
    (math.inf, "#08519c", "above"),
)
EVENT_WORDS = {
    "start": "started",
    "stop": "stopped",
    "skip": "step skipped",
    "slow": "slow rank",
    "resume": "resumed",
    "phase": "phase",
    "phase done": "phase done",
    "error": "failed",
    "killed": "rank killed",
    "copy killed": "rank of a group killed",
    "copies": "groups changed",
    "restart": "restarted",
    "undone": "step rolled back",
}


# --- Results --------------------------------------------------------------------------------------


def card(run: RunRecord, number: int) -> str:
    """Return the results of a run; those without a value are left out."""
    entries = "".join(
        f'<div class="entry"><dt>{text(name)}</dt><dd>{text(value)}</dd></div>'
        for name, value in results(run).items()
        if value
    )
    description = text(run.recipe.get("job.description", ""))
    return (
        f'<section class="card" style="--run: var(--c{number % COLORS})"><h3>{text(run.name)}</h3>'
        f'<div class="muted">{description}</div><dl>{entries}</dl></section>'
    )


def results(run: RunRecord) -> dict[str, str]:
    """Return the results of a run in words, by name; "" for those that it has not."""
    last = run.rows[-1]
    return {
        "steps": steps_done(run),
        "tokens": large(last["tokens"]),
        "loss": newest(run, "loss"),
        "validation loss": validation_loss(run),
        "tokens per second and device": median(run, "tps", "{:,.0f}"),
        "MFU": median(run, "mfu", "{:.1f}%"),
        "waiting for data": median(run, "data_wait", "{:.1f}%"),
        "peak memory": largest(run, "memory_gib", "{:.2f} GiB"),
        "exposed (estimated)": exposed_share(run.compile_reports),
        "steps skipped": largest(run, "skipped_steps", "{:,.0f}"),
        "training time": duration(3600 * last["hours"]) if last["hours"] else "",
        "goodput": goodput(run),
        "started": first_start(run),
        "resumed": times_resumed(run),
        **facts_of_last_start(run),
    }


def newest(run: RunRecord, name: str) -> str:
    values = run.column(name)
    return f"{values[-1]:.4f}" if values else ""


def median(run: RunRecord, name: str, form: str) -> str:
    values = run.column(name)
    return form.format(statistics.median(values)) if values else ""


def largest(run: RunRecord, name: str, form: str) -> str:
    values = run.column(name)
    return form.format(max(values)) if values else ""


def steps_done(run: RunRecord) -> str:
    done = f"{run.rows[-1]['step']:,}"
    steps = run.recipe.get("training.steps")
    return f"{done} of {steps:,}" if steps else done


def validation_loss(run: RunRecord) -> str:
    losses = run.column("validation_loss")
    if losses and min(losses) < losses[-1]:
        return f"{losses[-1]:.4f} (best {min(losses):.4f})"
    return newest(run, "validation_loss")


def goodput(run: RunRecord) -> str:
    """Return the share of the time in productive steps, and where the rest went."""
    groups = run.recipe.get("fault_tolerance.replica_groups", 1)
    return goodput_line(time_spent(run.folder, groups)).removeprefix("goodput: ")


def first_start(run: RunRecord) -> str:
    for event in run.events:
        if event["event"] in ("start", "resume") and local_time(event):
            return local_time(event)[: len("2026-01-31 12:00")]
    return ""


def facts_of_last_start(run: RunRecord) -> dict[str, str]:
    """Return what the last start ran on, by name; revisions in short, as git shows them."""
    starts = [event["facts"] for event in run.events if event.get("facts")]
    facts = dict(starts[-1]) if starts else {}
    if "revision" in facts:
        revision = facts["revision"]
        commit = revision.removesuffix("+changes")
        changes = revision.removeprefix(commit)
        facts["revision"] = commit[:12] + changes
    return facts


def times_resumed(run: RunRecord) -> str:
    count = sum(event["event"] == "resume" for event in run.events)
    if count == 0:
        return ""
    return "1 time" if count == 1 else f"{count} times"


def exposed_share(reports: Iterable[Mapping[str, Any]]) -> str:
    """Return how long only communication runs in forward and backward, of how long they take.

    Over all pipeline ranks (compile.json); "" if there is no communication.
    """
    exposed = 0.0
    communication = 0.0
    seconds = 0.0
    for report in reports:
        timeline = report.get("timeline")
        if timeline and report.get("graph") != "inference":
            exposed += timeline.get("waited", timeline["exposed"])
            communication += timeline["communication"]
            seconds += timeline["seconds"]
    if not communication and not exposed:
        return ""
    return f"{milliseconds(exposed)} of {milliseconds(seconds)} ms"


# --- Sources of a data mix ------------------------------------------------------------------------


def sources(runs: Sequence[RunRecord]) -> str:
    """Return the table of tokens and losses of each source of a data mix."""
    rows = [line for run in runs for line in source_rows(run, named=len(runs) > 1)]
    if not rows:
        return ""
    titles = ["source", "tokens", "share", "loss", "validation loss"]
    head = row("th", ["run", *titles] if len(runs) > 1 else titles)
    return f"<h2>Sources</h2>{table(head, rows)}"


def source_rows(run: RunRecord, *, named: bool) -> list[str]:
    """Return a row for each source of a run. named: with the run's name."""
    prefix = "tokens_by_source/"
    validated = "validation_loss_by_source/"
    keys = dict.fromkeys(itertools.chain(*run.rows))  # of all rows, in their order
    names = [key.removeprefix(prefix) for key in keys if key.startswith(prefix)]
    tokens = {name: run.column(prefix + name)[-1] for name in names if run.column(prefix + name)}
    total = sum(tokens.values()) or 1
    # those of [validation] follow, if it has sources of its own
    tokens |= {
        key.removeprefix(validated): 0
        for key in keys
        if key.startswith(validated) and key.removeprefix(validated) not in tokens
    }
    rows = []
    for name, count in tokens.items():
        cells = [
            name,
            large(count) if count else "",
            f"{100 * count / total:.1f}%" if count else "",
            newest(run, f"loss_by_source/{name}"),
            newest(run, f"validation_loss_by_source/{name}"),
        ]
        classes = ["name", "figure", "figure", "figure", "figure"]
        if named:
            cells = [run.name, *cells]
            classes = ["name", *classes]
        rows.append(row("td", cells, classes))
    return rows


# --- Experts --------------------------------------------------------------------------------------


def experts(runs: Sequence[RunRecord]) -> str:
    """Return a picture for each run of an MoE model: the load of each expert over layers."""
    pictures = [picture_of_experts(run) for run in runs if run.experts]
    if not pictures:
        return ""
    keys = "".join(
        f'<span class="whole"><i class="swatch edged" style="border-color: {color}"></i>'
        f"{text(words)}</span> "
        for _, color, words in LOADS
    )
    return f'<h2>Experts</h2><p class="muted">{keys}</p>{"".join(pictures)}'


def picture_of_experts(run: RunRecord) -> str:
    """Return a picture with a row for each layer and a column for each expert."""
    layers = run.experts["layers"]
    count = len(layers[0])
    steps = f"steps {run.experts['first_step']:,} to {run.experts['step']:,}"
    cells: dict[str, list[str]] = {}  # by color
    for number, shares in enumerate(layers):
        for expert, share in enumerate(shares):
            color = next(color for most, color, _ in LOADS if share * count <= most)
            cells.setdefault(color, []).append(f"M{expert} {number}h1v1h-1z")
    paths = "".join(f'<path fill="{color}" d="{"".join(d)}"/>' for color, d in cells.items())
    height = min(24 * len(layers), 480)
    title = f"{run.name}, {steps}: {len(layers)} layers from above, {count} experts from left"
    return (
        f'<figure><p class="muted">{text(title)}</p>'
        f'<svg viewBox="0 0 {count} {len(layers)}" height="{height}" preserveAspectRatio="none"'
        f' shape-rendering="crispEdges" role="img" aria-label="{text(title)}">{paths}</svg>'
        "</figure>"
    )


# --- Events ---------------------------------------------------------------------------------------


def events(runs: Sequence[RunRecord]) -> str:
    """Return the table of starts, faults and resumes in order of time, and lines of the steps
    saved.
    """
    timed = [entry for run in runs for entry in timed_events(run)]
    timed.sort(key=lambda entry: entry[0])  # those of one time stay as a run has written them
    rows = [event_row(run, event, named=len(runs) > 1) for _, run, event in timed]
    saved = [saved_steps(run) for run in runs]
    if not rows and not any(saved):
        return ""
    titles = ["step", "what", "when", ""]
    classes = ["figure", "", "wide", ""]
    if len(runs) > 1:
        titles = ["run", *titles]
        classes = ["", *classes]
    lines = "".join(f'<p class="muted">{line}</p>' for line in saved if line)
    return f"<h2>Starts, faults and resumes</h2>{table(row('th', titles, classes), rows)}{lines}"


def timed_events(run: RunRecord) -> list[tuple[float, RunRecord, dict[str, Any]]]:
    """Return (seconds since 1970, run, event) of what the table shows of a run.

    An event without a time, as of a kill, has that of the one before.
    """
    timed = []
    seconds = 0.0
    for event in run.events:
        time = moment(event)
        seconds = time.timestamp() if time else seconds
        if event["event"] != "checkpoint":
            timed.append((seconds, run, event))
    return timed


def event_row(run: RunRecord, event: Mapping[str, Any], *, named: bool) -> str:
    """Return the row of an event. named: with the run's name."""
    cells = [
        f"{event['step']:,}",
        EVENT_WORDS.get(event["event"], event["event"]),
        local_time(event),
        str(event.get("text", "")),
    ]
    classes = ["figure", "whole", "wide whole", "lines"]
    if named:
        cells = [run.name, *cells]
        classes = ["name", *classes]
    return row("td", cells, classes)


def saved_steps(run: RunRecord) -> str:
    steps = sorted({event["step"] for event in run.events if event["event"] == "checkpoint"})
    if not steps:
        return ""
    there = steps if run.steps_there is None else run.steps_there
    names = f"of steps {', '.join(f'{step:,}' for step in there)}" if there else "none"
    line = f"{text(run.name)}: checkpoints {names}"
    gone = len(steps) - len(there)
    if gone:
        line += f"; {gone:,} more were saved, and are deleted or moved (checkpoint.keep_latest_k)"
    return line


# --- Buckets --------------------------------------------------------------------------------------


def buckets(runs: Sequence[RunRecord]) -> str:
    """Return the tables of the collectives of compiled graphs."""
    parts = []
    for run in runs:
        if run.compile_reports:
            parts.append(f"<h3>{text(run.name)}</h3>")
            parts += map(collectives, run.compile_reports)
    if not parts:
        return ""
    return f'<h2>Buckets</h2><p class="muted">Times are estimated.</p>{"".join(parts)}'


def collectives(report: Mapping[str, Any]) -> str:
    """Return the table of a graph's collectives of parameters after bucketing."""
    counts = Counter(collective["kind"] for collective in report["after"])
    merged = ", ".join(
        f"{before} {kind} → {counts[kind]}" for kind, before in report["before"].items()
    )
    rank = report.get("pp_rank")
    stage = "" if rank is None else f"pipeline rank {rank}, "
    summary = f"{stage}{report['graph']}: {merged or 'no collectives of parameters'}"
    titles = ["kind", "parameters", "MiB", "ms", "under, ms", "exposed, ms"]
    classes = ["", "", "figure", "figure", "figure wide", "figure"]
    rows = []
    for collective in report["after"]:
        cells = [
            collective["kind"],
            first_names(collective["fqns"], 1),
            f"{collective['nbytes'] / 2**20:,.2f}",
            milliseconds(collective.get("seconds")),
            milliseconds(collective.get("under")),
            milliseconds(collective.get("exposed")),
        ]
        rows.append(row("td", cells, classes))
    head = row("th", titles, classes)
    return f"<details><summary>{text(summary)}</summary>{table(head, rows)}</details>"


# --- Recipes --------------------------------------------------------------------------------------


def recipes(runs: Sequence[RunRecord]) -> str:
    """Return a table of the keys that say something, and one of all keys.

    Of several runs, those in which they differ; of a single one, those that are not the default.
    """
    runs = [run for run in runs if run.recipe]
    if not runs:
        return ""
    known = [key for key in KEYS if any(key in run.recipe for run in runs)]
    others = {key for run in runs for key in run.recipe} - KEYS.keys()  # of another version
    keys = [*known, *sorted(others)]
    if len(runs) > 1:
        chosen = [key for key in keys if differs(key, runs)]
        title = "Differences of the recipes" if chosen else "The recipes are the same"
    else:
        chosen = [key for key in keys if runs[0].recipe[key] != default_of(key)]
        title = "The recipe, without defaults"
    every_key = f"<details><summary>every key</summary>{recipe_table(keys, runs)}</details>"
    return f"<h2>{title}</h2>{recipe_table(chosen, runs)}{every_key}"


def differs(key: str, runs: Sequence[RunRecord]) -> bool:
    if key == "job.dump_folder":
        return False
    return len({recipe_value(run.recipe.get(key)) for run in runs}) > 1


def default_of(key: str) -> object:
    """Return the default of a key in the types of JSON; None for one that there is not."""
    if key not in KEYS:
        return None
    default = KEYS[key].default
    return list(default) if isinstance(default, tuple) else default


def recipe_table(keys: Sequence[str], runs: Sequence[RunRecord]) -> str:
    head = row("th", ["key", *(run.name for run in runs)])
    rows = [row("td", [key, *(recipe_value(run.recipe.get(key)) for run in runs)]) for key in keys]
    return table(head, rows)
