"""Draw estimated timelines (cost/timeline.py), and write them as a trace for
https://ui.perfetto.dev and chrome://tracing.

    write_timelines(reports, dump_folder)       # timeline.png and timeline.json of a run

Computation has a lane, and each mesh axis with communication has one. tools/plan/picture.py draws
plans with the same functions.
"""

import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from titan_lite.compile.report import CompileReport, rank_timelines
from titan_lite.cost.timeline import Span, Timeline
from titan_lite.distributed.axes import WORDS

TraceSpan = tuple[
    int, str, str, float, float, dict[str, Any]
]  # lane, category, name, start and length in seconds, arguments
COLORS = {
    "computation": "tab:blue",
    "communication under computation": "tab:orange",
    "communication while nothing computes": "tab:red",
}


def write_timelines(reports: Sequence[CompileReport], folder: Path) -> None:
    """Write timeline.png and timeline.json, with a panel or a process for each pipeline rank;
    nothing without timelines.
    """
    ranks = rank_timelines(reports)
    if not ranks:
        return

    from matplotlib.figure import Figure

    lanes = lanes_of([timeline for timelines in ranks.values() for timeline in timelines])
    titles = [f"pipeline rank {rank}" for rank in ranks] if len(ranks) > 1 else ["every rank"]
    figure = Figure(figsize=(14, 1 + len(ranks) * (0.8 + 0.5 * len(lanes))), layout="constrained")
    panels = figure.subplots(len(ranks), squeeze=False, sharex=True)[:, 0]
    for panel, title, timelines in zip(panels, titles, ranks.values(), strict=True):
        captions = [
            f"{timeline.graph}: {1e3 * timeline.waited:.3g} ms exposed" for timeline in timelines
        ]
        draw_graphs(panel, timelines, lanes, captions)
        panel.set_title(title, loc="left")
        panel.label_outer()
    panels[0].set_xlim(
        0,
        1e3 * max(sum(timeline.seconds for timeline in timelines) for timelines in ranks.values()),
    )
    add_legend(panels[0], COLORS)
    figure.savefig(folder / "timeline.png", dpi=120)
    spans = (graph_spans(timelines, lanes) for timelines in ranks.values())
    write_trace(
        folder / "timeline.json", *zip(titles, itertools.repeat(lanes), spans, strict=False)
    )


def lane_of(span: Span) -> str:
    """Return the lane of a span, whose group is the name of an axis."""
    return WORDS[span.group] if span.group else "computation"


def lanes_of(timelines: Iterable[Timeline]) -> list[str]:
    """Return the lanes: computation, then the axes with communication."""
    groups = {span.group for timeline in timelines for span in timeline.spans}
    return ["computation", *(word for axis, word in WORDS.items() if axis in groups)]


def draw_graphs(
    axes: Any, timelines: Sequence[Timeline], lanes: Sequence[str], captions: Sequence[str]
) -> None:
    """Draw one graph after another over milliseconds, each with its caption, in COLORS."""
    computing, hidden, waiting = COLORS.values()
    bars: dict[tuple[float, str], list[tuple[float, float]]] = defaultdict(list)
    for (timeline, offset), caption in zip(_one_after_another(timelines), captions, strict=True):
        for span in timeline.spans:
            lane = lanes.index(lane_of(span))
            height, start = len(lanes) - 0.9 - lane, 1e3 * (offset + span.start)
            bars[height, hidden if lane else computing].append((start, 1e3 * span.seconds))
            bars[height, waiting].append(
                (start + 1e3 * (span.seconds - span.exposed), 1e3 * span.exposed)
            )
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
    axes: Any, bars: Mapping[tuple[float, str], Sequence[tuple[float, float]]], edge: str = "none"
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


def add_legend(axes: Any, colors: Mapping[str, str]) -> None:
    """Add a legend of {meaning: color}."""
    from matplotlib.patches import Patch

    patches = [Patch(color=color, label=meaning) for meaning, color in colors.items()]
    axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


def graph_spans(timelines: Sequence[Timeline], lanes: Sequence[str]) -> Iterator[TraceSpan]:
    """Yield the spans of one graph after another."""
    for timeline, offset in _one_after_another(timelines):
        for span in timeline.spans:
            args = {"graph": timeline.graph, "exposed_us": 1e6 * span.exposed}
            yield (
                lanes.index(lane_of(span)),
                timeline.graph,
                span.name,
                offset + span.start,
                span.seconds,
                args,
            )


def write_trace(path: Path, *processes: tuple[str, Sequence[str], Iterable[TraceSpan]]) -> None:
    """Write a Chrome trace, in microseconds.

    processes: (title, names of its lanes, spans); a lane is a thread of the trace.
    """
    events: list[dict[str, Any]] = []
    for pid, (title, lanes, spans) in enumerate(processes):
        events.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": title}})
        for tid, lane in enumerate(lanes):
            events.append(
                {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": lane}}
            )
        for tid, category, name, start, seconds, args in spans:
            times = {"ts": 1e6 * start, "dur": 1e6 * seconds}
            events.append(
                {
                    "name": name,
                    "cat": category,
                    "ph": "X",
                    "pid": pid,
                    "tid": tid,
                    **times,
                    "args": args,
                }
            )
    path.write_text(
        json.dumps({"displayTimeUnit": "ms", "traceEvents": events}) + "\n", encoding="utf-8"
    )


def _one_after_another(timelines: Sequence[Timeline]) -> Iterator[tuple[Timeline, float]]:
    """Yield (timeline, seconds before it)."""
    return zip(
        timelines,
        itertools.accumulate((timeline.seconds for timeline in timelines), initial=0.0),
        strict=False,
    )
