"""The receipt: what the compile stage did to a graph's collectives and what that should cost, in words and as JSON.

write_receipts(receipts, dump_folder)                  # compile.json
for line in describe(receipts): logger.info(line)        # forward: 57 all_gather -> 8, ...
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.fx import Graph

from titan_lite.compiler.collectives import collective_bytes, kind_of, parameter_collectives, parameters_of, ranks_of
from titan_lite.compiler.hardware import bytes_copied
from titan_lite.compiler.timeline import Timeline


class DoesNotFit(Exception):
    """A graph that `Schedule.fits` refuses by its receipt; raised on all ranks that would run it, before any of them has."""


@dataclass(frozen=True)
class Collective:
    """One that is left. kind: of KINDS; fqns: its parameters, in order; nbytes: of the whole that is gathered or reduced; ranks:
    how many take part. As estimated, in seconds: how long it takes, how much computation stands between its start and its wait,
    and how long computation is held up by that wait."""

    kind: str
    fqns: tuple[str, ...]
    nbytes: int
    ranks: int
    seconds: float | None = None
    under: float | None = None
    exposed: float | None = None


@dataclass(frozen=True)
class Receipt:
    """One graph's: "forward", "backward", or "inference" without gradients.

    before: how many collectives of parameters of each kind there were; after: those that are left, in order; moved: how many
    stand elsewhere than they did; copied: bytes written to put shards and gradients into buckets and to take weights out, None
    for Inductor's own buckets; schedule: a hash of all collectives in their order. timeline: the estimate, None for a machine
    that is not known. compile_seconds: for this graph; pass_seconds: of these, for our passes; cache: "hit" or "miss" of
    Inductor's, "" without. pp_rank: of the ranks that run it, in a pipeline.
    """

    graph: str
    before: dict[str, int]
    after: tuple[Collective, ...]
    moved: int
    schedule: str
    timeline: Timeline | None = None
    pass_seconds: float = 0.0
    compile_seconds: float = 0.0
    copied: int | None = None
    cache: str = ""
    pp_rank: int | None = None


def count_collectives(graph: Graph) -> dict[str, int]:
    """The collectives of parameters, by kind."""
    return dict(Counter(map(kind_of, parameter_collectives(graph))))


def list_collectives(graph: Graph, timeline: Timeline | None) -> tuple[Collective, ...]:
    nodes = parameter_collectives(graph)
    figures = [(span.seconds, span.under, span.exposed) for span in timeline.collectives()] if timeline else [()] * len(nodes)
    return tuple(
        Collective(kind_of(node), parameters_of(node), collective_bytes(node), len(ranks_of(node)), *times)
        for node, times in zip(nodes, figures, strict=True)
    )


def copied_by_buckets(graph: Graph, fused: bool) -> int:
    return sum(bytes_copied(node, fused) for node in graph.nodes if "copies" in node.meta)


def describe(receipts: Sequence[Receipt]) -> list[str]:
    """A line a graph."""
    lines = []
    for receipt in receipts:
        left = Counter(collective.kind for collective in receipt.after)
        counts = [f"{count} {kind} -> {left[kind]}" for kind, count in receipt.before.items()]
        gib = sum(collective.nbytes for collective in receipt.after) / 2**30
        words = [f"{', '.join(counts)} ({gib:.3f} GiB)"]
        if receipt.copied is not None:
            words.append(f"{receipt.copied / 2**30:.3f} GiB copied into and out of buckets")
        words.append(f"{receipt.moved} moved to overlap")
        if (times := receipt.timeline) is not None:
            words.append(
                f"estimated {milliseconds(times.communication)} communication beside {milliseconds(times.compute)} computation, "
                f"{milliseconds(times.exposed)} exposed (at least {milliseconds(times.bound)})"
            )
        words = [*words, f"schedule {receipt.schedule}"] if counts else ["no collectives of parameters"]
        where = "" if receipt.pp_rank is None else f"pipeline rank {receipt.pp_rank}, "
        cache = f", cache {receipt.cache}" if receipt.cache else ""
        words.append(f"compiled in {receipt.compile_seconds:.1f} s{cache}")
        lines.append(f"{where}{receipt.graph} graph: {'; '.join(words)}")
    return lines


def rank_timelines(receipts: Sequence[Receipt]) -> dict[int, list[Timeline]]:
    """Estimates for forward and backward of each pipeline rank, by rank; none where nothing communicates or is estimated."""
    found: dict[int, list[Timeline]] = {}
    for receipt in receipts:
        if receipt.timeline is not None and receipt.graph != "inference":
            found.setdefault(receipt.pp_rank or 0, []).append(receipt.timeline)
    every = [timeline for timelines in found.values() for timeline in timelines]
    return found if any(each.communication or each.waited for each in every) else {}


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def write_receipts(receipts: Sequence[Receipt], folder: Path) -> None:
    """compile.json: a list of objects with the fields of Receipt, of the timeline its sums."""
    text = json.dumps([_as_object(receipt) for receipt in receipts], indent=1) + "\n"
    (folder / "compile.json").write_text(text, encoding="utf-8")


def _as_object(receipt: Receipt) -> dict:
    found = dataclasses.asdict(dataclasses.replace(receipt, timeline=None))
    if receipt.timeline is not None:
        sums = vars(receipt.timeline).items()
        found["timeline"] = {name: value for name, value in sorted(sums) if name not in ("spans", "graph")}
        found["timeline"]["waited"] = receipt.timeline.waited
    return found
