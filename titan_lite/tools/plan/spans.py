"""Write a plan as a trace: the step on all pipeline ranks, and one microbatch by mesh axis.

    write_plan_trace(plan, Path("plan.json"))          # for https://ui.perfetto.dev and chrome://tracing

The graphs are those of the deepest traced stage, which may have fewer blocks than the real stage.
"""

from pathlib import Path

from titan_lite.metrics.timelines import (
    TraceProcess,
    TraceSpan,
    graph_spans,
    lanes_of,
    write_trace,
)
from titan_lite.tools.plan.plan import Plan

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


def step_spans(plan: Plan) -> list[TraceSpan]:
    """Return all parts of a step that take time."""
    step = plan.nominal
    spans = [
        TraceSpan(rank, "gather", END_NAMES["gather"], 0.0, ends["gather"], {})
        for rank, ends in enumerate(step.ends)
    ]
    start = max(ends["gather"] for ends in step.ends)
    for batch in range(plan.layout.accumulation):
        first = batch * plan.layout.pipeline.microbatches
        for rank, actions in step.run.actions.items():
            for kind, stage, microbatch, begin, end in actions:
                name = f"{ACTION_NAMES[kind]}, stage {stage}, microbatch {first + microbatch}"
                spans.append(TraceSpan(rank, kind, name, start + begin, end - begin, {}))
        start += step.run.seconds
    for rank, ends in enumerate(step.ends):
        begin = start
        for kind, seconds in ends.items():
            if kind != "gather":
                spans.append(TraceSpan(rank, kind, END_NAMES[kind], begin, seconds, {}))
                begin += seconds
    return [span for span in spans if span.seconds > 0]


def write_plan_trace(plan: Plan, path: Path) -> None:
    """Write a Chrome trace: process 0 is the step, a thread per pipeline rank; process 1 the
    graphs, a thread per lane.
    """
    ranks = [f"pipeline rank {rank}" for rank in range(plan.layout.degrees["pp"])]
    step = TraceProcess("the step (nominal)", ranks, step_spans(plan))
    beside = max(plan.timelines, key=lambda beside: plan.depths[beside][-1])  # of most blocks
    timelines = plan.timelines[beside]
    names = {timeline.graph for timeline in timelines}
    modules = f" with {', '.join(beside)}" if beside else ""
    both = ", backward full, then split" if {"backward", "backward_input"} <= names else ""
    title = f"one microbatch: a traced stage of {plan.depths[beside][-1]} blocks{modules}{both}"
    lanes = lanes_of(timelines)
    write_trace(path, [step, TraceProcess(title, lanes, graph_spans(timelines, lanes))])
