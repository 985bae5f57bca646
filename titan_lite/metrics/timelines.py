"""Estimated timelines (compiler/timeline.py) as a picture, and as a trace for https://ui.perfetto.dev and chrome://tracing.

    write_timelines(receipts, dump_folder)       # timeline.png and timeline.json of a run

A lane shows the spans that `lane_of` puts in it; the first lane is computation. plan/picture.py draws plans with the same parts.
"""

import itertools
import json
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from titan_lite.compiler.receipt import Receipt, step_timelines
from titan_lite.compiler.timeline import Span, Timeline

LANES = ("compute", "communication")
LaneOf = Callable[[Span], str]
TraceSpan = tuple[int, str, str, float, float, dict[str, Any]]  # lane, category, name, start and length in seconds, arguments


def write_timelines(receipts: Sequence[Receipt], folder: Path) -> None:
    """timeline.png and timeline.json of `step_timelines`; none without any."""
    timelines = step_timelines(receipts)
    if not timelines:
        return

    from matplotlib.figure import Figure

    lane_of = operator.attrgetter("lane")
    figure = Figure(figsize=(12, 3), layout="constrained")
    captions = [f"{timeline.graph}: {1e3 * timeline.exposed:.3g} ms exposed" for timeline in timelines]
    draw_graphs(figure.subplots(), timelines, LANES, lane_of, captions)
    figure.savefig(folder / "timeline.png", dpi=120)
    write_trace(folder / "timeline.json", ("forward and backward", LANES, graph_spans(timelines, LANES, lane_of)))


def draw_graphs(axes: Any, timelines: Sequence[Timeline], lanes: Sequence[str], lane_of: LaneOf, captions: Sequence[str]) -> None:
    """One graph after another over milliseconds, with its caption; red: nothing computes meanwhile."""
    bars: dict[tuple[float, str], list[tuple[float, float]]] = defaultdict(list)
    for (timeline, offset), caption in zip(_one_after_another(timelines), captions, strict=True):
        for span in timeline.spans:
            lane = lanes.index(lane_of(span))
            height, start = len(lanes) - 0.9 - lane, 1e3 * (offset + span.start)
            bars[height, "tab:orange" if lane else "tab:blue"].append((start, 1e3 * span.seconds))
            if lane:
                waited = span.seconds if span.lane == "compute" else span.exposed
                bars[height, "tab:red"].append((start + 1e3 * (span.seconds - waited), 1e3 * waited))
        middle = 1e3 * (offset + timeline.seconds / 2)
        axes.text(middle, len(lanes), caption, ha="center", va="bottom")
        axes.axvline(1e3 * (offset + timeline.seconds), color="black", linewidth=0.8)
    draw_bars(axes, bars)
    axes.set(
        xlabel="milliseconds, as estimated; red: nothing computes meanwhile",
        yticks=[len(lanes) - 0.5 - number for number in range(len(lanes))],
        yticklabels=lanes,
        xlim=(0, 1e3 * sum(timeline.seconds for timeline in timelines)),
        ylim=(0, len(lanes) + 0.6),
    )


def draw_bars(axes: Any, bars: Mapping[tuple[float, str], Sequence[tuple[float, float]]], edge: str = "none") -> None:
    """bars: by height and color, (start, length) each; a later one covers those before it."""
    for (height, color), spans in bars.items():
        axes.broken_barh([span for span in spans if span[1]], (height, 0.8), facecolors=color, edgecolors=edge, linewidth=0.2)


def graph_spans(timelines: Sequence[Timeline], lanes: Sequence[str], lane_of: LaneOf) -> Iterator[TraceSpan]:
    """One graph after another."""
    for timeline, offset in _one_after_another(timelines):
        for span in timeline.spans:
            args = {"graph": timeline.graph, "exposed_us": 1e6 * span.exposed}
            yield lanes.index(lane_of(span)), timeline.graph, span.name, offset + span.start, span.seconds, args


def write_trace(path: Path, *processes: tuple[str, Sequence[str], Iterable[TraceSpan]]) -> None:
    """A Chrome trace, in microseconds. processes: a title, the names of its lanes, which are threads, and their spans."""
    events: list[dict[str, Any]] = []
    for pid, (title, lanes, spans) in enumerate(processes):
        events.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": title}})
        for tid, lane in enumerate(lanes):
            events.append({"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": lane}})
        for tid, category, name, start, seconds, args in spans:
            times = {"ts": 1e6 * start, "dur": 1e6 * seconds}
            events.append({"name": name, "cat": category, "ph": "X", "pid": pid, "tid": tid, **times, "args": args})
    path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}) + "\n", encoding="utf-8")


def _one_after_another(timelines: Sequence[Timeline]) -> Iterator[tuple[Timeline, float]]:
    """Each with the seconds before it."""
    return zip(timelines, itertools.accumulate((timeline.seconds for timeline in timelines), initial=0.0), strict=False)
