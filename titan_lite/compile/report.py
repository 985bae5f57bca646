"""Record what the compile stage did to a graph's collectives and their estimated times, as text and
as JSON.

write_reports(reports, dump_folder)                    # compile.json
for line in describe(reports): logger.info(line)        # forward: 57 all_gather -> 8, ...
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.fx import Graph

from titan_lite.cost.collectives import (
    collective_bytes,
    kind_of,
    parameter_collectives,
    parameters_of,
    ranks_of,
)
from titan_lite.cost.op_cost import bytes_copied
from titan_lite.cost.timeline import Timeline


@dataclass(frozen=True)
class Collective:
    """A collective of parameters after the passes, with its estimated times in seconds."""

    kind: str  # a value of KINDS
    fqns: tuple[str, ...]  # its parameters, in order
    nbytes: int  # unsharded
    ranks: int  # number of ranks in its group
    seconds: float | None = None
    under: float | None = None  # computation between its start and its wait
    exposed: float | None = None  # time in which its wait blocks computation


@dataclass(frozen=True)
class CompileReport:
    """The effect of the passes on one graph."""

    graph: str  # "forward", "backward", or "inference" (without gradients)
    before: dict[str, int]  # number of parameters' collectives before the passes, by kind
    after: tuple[Collective, ...]  # those that are left, in order
    moved: int  # number of collectives that were moved
    schedule: str  # hash of all collectives in order
    timeline: Timeline | None = None  # None for an unknown machine
    pass_seconds: float = 0.0  # the part of compile_seconds in our passes
    compile_seconds: float = 0.0
    copied: int | None = None  # bytes copied into and out of buckets; None for Inductor's buckets
    cache: str = ""  # "hit" or "miss" of Inductor's cache, "" without it
    deferred: int = 0  # number of products computed while a collective of activations is in flight
    cut: int = 0  # number of collectives of activations in chunks
    pp_rank: int | None = None  # the pipeline rank that runs the graph


def count_collectives(graph: Graph) -> dict[str, int]:
    """Return the number of parameters' collectives by kind."""
    return dict(Counter(map(kind_of, parameter_collectives(graph))))


def list_collectives(graph: Graph, timeline: Timeline | None) -> tuple[Collective, ...]:
    nodes = parameter_collectives(graph)
    figures = (
        [(span.seconds, span.under, span.exposed) for span in timeline.collectives()]
        if timeline
        else [()] * len(nodes)
    )
    return tuple(
        Collective(
            kind_of(node), parameters_of(node), collective_bytes(node), len(ranks_of(node)), *times
        )
        for node, times in zip(nodes, figures, strict=True)
    )


def copied_by_buckets(graph: Graph, fused: bool) -> int:
    return sum(bytes_copied(node, fused) for node in graph.nodes if "copies" in node.meta)


def describe(reports: Sequence[CompileReport]) -> list[str]:
    """Return a line per graph."""
    lines = []
    for report in reports:
        left = Counter(collective.kind for collective in report.after)
        counts = [f"{count} {kind} -> {left[kind]}" for kind, count in report.before.items()]
        gib = sum(collective.nbytes for collective in report.after) / 2**30
        words = [f"{', '.join(counts)} ({gib:.3f} GiB)"]
        if report.copied is not None:
            words.append(f"{report.copied / 2**30:.3f} GiB copied into and out of buckets")
        words.append(f"{report.moved} moved to overlap")
        if (times := report.timeline) is not None:
            words.append(
                f"estimated {milliseconds(times.communication)} communication beside"
                f" {milliseconds(times.compute)} computation, {milliseconds(times.exposed)} exposed"
                f" (at least {milliseconds(times.bound)})"
            )
        words = (
            [*words, f"schedule {report.schedule}"] if counts else ["no collectives of parameters"]
        )
        if report.deferred or report.cut:
            hiding = (
                f"{report.deferred} products deferred, {report.cut} collectives cut into chunks"
            )
            words.append(f"tensor and context parallelism: {hiding}")
        where = "" if report.pp_rank is None else f"pipeline rank {report.pp_rank}, "
        cache = f", cache {report.cache}" if report.cache else ""
        words.append(f"compiled in {report.compile_seconds:.1f} s{cache}")
        lines.append(f"{where}{report.graph} graph: {'; '.join(words)}")
    return lines


def rank_timelines(reports: Sequence[CompileReport]) -> dict[int, list[Timeline]]:
    """Return the timelines of forward and backward by pipeline rank, or none if nothing is
    estimated or communicated.
    """
    found: dict[int, list[Timeline]] = {}
    for report in reports:
        if report.timeline is not None and report.graph != "inference":
            found.setdefault(report.pp_rank or 0, []).append(report.timeline)
    every = [timeline for timelines in found.values() for timeline in timelines]
    return found if any(each.communication or each.waited for each in every) else {}


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def write_reports(reports: Sequence[CompileReport], folder: Path) -> None:
    """Write compile.json, a list of objects with the fields of CompileReport.

    A timeline is written without its spans.
    """
    text = json.dumps([_as_object(report) for report in reports], indent=1) + "\n"
    (folder / "compile.json").write_text(text, encoding="utf-8")


def _as_object(report: CompileReport) -> dict:
    found = dataclasses.asdict(dataclasses.replace(report, timeline=None))
    if report.timeline is not None:
        sums = vars(report.timeline).items()
        found["timeline"] = {
            name: value for name, value in sorted(sums) if name not in ("spans", "graph")
        }
        found["timeline"]["waited"] = report.timeline.waited
    return found
