"""The trace of a run's estimated timelines."""

import json
from dataclasses import replace

from titan_lite.compile.report import CompileReport
from titan_lite.cost.timeline import Span, Timeline
from titan_lite.metrics.timelines import write_timelines

GATHER = Span("communication", "all_gather a", 0.0, 8.0, exposed=8.0, group="dp_shard")
MATMUL, EXCHANGE = (
    Span("compute", "mm", 8.0, 4.0),
    Span("compute", "all_gather_of_tokens", 12.0, 1.0, exposed=1.0, group="tp"),
)
FORWARD = Timeline("forward", (GATHER, MATMUL, EXCHANGE), 13.0, 5.0, 8.0, 8.0, 8.0, 0)


def report(graph, **fields):
    return CompileReport(graph, {}, (), {}, "abc", replace(FORWARD, graph=graph), **fields)


def test_a_trace_has_every_pipeline_rank_and_a_lane_for_every_axis(tmp_path):
    write_timelines(
        [
            report("forward"),
            report("backward"),
            report("inference"),
            report("forward", pp_rank=1),
        ],
        tmp_path,
    )
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    bars = [event for event in events if event["ph"] == "X"]
    assert [event["pid"] for event in bars] == [0] * 6 + [1] * 3
    first_of_backward = next(event for event in bars if event["cat"] == "backward")
    assert (first_of_backward["ts"], first_of_backward["args"]["exposed_us"]) == (13e6, 8e6)
    assert {event["name"]: event["tid"] for event in bars} == {
        "mm": 0,
        "all_gather a": 1,
        "all_gather_of_tokens": 2,
    }
    assert {event["args"]["exposed_us"] for event in bars if event["tid"] == 2} == {1e6}
    named = [event["args"]["name"] for event in events if event["ph"] == "M"]
    lanes = ["computation", "FSDP", "tensor parallelism"]
    assert named == ["pipeline rank 0", *lanes, "pipeline rank 1", *lanes]


def test_nothing_is_written_where_nothing_communicates(tmp_path):
    write_timelines(
        [
            CompileReport(
                "forward",
                {},
                (),
                {},
                "abc",
                Timeline("forward", (MATMUL,), 5.0, 5.0, 0.0, 0.0, 0.0, 0),
            )
        ],
        tmp_path,
    )
    write_timelines([CompileReport("forward", {}, (), {}, "abc")], tmp_path)
    assert list(tmp_path.iterdir()) == []
