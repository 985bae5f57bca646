"""Draw a plan: the step on all pipeline ranks, and one microbatch's graphs by mesh axis.

    draw_plan(plan, Path("plan.png"))
    write_plan_trace(plan, Path("plan.json"))          # for https://ui.perfetto.dev and chrome://tracing

The graphs are those of the deepest traced stage, which may have fewer blocks than the real stage.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from titan_lite.cost.timeline import Timeline
from titan_lite.metrics.timelines import (
    TraceProcess,
    TraceSpan,
    graph_spans,
    lane_of,
    lanes_of,
    with_offsets,
    write_trace,
)
from titan_lite.tools.plan.plan import Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {  # of graphs
    "computation": "tab:blue",
    "communication under computation": "tab:orange",
    "communication while nothing computes": "tab:red",
}
# By the kind of a pipeline's action.
ACTION_NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "backward, of inputs",
    "W": "backward, of weights",
}
# By what happens once in a step, as in StepTimes.ends.
END_NAMES = {
    "gather": "gather weights",
    "reduce": "reduce gradients",
    "after_backward": "sums after backward",
    "optimizer": "clipping and optimizer",
    "slowest": "waiting for the slowest rank",
}
STEP_COLORS = {
    "forward": "tab:blue",
    "backward": "tab:green",
    "backward, of inputs": "tab:cyan",
    "backward, of weights": "tab:olive",
    "gather weights": "tab:orange",
    "reduce gradients": "tab:brown",
    "sums after backward": "tab:pink",
    "clipping and optimizer": "tab:gray",
    "waiting for the slowest rank": "tab:red",
}


class StepSpan(NamedTuple):
    """A part of a step on a pipeline rank."""

    rank: int
    kind: str  # of ACTION_NAMES or END_NAMES
    name: str
    start: float  # seconds
    seconds: float


def step_spans(plan: Plan) -> list[StepSpan]:
    """Return all parts of a step that take time."""
    step = plan.nominal
    spans = [
        StepSpan(rank, "gather", END_NAMES["gather"], 0.0, ends["gather"])
        for rank, ends in enumerate(step.ends)
    ]
    start = max(ends["gather"] for ends in step.ends)
    for batch in range(plan.layout.accumulation):
        first = batch * plan.layout.pipeline.microbatches
        for rank, actions in step.run.actions.items():
            for kind, stage, microbatch, begin, end in actions:
                name = f"{ACTION_NAMES[kind]}, stage {stage}, microbatch {first + microbatch}"
                spans.append(StepSpan(rank, kind, name, start + begin, end - begin))
        start += step.run.seconds
    for rank, ends in enumerate(step.ends):
        begin = start
        for kind, seconds in ends.items():
            if kind != "gather":
                spans.append(StepSpan(rank, kind, END_NAMES[kind], begin, seconds))
                begin += seconds
    return [span for span in spans if span.seconds > 0]


class TracedGraphs(NamedTuple):
    """The graphs of a microbatch in a traced stage."""

    title: str
    timelines: Sequence[Timeline]
    lanes: list[str]


def deepest(plan: Plan) -> TracedGraphs:
    """Return the graphs of the traced stage with most blocks."""
    beside = max(plan.timelines, key=lambda beside: plan.depths[beside][-1])
    blocks = plan.depths[beside][-1]
    modules = f" with {', '.join(beside)}" if beside else ""
    timelines = plan.timelines[beside]
    names = [timeline.graph for timeline in timelines]
    both = ", backward full, then split" if {"backward", "backward_input"} <= {*names} else ""
    title = f"one microbatch: a traced stage of {blocks} blocks{modules}{both}"
    return TracedGraphs(title, timelines, lanes_of(timelines))


def draw_plan(plan: Plan, path: Path) -> None:
    """Write a PNG: bars over milliseconds, each panel with its legend."""
    from matplotlib.figure import Figure

    graphs = deepest(plan)
    heights = [1.2 + 0.25 * plan.layout.degrees["pp"], 0.8 + 0.5 * len(graphs.lanes)]
    figure = Figure(figsize=(14, sum(heights) + 1), layout="constrained")
    step_axes, graph_axes = figure.subplots(2, gridspec_kw={"height_ratios": heights})
    _draw_step(step_axes, plan)
    least_width = 0.08 * sum(timeline.seconds for timeline in graphs.timelines)  # of a name
    names = [
        timeline.graph.replace("_", ": ") if timeline.seconds > least_width else ""
        for timeline in graphs.timelines
    ]
    draw_graphs(graph_axes, graphs.timelines, graphs.lanes, names)
    add_legend(graph_axes, COLORS)
    graph_axes.set_title(graphs.title, pad=12)
    figure.savefig(path, dpi=120)


def _draw_step(axes: "Axes", plan: Plan) -> None:
    """Draw a bar for each part of the step, a line for each pipeline rank."""
    degree = plan.layout.degrees["pp"]
    bars: dict[tuple[float, str], list[tuple[float, float]]] = defaultdict(list)
    legend: dict[str, str] = {}
    for span in step_spans(plan):
        name = {**ACTION_NAMES, **END_NAMES}[span.kind]
        color = STEP_COLORS[name]
        legend[name] = color
        bars[degree - 0.9 - span.rank, color].append((1e3 * span.start, 1e3 * span.seconds))
    draw_bars(axes, bars, edge="white")
    labels = [f"pipeline rank {rank}" for rank in range(degree)] if degree > 1 else ["every rank"]
    axes.set(
        title=f"the step (nominal): {plan.nominal.seconds:.3g} s",
        yticks=[degree - 0.5 - rank for rank in range(degree)],
        yticklabels=labels,
        xlim=(0, 1e3 * plan.nominal.seconds),
        ylim=(0, degree),
    )
    add_legend(axes, legend)


def draw_graphs(
    axes: "Axes", timelines: Sequence[Timeline], lanes: Sequence[str], captions: Sequence[str]
) -> None:
    """Draw one graph after another over milliseconds, each with its caption, in COLORS."""
    computation = COLORS["computation"]
    hidden = COLORS["communication under computation"]
    exposed = COLORS["communication while nothing computes"]
    bars: dict[tuple[float, str], list[tuple[float, float]]] = defaultdict(list)
    for (timeline, offset), caption in zip(with_offsets(timelines), captions, strict=True):
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


def write_plan_trace(plan: Plan, path: Path) -> None:
    """Write a Chrome trace: process 0 is the step, a thread per pipeline rank; process 1 the
    graphs, a thread per lane.
    """
    graphs = deepest(plan)
    ranks = [f"pipeline rank {rank}" for rank in range(plan.layout.degrees["pp"])]
    step = TraceProcess(
        "the step (nominal)", ranks, [TraceSpan(*span, {}) for span in step_spans(plan)]
    )
    traced = TraceProcess(graphs.title, graphs.lanes, graph_spans(graphs.timelines, graphs.lanes))
    write_trace(path, [step, traced])
