"""Write HTML: tables whose cells are escaped, and numbers and times in short."""

import html
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any


def text(value: object) -> str:
    """Return a value as text of the page."""
    return html.escape(str(value))


def table(head: str, rows: Sequence[str]) -> str:
    """Return a table of rows of `row`, which scrolls if it is wider than the window; "" without
    any.
    """
    if not rows:
        return ""
    body = "".join(rows)
    return f'<div class="scroll"><table><thead>{head}</thead><tbody>{body}</tbody></table></div>'


def row(tag: str, cells: Sequence[object], classes: Sequence[str] = ()) -> str:
    """Return a row of a table. tag: "td" or "th". classes: of each cell, in CSS."""
    written = []
    for cell, names in itertools.zip_longest(cells, classes, fillvalue=""):
        attribute = f' class="{names}"' if names else ""
        written.append(f"<{tag}{attribute}>{text(cell)}</{tag}>")
    return f"<tr>{''.join(written)}</tr>"


def large(number: float) -> str:
    """Return a number in short: 1234567 as 1.23M."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:,.0f}"


def recipe_value(value: object) -> str:
    """Return the value of a key; "" for one that a recipe does not have."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return json.dumps(value)


def milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.3g}"


def moment(event: Mapping[str, Any]) -> datetime | None:
    """Return an event's time in the reader's zone; None without a time."""
    return datetime.fromisoformat(event["time"]).astimezone() if "time" in event else None


def local_time(event: Mapping[str, Any]) -> str:
    """Return an event's time in the reader's zone in words; "" without a time."""
    time = moment(event)
    return f"{time:%Y-%m-%d %H:%M:%S}" if time else ""


def rounded(value: float | None) -> float | None:
    """Return a number as it is drawn; None if it is not finite, which JSON does not have."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.7g}") if math.isfinite(value) else None
