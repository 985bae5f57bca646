"""Draw estimated timelines (cost/timeline.py), and write them as a trace for
https://ui.perfetto.dev and chrome://tracing.

    write_timelines(reports, dump_folder)       # timeline.png and timeline.json of a run

Computation has a lane, and each mesh axis with communication has one. tools/plan/picture.py draws
plans with the same functions.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from titan_lite.compile.report import CompileReport, rank_timelines
from titan_lite.cost.timeline import Span, Timeline
from titan_lite.distributed.axes import AXIS_NAMES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANEL_WIDTH = 14  # inches
LANE_HEIGHT = 0.5
COLORS = {
    "computation": "tab:blue",
    "communication under computation": "tab:orange",
    "communication while nothing computes": "tab:red",
}


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
    """Write timeline.png and timeline.json, with a panel or a process for each pipeline rank;
    nothing without timelines.
    """
    timelines_by_rank = rank_timelines(reports)
    if not timelines_by_rank:
        return

    from matplotlib.figure import Figure

    lanes = lanes_of([timeline for some in timelines_by_rank.values() for timeline in some])
    titles = ["every rank"]
    if len(timelines_by_rank) > 1:
        titles = [f"pipeline rank {rank}" for rank in timelines_by_rank]

    height = 1 + len(titles) * (0.8 + LANE_HEIGHT * len(lanes))
    figure = Figure(figsize=(PANEL_WIDTH, height), layout="constrained")
    panels = figure.subplots(len(titles), squeeze=False, sharex=True)[:, 0]
    for panel, title, timelines in zip(panels, titles, timelines_by_rank.values(), strict=True):
        captions = [
            f"{timeline.graph}: {1e3 * timeline.waited:.3g} ms exposed" for timeline in timelines
        ]
        draw_graphs(panel, timelines, lanes, captions)
        panel.set_title(title, loc="left")
        panel.label_outer()
    longest = max(
        sum(timeline.seconds for timeline in timelines) for timelines in timelines_by_rank.values()
    )
    panels[0].set_xlim(0, 1e3 * longest)
    add_legend(panels[0], COLORS)
    figure.savefig(folder / "timeline.png", dpi=120)

    processes = [
        TraceProcess(title, lanes, graph_spans(timelines, lanes))
        for title, timelines in zip(titles, timelines_by_rank.values(), strict=True)
    ]
    write_trace(folder / "timeline.json", processes)


def lane_of(span: Span) -> str:
    """Return the lane of a span, whose group is the name of an axis."""
    return AXIS_NAMES[span.group] if span.group else "computation"


def lanes_of(timelines: Iterable[Timeline]) -> list[str]:
    """Return the lanes: computation, then the axes with communication."""
    groups = {span.group for timeline in timelines for span in timeline.spans}
    return ["computation", *(word for axis, word in AXIS_NAMES.items() if axis in groups)]


def draw_graphs(
    axes: "Axes", timelines: Sequence[Timeline], lanes: Sequence[str], captions: Sequence[str]
) -> None:
    """Draw one graph after another over milliseconds, each with its caption, in COLORS."""
    computation, hidden, exposed = COLORS.values()
    bars: dict[tuple[float, str], list[tuple[float, float]]] = defaultdict(list)
    for (timeline, offset), caption in zip(_with_offsets(timelines), captions, strict=True):
        for span in timeline.spans:
            lane = lanes.index(lane_of(span))
            height = len(lanes) - 0.9 - lane
            start = 1e3 * (offset + span.start)
            length = 1e3 * span.seconds
            exposed_length = 1e3 * span.exposed
            bars[height, hidden if lane else computation].append((start, length))
            bars[height, exposed].append((start + length - exposed_length, exposed_length))
        middle = 1e3 * (offset + timeline.seconds / 2)
        axes.text(middle, len(lanes), caption, ha="center", va="bottom")
        axes.axvline(1e3 * (offset + timeline.seconds), color="black", linewidth=0.8)
    draw_bars(axes, bars)
    axes.set(
        xlabel="milliseconds (estimated)",
        yticks=[len(lanes) - 0.5 - number for number in range(len(lanes))],
        yticklabels=lanes,
        xlim=(0, 1e3 * sum(timeline.seconds for timeline in timelines)),
        ylim=(0, len(lanes) + 0.6),
    )


def draw_bars(
    axes: "Axes",
    bars: Mapping[tuple[float, str], Sequence[tuple[float, float]]],
    edge: str = "none",
) -> None:
    """Draw bars {(height, color): [(start, length), ...]}; a later one covers those before it."""
    for (height, color), spans in bars.items():
        axes.broken_barh(
            [span for span in spans if span[1]],
            (height, 0.8),
            facecolors=color,
            edgecolors=edge,
            linewidth=0.2,
        )


def add_legend(axes: "Axes", colors: Mapping[str, str]) -> None:
    """Add a legend of {meaning: color}."""
    from matplotlib.patches import Patch

    patches = [Patch(color=color, label=meaning) for meaning, color in colors.items()]
    axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


def graph_spans(timelines: Sequence[Timeline], lanes: Sequence[str]) -> Iterator[TraceSpan]:
    """Yield the spans of one graph after another."""
    for timeline, offset in _with_offsets(timelines):
        for span in timeline.spans:
            yield TraceSpan(
                lane=lanes.index(lane_of(span)),
                category=timeline.graph,
                name=span.name,
                start=offset + span.start,
                seconds=span.seconds,
                arguments={"graph": timeline.graph, "exposed_us": 1e6 * span.exposed},
            )


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


def _with_offsets(timelines: Sequence[Timeline]) -> Iterator[tuple[Timeline, float]]:
    """Yield (timeline, seconds of those before it)."""
    offset = 0.0
    for timeline in timelines:
        yield timeline, offset
        offset += timeline.seconds
