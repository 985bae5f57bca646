"""The trace of a plan, from timelines by hand: the step on every pipeline rank, graphs with a
lane for each axis.
"""

import dataclasses
import itertools
import json

import pytest
from test_changes import EVIDENCE
from test_simulate import AT_ONCE, layout, stages_of

from titan_lite.cost.costs import Costs
from titan_lite.cost.timeline import Span, Timeline
from titan_lite.tools.plan.memory import Memory
from titan_lite.tools.plan.plan import Plan
from titan_lite.tools.plan.simulate import simulate_step
from titan_lite.tools.plan.spans import step_spans, write_plan_trace

GRAPH = Timeline(
    "forward",
    (
        Span("communication", "all_gather a", 0.0, 2.0, exposed=1.0, group="dp_shard"),
        Span("compute", "mm", 1.0, 3.0),
        Span("compute", "all_gather_into_tensor", 4.0, 1.0, exposed=1.0, group="tp"),
    ),
    5.0,
    4.0,
    2.0,
    1.0,
    0.0,
    0,
)


@pytest.fixture
def plan():
    mine = layout(2, 4, accumulation=2, gathers_once=True)
    costs = stages_of(
        mine,
        elements=1e9,
        once={"gather": Costs(exposed={"dp_shard": 3.0}), "reduce": Costs(0.25)},
    )
    step = simulate_step(mine, costs, AT_ONCE)
    timelines = {
        ("tok_embeddings",): [GRAPH],
        ("norm", "output"): [dataclasses.replace(GRAPH, graph="other")],
    }
    depths = {("tok_embeddings",): (3, 4), ("norm", "output"): (3,)}
    return Plan(
        mine,
        AT_ONCE,
        step,
        Memory(0, "forward", {}, 0.0, 0.0),
        EVIDENCE,
        depths,
        timelines,
    )


def test_everything_a_step_does_has_its_place(plan):
    spans = step_spans(plan)
    assert max(start + seconds for *_, start, seconds, _ in spans) == pytest.approx(
        plan.nominal.seconds
    )
    of_rank = [what for rank, what, *_ in spans if rank == 1]
    assert {what: of_rank.count(what) for what in of_rank} == {
        "gather": 1,
        "F": 8,
        "B": 8,
        **dict.fromkeys(("reduce", "optimizer", "slowest"), 1),
    }
    for rank in (0, 1):  # one thing at a time
        mine = sorted(
            (start, start + seconds) for each, *_, start, seconds, _ in spans if each == rank
        )
        assert all(end <= start + 1e-9 for (_, end), (start, _) in itertools.pairwise(mine))


def test_a_trace_has_a_thread_for_each_rank_and_lane(plan, tmp_path):
    write_plan_trace(plan, tmp_path / "plan.json")
    events = json.loads((tmp_path / "plan.json").read_text())["traceEvents"]
    threads = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    assert threads == {
        (0, 0): "pipeline rank 0",
        (0, 1): "pipeline rank 1",
        (1, 0): "computation",
        (1, 1): "FSDP",
        (1, 2): "tensor parallelism",
    }
    graphs = {
        event["name"]: event["tid"] for event in events if event["ph"] == "X" and event["pid"] == 1
    }
    assert graphs == {
        "all_gather a": 1,
        "mm": 0,
        "all_gather_into_tensor": 2,
    }  # of the deepest stage alone
    assert {event["cat"] for event in events if event.get("pid") == 1 and event["ph"] == "X"} == {
        "forward"
    }
    (gather,) = (event for event in events if event["name"] == "all_gather a")
    assert (gather["ts"], gather["dur"], gather["args"]["exposed_us"]) == (0.0, 2e6, 1e6)
