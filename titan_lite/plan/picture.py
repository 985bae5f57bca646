"""A plan to look at: the step on all pipeline ranks, and under it one microbatch's graphs with a lane for each mesh axis.

    draw_plan(plan, Path("plan.png"))
    write_plan_trace(plan, Path("plan.json"))          # for https://ui.perfetto.dev and chrome://tracing

The step is whole. Graphs are of the deepest stage that was traced, which may have fewer blocks than the one it stands for.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from titan_lite.compiler.timeline import Span, Timeline
from titan_lite.distributed.mesh import AXES
from titan_lite.plan.summary import WORDS, Plan
from titan_lite.plan.trace import Kind

COLORS = {"F": "tab:blue", "B": "tab:green", "I": "tab:green", "W": "tab:olive"}
ENDS = {"gather": "tab:orange", "reduce": "tab:orange", "optimizer": "tab:gray"}
NAMES = {"F": "forward", "B": "backward", "I": "backward, of inputs", "W": "backward, of weights"}


def step_spans(plan: Plan) -> list[tuple[int, str, str, float, float]]:
    """(pipeline rank, F B I W or one of ENDS, name, start, seconds) of everything that a step does."""
    step, found = plan.steps[0], []
    for rank, ends in enumerate(step.ends):
        found.append((rank, "gather", "gather weights", 0.0, ends["gather"]))
    start = max(ends["gather"] for ends in step.ends)
    for batch in range(plan.layout.accumulation):
        for rank, actions in step.run.actions.items():
            for kind, stage, microbatch, begin, end in actions:
                name = f"{NAMES[kind]}, stage {stage}, microbatch {batch * plan.layout.pipeline.microbatches + microbatch}"
                found.append((rank, kind, name, start + begin, end - begin))
        start += step.run.seconds
    for rank, ends in enumerate(step.ends):
        found.append((rank, "reduce", "reduce gradients", start, ends["reduce"]))
        found.append((rank, "optimizer", "clipping and optimizer", start + ends["reduce"], ends["optimizer"]))
    return [each for each in found if each[-1] > 0]


def deepest(plan: Plan) -> tuple[Kind, Sequence[Timeline]]:
    """Of the kinds of stages, the one whose stages have most blocks."""
    kind = max(plan.timelines, key=lambda kind: plan.depths[kind][-1])
    return kind, plan.timelines[kind]


def lane_of(span: Span) -> str:
    return WORDS[span.group] if span.group else "computation"


def title_of(plan: Plan, kind: Kind) -> str:
    blocks = plan.depths[kind][-1]
    beside = f" with {', '.join(kind)}" if kind else ""
    return f"one microbatch: a stage of {blocks} blocks{beside}, as traced"


def draw_plan(plan: Plan, path: Path) -> None:
    """A PNG: bars over milliseconds; what of communication nothing computes under is red."""
    from matplotlib.figure import Figure

    kind, timelines = deepest(plan)
    degree = plan.layout.degrees["pp"]
    lanes = lanes_of(timelines)
    sizes = [1.2 + 0.25 * degree, 0.8 + 0.5 * len(lanes)]
    figure = Figure(figsize=(14, sum(sizes) + 1), layout="constrained")
    step, graphs = figure.subplots(2, gridspec_kw={"height_ratios": sizes})
    bars: dict[tuple[float, str], list[tuple[float, float]]] = defaultdict(list)
    for rank, what, _, start, seconds in step_spans(plan):
        bars[degree - 0.9 - rank, (COLORS | ENDS)[what]].append((1e3 * start, 1e3 * seconds))
    draw_bars(step, bars, edge="white")
    step.set(
        title=f"the step, as stated: {plan.steps[0].seconds:.3g} s; blue forward, green backward, orange FSDP once a step, grey "
        "optimizer",
        yticks=[degree - 0.5 - rank for rank in range(degree)],
        yticklabels=[f"pipeline rank {rank}" if degree > 1 else "every rank" for rank in range(degree)],
        xlim=(0, 1e3 * plan.steps[0].seconds),
        ylim=(0, degree),
    )
    offset = 0.0
    bars = defaultdict(list)
    for timeline in timelines:
        for span in timeline.spans:
            height = len(lanes) - 0.9 - lanes.index(lane_of(span))
            waited = span.seconds if span.group and span.lane == "compute" else span.exposed
            start = 1e3 * (offset + span.start)
            bars[height, "tab:orange" if span.group else "tab:blue"].append((start, 1e3 * span.seconds))
            bars[height, "tab:red"].append((start + 1e3 * (span.seconds - waited), 1e3 * waited))
        if timeline.seconds > 0.08 * sum(each.seconds for each in timelines):  # else there is no room for a name
            middle = 1e3 * (offset + timeline.seconds / 2)
            graphs.text(middle, len(lanes), timeline.graph.replace("_", ": "), ha="center", va="bottom")
        offset += timeline.seconds
        graphs.axvline(1e3 * offset, color="black", linewidth=0.8)
    draw_bars(graphs, bars)
    graphs.set(
        xlabel="milliseconds, as estimated; red: nothing computes meanwhile",
        yticks=[len(lanes) - 0.5 - number for number in range(len(lanes))],
        yticklabels=lanes,
        xlim=(0, 1e3 * offset),
        ylim=(0, len(lanes) + 0.6),
    )
    graphs.set_title(title_of(plan, kind), pad=12)
    figure.savefig(path, dpi=120)


def draw_bars(axes: Any, bars: Mapping[tuple[float, str], Sequence[tuple[float, float]]], edge: str = "none") -> None:
    """bars: by height and color, (start, length) each; what is drawn later covers what was before."""
    for (height, color), spans in bars.items():
        axes.broken_barh([span for span in spans if span[1]], (height, 0.8), facecolors=color, edgecolors=edge, linewidth=0.2)


def lanes_of(timelines: Sequence[Timeline]) -> list[str]:
    groups = {span.group for timeline in timelines for span in timeline.spans}
    return ["computation", *(WORDS[axis] for axis in AXES if axis in groups)]


def write_plan_trace(plan: Plan, path: Path) -> None:
    """A Chrome trace, in microseconds: process 0 is the step, a thread a pipeline rank; process 1 the graphs, a thread a lane."""
    kind, timelines = deepest(plan)
    lanes = lanes_of(timelines)
    ranks = [f"pipeline rank {rank}" for rank in range(plan.layout.degrees["pp"])]
    events: list[dict[str, Any]] = []
    for pid, title, threads in ((0, "the step, as stated", ranks), (1, title_of(plan, kind), lanes)):
        events.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": title}})
        events += [
            {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}} for tid, name in enumerate(threads)
        ]
    for rank, what, name, start, seconds in step_spans(plan):
        events.append({"name": name, "cat": what, "ph": "X", "pid": 0, "tid": rank, "ts": 1e6 * start, "dur": 1e6 * seconds})
    offset = 0.0
    for timeline in timelines:
        for span in timeline.spans:
            place = {"pid": 1, "tid": lanes.index(lane_of(span)), "ts": 1e6 * (offset + span.start), "dur": 1e6 * span.seconds}
            args = {"graph": timeline.graph, "exposed_us": 1e6 * span.exposed}
            events.append({"name": span.name, "cat": timeline.graph, "ph": "X", **place, "args": args})
        offset += timeline.seconds
    path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}) + "\n", encoding="utf-8")
