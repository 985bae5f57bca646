"""Report what the passes did to a graph's collectives, and the times estimated.

    for line in describe(reports):
        logger.info(line)
    write_reports(reports, dump_folder)

    forward graph: 57 all_gather -> 8 (0.021 GiB); ...; bucket_by_block 49, ...

A run's compile.json is made of these reports.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch.fx import Graph, Node

from titan_lite.graph import (
    aten,
    base_of,
    collective_bytes,
    is_fused_away,
    is_pointwise,
    kind_of,
    nbytes_of,
    parameter_collectives,
    parameters_of,
    ranks_of,
)

if TYPE_CHECKING:  # an eager run has no timeline
    from titan_lite.cost.timeline import Timeline

HALVES = ("backward_input", "backward_weight")  # names of graphs


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
    """The effect of the passes on one graph, and the time to compile it."""

    # "forward", "backward", its HALVES, or "inference" (without gradients)
    graph: str
    before: dict[str, int]  # number of parameters' collectives before the passes, by kind
    after: tuple[Collective, ...]  # those that are left, in order
    passes: dict[str, int]  # the number that each pass returned, in the order they ran
    schedule: str  # hash of all collectives in order
    timeline: Timeline | None = None  # None for an unknown machine
    pass_seconds: float = 0.0  # the part of compile_seconds in our passes
    compile_seconds: float = 0.0
    copied: int | None = None  # bytes copied into and out of buckets; None for Inductor's buckets
    # parts between collectives, which Inductor compiles; 0: aot_eager cuts nothing
    segments: int = 0
    different_segments: int = 0  # that were compiled, once each (segments.py)
    # of the different ones, those that Inductor's cache had, from another rank or an earlier start
    cached_segments: int = 0
    pp_rank: int | None = None  # the pipeline rank that runs the graph


def count_collectives(graph: Graph) -> dict[str, int]:
    """Return the number of parameters' collectives by kind."""
    return dict(Counter(map(kind_of, parameter_collectives(graph))))


def list_collectives(graph: Graph, timeline: Timeline | None) -> tuple[Collective, ...]:
    """Return the parameters' collectives in order, with the times of `timeline`."""
    collectives = [
        Collective(kind_of(node), parameters_of(node), collective_bytes(node), len(ranks_of(node)))
        for node in parameter_collectives(graph)
    ]
    if timeline is None:
        return tuple(collectives)
    return tuple(
        dataclasses.replace(
            collective, seconds=span.seconds, under=span.under, exposed=span.exposed
        )
        for collective, span in zip(collectives, timeline.collectives(), strict=True)
    )


def copied_by_buckets(graph: Graph, fused: bool) -> int | None:
    """Return the bytes copied into and out of buckets, None for those of Inductor, whose copies
    have no mark. fused: as in `node_seconds`.
    """
    copies = [node for node in graph.nodes if "copies" in node.meta]
    if not copies and any("bucket" in node.meta for node in graph.nodes):
        return None
    return sum(_bytes_copied(node, fused) for node in copies)


def describe(reports: Sequence[CompileReport]) -> list[str]:
    """Return a line per graph."""
    return [_describe(report) for report in reports]


def _describe(report: CompileReport) -> str:
    parts = _describe_collectives(report) if report.before else ["no collectives of parameters"]
    passes = ", ".join(f"{name} {count}" for name, count in report.passes.items())
    if passes:
        parts.append(passes)
    segments = ""
    if report.segments:
        segments = (
            f", {report.different_segments} of {report.segments} segments differ,"
            f" {report.cached_segments} of these were in the cache"
        )
    parts.append(f"compiled in {report.compile_seconds:.1f} s{segments}")
    rank = "" if report.pp_rank is None else f"pipeline rank {report.pp_rank}, "
    return f"{rank}{report.graph} graph: {'; '.join(parts)}"


def _describe_collectives(report: CompileReport) -> list[str]:
    left = Counter(collective.kind for collective in report.after)
    counts = [f"{count} {kind} -> {left[kind]}" for kind, count in report.before.items()]
    gib = sum(collective.nbytes for collective in report.after) / 2**30
    parts = [f"{', '.join(counts)} ({gib:.3f} GiB)"]
    if report.copied is not None:
        parts.append(f"{report.copied / 2**30:.3f} GiB copied into and out of buckets")
    times = report.timeline
    if times is not None:
        parts.append(
            f"estimated {milliseconds(times.communication)} communication beside"
            f" {milliseconds(times.compute)} computation, {milliseconds(times.exposed)} exposed"
            f" (at least {milliseconds(times.bound)})"
        )
    parts.append(f"schedule {report.schedule}")
    return parts


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def rank_timelines(reports: Sequence[CompileReport]) -> dict[int, list[Timeline]]:
    """Return the timelines of forward and backward by pipeline rank.

    A stage that runs some backwards at once and others in halves has the timeline of the former.
    Returns {} if nothing is estimated or communicated.
    """
    by_rank: dict[int, list[Timeline]] = {}
    before = ""
    for report in reports:
        is_other_way = before == "backward" and report.graph in HALVES
        if not is_other_way:
            before = report.graph
        if report.timeline is None or report.graph == "inference" or is_other_way:
            continue
        by_rank.setdefault(report.pp_rank or 0, []).append(report.timeline)
    for timelines in by_rank.values():
        if any(timeline.communication or timeline.waited for timeline in timelines):
            return by_rank
    return {}


def write_reports(reports: Sequence[CompileReport], folder: Path) -> None:
    """Write compile.json, a list of objects with the fields of CompileReport.

    A timeline is written without its spans.
    """
    text = json.dumps([_as_object(report) for report in reports], indent=1) + "\n"
    (folder / "compile.json").write_text(text, encoding="utf-8")


def _as_object(report: CompileReport) -> dict[str, object]:
    fields: dict[str, object] = dataclasses.asdict(dataclasses.replace(report, timeline=None))
    timeline = report.timeline
    if timeline is not None:
        sums = {
            name: value
            for name, value in sorted(vars(timeline).items())
            if name not in ("spans", "graph")
        }
        fields["timeline"] = {**sums, "waited": timeline.waited}
    return fields


def _bytes_copied(node: Node, fused: bool) -> int:
    """Return the bytes that aten.cat or aten.clone copies, without those that a fused kernel
    computes in place.
    """
    if node.target is aten.cat.default:
        copied = [
            source
            for source in node.all_input_nodes
            if not (fused and is_pointwise(base_of(source)))
        ]
        return sum(nbytes_of(source) for source in copied)
    return 0 if fused and is_fused_away(node) else nbytes_of(node)
