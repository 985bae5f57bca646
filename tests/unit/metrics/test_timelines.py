"""The picture and the trace of a run's estimated timelines."""

import json
from dataclasses import replace

from titan_lite.compiler.receipt import Receipt
from titan_lite.compiler.timeline import Span, Timeline
from titan_lite.metrics.timelines import write_timelines

GATHER, PRODUCT = Span("communication", "all_gather a", 0.0, 8.0, exposed=8.0), Span("compute", "mm", 8.0, 5.0)
FORWARD = Timeline("forward", (GATHER, PRODUCT), 13.0, 5.0, 8.0, 8.0, 8.0, 0)


def receipt(graph, **fields):
    return Receipt(graph, {}, (), 0, "abc", replace(FORWARD, graph=graph), **fields)


def test_picture_and_trace(tmp_path):
    write_timelines([receipt("forward"), receipt("backward"), receipt("inference"), receipt("forward", pp_rank=1)], tmp_path)
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    events = [event for event in json.loads((tmp_path / "timeline.json").read_text())["traceEvents"] if event["ph"] == "X"]
    assert len(events) == 2 * 2
    first_of_backward = next(event for event in events if event["cat"] == "backward")
    assert (first_of_backward["ts"], first_of_backward["args"]["exposed_us"]) == (13e6, 8e6)
    assert {event["name"]: event["tid"] for event in events} == {"mm": 0, "all_gather a": 1}


def test_nothing_is_drawn_where_nothing_communicates(tmp_path):
    write_timelines([Receipt("forward", {}, (), 0, "abc", Timeline("forward", (PRODUCT,), 5.0, 5.0, 0.0, 0.0, 0.0, 0))], tmp_path)
    write_timelines([Receipt("forward", {}, (), 0, "abc")], tmp_path)
    assert list(tmp_path.iterdir()) == []
