"""`metrics.jsonl` and `events.jsonl` as they are read again; needs the standard library only.

for number, entry in read_lines(folder / "metrics.jsonl"): ...
for step, values in read_metrics(folder / "metrics.jsonl").items(): ...
"""

import json
from collections.abc import Iterator
from pathlib import Path


def read_lines(path: Path) -> Iterator[tuple[int, dict | None]]:
    """(number, object) of each line that is not empty; None for what is no object, such as a line torn when a run was killed."""
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
        if entry is None:
            continue
        if "resumed_from" in entry:
            result = {step: values for step, values in result.items() if step <= entry["resumed_from"]}
        elif "step" in entry:
            result.setdefault(entry["step"], {}).update(entry)
    return dict(sorted(result.items()))
