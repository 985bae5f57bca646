"""Make one HTML page of one or several runs: curves, faults, buckets, recipes.

Needs neither a network nor torch.

    titan-lite report RUN_FOLDER [RUN_FOLDER ...] [--output FILE]

RUN_FOLDER is a run's job.dump_folder; the page is written to report.html in the first one, or to
FILE. It shows these files:

    metrics.jsonl    every curve; resumes
    events.jsonl     checkpoints, skipped steps, warnings, failures
    config.toml      the resolved recipe
    experts.json     the shares of experts
    compile.json     buckets

The run may still be going on. page.html has the frame of the page, its style and its script.
"""

import json
import os
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from titan_lite.cli import Parser, command
from titan_lite.config import ConfigError
from titan_lite.config.errors import error_because_of
from titan_lite.tools.report import sections
from titan_lite.tools.report.markup import text
from titan_lite.tools.report.run_record import RunRecord, read_run
from titan_lite.tools.report.script_data import script_data

FRAME = Path(__file__).with_suffix(".html")


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
    path = options.output or options.folders[0] / "report.html"
    try:
        names = name_runs(options.folders)
        runs = [read_run(folder, name) for folder, name in zip(options.folders, names, strict=True)]
        content = page(runs)
        if options.output is None:  # a link there may lead to a file that is no report
            path.unlink(missing_ok=True)
        # JSON may have halves of a surrogate pair.
        path.write_text(content, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise error_because_of(error, f"{error.filename}: {error.strerror}") from None
    print(f"{path} written: open it in a browser")


def name_runs(folders: Sequence[Path]) -> list[str]:
    """Return the folders' names, with as many parents as needed to be unique.

    Raises ConfigError for a repeated folder.
    """
    parts = [Path(os.path.realpath(folder)).parts for folder in folders]
    for folder, own in zip(folders, parts, strict=True):
        if parts.count(own) > 1:
            raise ConfigError(f"{folder} is given twice; use each run once")
    depth = 1
    while True:
        names = ["/".join(own[-depth:]) for own in parts]
        if len(set(names)) == len(names):
            return names
        depth += 1


def page(runs: Sequence[RunRecord]) -> str:
    """Return the page of runs."""
    names = ", ".join(run.name for run in runs)
    written = f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}"
    parts = [
        f"<h1>{text(names)}</h1>",
        f'<div class="muted">titan_lite report, written {written}</div>',
    ]
    for run in runs:
        parts += [f'<p class="note">{text(run.name)}: {text(note)}</p>' for note in run.notes]
    cards = "".join(sections.card(run, number) for number, run in enumerate(runs))
    parts += [
        f'<div class="cards">{cards}</div>',
        "<noscript><p class='note'>The curves are drawn by a script, which is turned off here.</p>"
        "</noscript>",
        "<h2>Curves</h2>",
        '<p class="muted">Point at one to read all of them; drag to look closer.</p>',
        '<div id="bar"></div><div id="charts"></div>',
        sections.sources(runs),
        sections.experts(runs),
        sections.events(runs),
        sections.buckets(runs),
        sections.recipes(runs),
    ]
    data = [script_data(run, number) for number, run in enumerate(runs)]
    filled = {
        "title": text(f"titan_lite: {names}"),
        "body": "\n".join(parts),
        # Only "<" could end the script element.
        "data": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
    }
    frame = FRAME.read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: filled[match[1]], frame)
