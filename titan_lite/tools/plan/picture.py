"""Draw a plan: the step on all pipeline ranks, and below it one microbatch's graphs with a lane for
each mesh axis.

    draw_plan(plan, Path("plan.png"))
    write_plan_trace(plan, Path("plan.json"))          # for https://ui.perfetto.dev and chrome://tracing

The graphs are those of the deepest traced stage, which may have fewer blocks than the real stage.
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from titan_lite.cost.timeline import Timeline
from titan_lite.metrics.timelines import (
    COLORS,
    TraceProcess,
    TraceSpan,
    add_legend,
    draw_bars,
    draw_graphs,
    graph_spans,
    lanes_of,
    write_trace,
)
from titan_lite.tools.plan.summary import Plan

NAMES = {"F": "forward", "B": "backward", "I": "backward, of inputs", "W": "backward, of weights"}
ENDS = {
    "gather": "gather weights",
    "reduce": "reduce gradients",
    "copies": "compressed sums over copies",
    "optimizer": "clipping and optimizer",
    "slowest": "waiting for the slowest rank",
}
STEP_COLORS = {
    "forward": "tab:blue",
    "backward": "tab:green",
    "backward, of inputs": "tab:green",
    "backward, of weights": "tab:olive",
    "gather weights": "tab:orange",
    "reduce gradients": "tab:brown",
    "compressed sums over copies": "tab:pink",
    "clipping and optimizer": "tab:gray",
    "waiting for the slowest rank": "tab:red",
}


def step_spans(plan: Plan) -> list[tuple[int, str, str, float, float]]:
    """Return (pipeline rank, kind, name, start, seconds) of all parts of a step.

    kind: F, B, I, W or a key of ENDS.
    """
    step, found = plan.steps[0], []
    for rank, ends in enumerate(step.ends):
        found.append((rank, "gather", ENDS["gather"], 0.0, ends["gather"]))
    start = max(ends["gather"] for ends in step.ends)
    for batch in range(plan.layout.accumulation):
        for rank, actions in step.run.actions.items():
            for kind, stage, microbatch, begin, end in actions:
                name = (
                    f"{NAMES[kind]}, stage {stage}, microbatch"
                    f" {batch * plan.layout.pipeline.microbatches + microbatch}"
                )
                found.append((rank, kind, name, start + begin, end - begin))
        start += step.run.seconds
    for rank, ends in enumerate(step.ends):
        begin = start
        for what in [*ends][1:]:
            found.append((rank, what, ENDS[what], begin, ends[what]))
            begin += ends[what]
    return [each for each in found if each[-1] > 0]


def deepest(plan: Plan) -> tuple[str, Sequence[Timeline], list[str]]:
    """Return a title, the timelines and the names of their lanes for the kind of stage with most
    blocks.
    """
    kind = max(plan.timelines, key=lambda kind: plan.depths[kind][-1])
    beside = f" with {', '.join(kind)}" if kind else ""
    title = f"one microbatch: a traced stage of {plan.depths[kind][-1]} blocks{beside}"
    return title, plan.timelines[kind], lanes_of(plan.timelines[kind])


def draw_plan(plan: Plan, path: Path) -> None:
    """Write a PNG: bars over milliseconds, each panel with its legend."""
    from matplotlib.figure import Figure

    title, timelines, lanes = deepest(plan)
    degree = plan.layout.degrees["pp"]
    sizes = [1.2 + 0.25 * degree, 0.8 + 0.5 * len(lanes)]
    figure = Figure(figsize=(14, sum(sizes) + 1), layout="constrained")
    step, graphs = figure.subplots(2, gridspec_kw={"height_ratios": sizes})
    bars: dict[tuple[float, str], list[tuple[float, float]]] = defaultdict(list)
    drawn: dict[str, str] = {}
    for rank, what, _, start, seconds in step_spans(plan):
        name = (NAMES | ENDS)[what]
        drawn[name] = STEP_COLORS[name]
        bars[degree - 0.9 - rank, STEP_COLORS[name]].append((1e3 * start, 1e3 * seconds))
    draw_bars(step, bars, edge="white")
    step.set(
        title=f"the step (nominal): {plan.steps[0].seconds:.3g} s",
        yticks=[degree - 0.5 - rank for rank in range(degree)],
        yticklabels=[
            f"pipeline rank {rank}" if degree > 1 else "every rank" for rank in range(degree)
        ],
        xlim=(0, 1e3 * plan.steps[0].seconds),
        ylim=(0, degree),
    )
    add_legend(step, drawn)
    room = 0.08 * sum(each.seconds for each in timelines)  # needed for a name
    names = [
        timeline.graph.replace("_", ": ") if timeline.seconds > room else ""
        for timeline in timelines
    ]
    draw_graphs(graphs, timelines, lanes, names)
    add_legend(graphs, COLORS)
    graphs.set_title(title, pad=12)
    figure.savefig(path, dpi=120)


def write_plan_trace(plan: Plan, path: Path) -> None:
    """Write a Chrome trace: process 0 is the step, a thread per pipeline rank; process 1 the
    graphs, a thread per lane.
    """
    title, timelines, lanes = deepest(plan)
    ranks = [f"pipeline rank {rank}" for rank in range(plan.layout.degrees["pp"])]
    step = TraceProcess(
        "the step (nominal)", ranks, [TraceSpan(*span, {}) for span in step_spans(plan)]
    )
    write_trace(path, [step, TraceProcess(title, lanes, graph_spans(timelines, lanes))])
