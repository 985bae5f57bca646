"""The receipt: what the compile stage did to a graph's collectives, in words and as JSON.

write_receipts(receipts, dump_folder / "compile.json")
for line in describe(receipts): logger.info(line)        # forward: 57 all_gather -> 8, ...
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from titan_lite.compiler.bucketing import Bucket


@dataclass(frozen=True)
class Receipt:
    """Of one graph ("forward" or "backward"): its parameters' collectives before and after bucketing, and how many then moved;
    note: why none could."""

    graph: str
    before: tuple[Bucket, ...]
    after: tuple[Bucket, ...]
    moved: int
    note: str = ""


def describe(receipts: Sequence[Receipt]) -> list[str]:
    """A line a graph."""
    lines = []
    for receipt in receipts:
        before, after = (Counter(bucket.kind for bucket in buckets) for buckets in (receipt.before, receipt.after))
        counts = ", ".join(f"{count} {kind} -> {after[kind]}" for kind, count in before.items()) or "no collectives of parameters"
        gib = sum(bucket.nbytes for bucket in receipt.after) / 2**30
        lines.append(f"compiled {receipt.graph}: {counts} ({gib:.3f} GiB), {receipt.note or f'{receipt.moved} moved to overlap'}")
    return lines


def write_receipts(receipts: Sequence[Receipt], path: Path) -> None:
    """As a list of objects with the fields of Receipt and Bucket; bytes are of the whole weights, or gradients."""
    path.write_text(json.dumps([dataclasses.asdict(receipt) for receipt in receipts], indent=1) + "\n", encoding="utf-8")
