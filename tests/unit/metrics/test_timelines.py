"""The picture and the trace of a run's estimated timelines."""

import json
from dataclasses import replace

from matplotlib.figure import Figure

from titan_lite.compile.report import CompileReport
from titan_lite.cost.timeline import Span, Timeline
from titan_lite.metrics.timelines import COLORS, write_timelines

GATHER = Span("communication", "all_gather a", 0.0, 8.0, exposed=8.0, group="dp_shard")
PRODUCT, EXCHANGE = (
    Span("compute", "mm", 8.0, 4.0),
    Span("compute", "all_gather_of_tokens", 12.0, 1.0, exposed=1.0, group="tp"),
)
FORWARD = Timeline("forward", (GATHER, PRODUCT, EXCHANGE), 13.0, 5.0, 8.0, 8.0, 8.0, 0)


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


def test_a_picture_has_every_pipeline_rank_labelled_and_a_legend(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    write_timelines([report("forward", pp_rank=0), report("forward", pp_rank=1)], tmp_path)
    panels = drawn[0].axes
    assert [panel.get_title(loc="left") for panel in panels] == [
        "pipeline rank 0",
        "pipeline rank 1",
    ]
    for panel in panels:
        assert [label.get_text() for label in panel.get_yticklabels()] == [
            "computation",
            "FSDP",
            "tensor parallelism",
        ]
        assert panel.get_xlim() == (0.0, 13e3)
    assert [text.get_text() for text in panels[0].get_legend().get_texts()] == list(COLORS)
    write_timelines([report("forward")], tmp_path)
    assert [panel.get_title(loc="left") for panel in drawn[1].axes] == ["every rank"]


def test_the_picture_is_written(tmp_path):
    write_timelines([report("forward")], tmp_path)
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_is_drawn_where_nothing_communicates(tmp_path):
    write_timelines(
        [
            CompileReport(
                "forward",
                {},
                (),
                {},
                "abc",
                Timeline("forward", (PRODUCT,), 5.0, 5.0, 0.0, 0.0, 0.0, 0),
            )
        ],
        tmp_path,
    )
    write_timelines([CompileReport("forward", {}, (), {}, "abc")], tmp_path)
    assert list(tmp_path.iterdir()) == []
