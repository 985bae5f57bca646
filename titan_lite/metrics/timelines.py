"""Write estimated timelines (cost/timeline.py) as a trace for https://ui.perfetto.dev and
chrome://tracing.

    write_timelines(reports, dump_folder)       # timeline.json of a run

Computation has a lane, and each mesh axis with communication has one. tools/plan/spans.py writes
plans with the same functions.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from titan_lite.compile.report import CompileReport, rank_timelines
from titan_lite.distributed.axes import AXIS_NAMES

if TYPE_CHECKING:
    from titan_lite.cost.timeline import Timeline


class TraceSpan(NamedTuple):
    """A bar of a Chrome trace."""

    lane: int
    category: str
    name: str
    start: float  # seconds
    seconds: float
    arguments: dict[str, Any]


class TraceProcess(NamedTuple):
    """A process of a Chrome trace, such as a pipeline rank. A lane is a thread of the trace."""

    title: str
    lanes: Sequence[str]
    spans: Iterable[TraceSpan]


def write_timelines(reports: Sequence[CompileReport], folder: Path) -> None:
    """Write timeline.json, with a process for each pipeline rank; nothing without timelines."""
    timelines_by_rank = rank_timelines(reports)
    if not timelines_by_rank:
        return
    lanes = lanes_of([timeline for some in timelines_by_rank.values() for timeline in some])
    several = len(timelines_by_rank) > 1
    processes = [
        TraceProcess(
            f"pipeline rank {rank}" if several else "every rank",
            lanes,
            graph_spans(timelines, lanes),
        )
        for rank, timelines in timelines_by_rank.items()
    ]
    write_trace(folder / "timeline.json", processes)


def lanes_of(timelines: Iterable[Timeline]) -> list[str]:
    """Return the lanes: computation, then the axes with communication."""
    groups = {span.group for timeline in timelines for span in timeline.spans}
    return ["computation", *(word for axis, word in AXIS_NAMES.items() if axis in groups)]


def graph_spans(timelines: Sequence[Timeline], lanes: Sequence[str]) -> Iterator[TraceSpan]:
    """Yield the spans of one graph after another."""
    offset = 0.0  # seconds of the graphs before
    for timeline in timelines:
        for span in timeline.spans:
            lane = AXIS_NAMES[span.group] if span.group else "computation"
            yield TraceSpan(
                lane=lanes.index(lane),
                category=timeline.graph,
                name=span.name,
                start=offset + span.start,
                seconds=span.seconds,
                arguments={"graph": timeline.graph, "exposed_us": 1e6 * span.exposed},
            )
        offset += timeline.seconds


def write_trace(path: Path, processes: Iterable[TraceProcess]) -> None:
    """Write a Chrome trace, in microseconds."""
    events: list[dict[str, Any]] = []
    for pid, process in enumerate(processes):
        events.append(
            {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": process.title}}
        )
        for tid, lane in enumerate(process.lanes):
            events.append(
                {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": lane}}
            )
        for span in process.spans:
            events.append(
                {
                    "name": span.name,
                    "cat": span.category,
                    "ph": "X",
                    "pid": pid,
                    "tid": span.lane,
                    "ts": 1e6 * span.start,
                    "dur": 1e6 * span.seconds,
                    "args": span.arguments,
                }
            )
    trace = {"displayTimeUnit": "ms", "traceEvents": events}
    path.write_text(json.dumps(trace) + "\n", encoding="utf-8")
