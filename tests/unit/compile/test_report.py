"""The report of the compile stage: a line a graph, and JSON."""

import json
from dataclasses import replace

from titan_lite.compile.report import (
    Collective,
    CompileReport,
    describe,
    rank_timelines,
    write_reports,
)
from titan_lite.cost.timeline import Timeline

BOTH = Collective(
    "all_gather", ("layers.0.a.weight", "layers.0.b.weight"), 2**30, 8, 0.004, 0.001, 0.003
)
PASSES = {"bucket_by_block": 1, "overlap_collectives": 0}
TIMELINE = Timeline("forward", (), 0.014, 0.011, 0.004, 0.003, 0.002, 5 * 2**30)
FORWARD = CompileReport(
    "forward",
    {"all_gather": 2},
    (BOTH,),
    PASSES,
    "abc",
    TIMELINE,
    compile_seconds=12.34,
    segments=14,
    different_segments=6,
    cached_segments=2,
)
BACKWARD = CompileReport("backward", {"all_gather": 1}, (BOTH,), {}, "def", compile_seconds=2.0)


def test_a_line_a_graph():
    assert describe([FORWARD, BACKWARD]) == [
        (
            "forward graph: 2 all_gather -> 1 (1.000 GiB); estimated 4 ms"
            " communication beside 11 ms computation, 3 ms exposed (at least 2 ms); schedule abc;"
            " bucket_by_block 1, overlap_collectives 0; compiled in 12.3 s, 6 of 14"
            " segments differ, 2 of these were in the cache"
        ),
        ("backward graph: 1 all_gather -> 1 (1.000 GiB); schedule def; compiled in 2.0 s"),
    ]
    assert (
        "(1.000 GiB); 0.500 GiB copied into and out of buckets; estimated"
        in describe([replace(FORWARD, copied=2**29)])[0]
    )
    assert describe([replace(BACKWARD, pp_rank=1)])[0].startswith(
        "pipeline rank 1, backward graph: 1 all_gather -> 1"
    )
    assert describe([CompileReport("forward", {}, (), {}, "abc")]) == [
        "forward graph: no collectives of parameters; compiled in 0.0 s",
    ]


def test_the_file_has_every_bucket_with_its_parameters_and_times(tmp_path):
    write_reports([replace(FORWARD, copied=2**29), BACKWARD], tmp_path)
    forward, backward = json.loads((tmp_path / "compile.json").read_text())
    assert (forward["graph"], forward["before"], forward["schedule"]) == (
        "forward",
        {"all_gather": 2},
        "abc",
    )
    assert (forward["segments"], forward["different_segments"], forward["cached_segments"]) == (
        14,
        6,
        2,
    )
    assert (forward["copied"], backward["copied"]) == (2**29, None)
    (bucket,) = forward["after"]
    assert bucket["fqns"] == ["layers.0.a.weight", "layers.0.b.weight"]
    assert (
        bucket["nbytes"],
        bucket["ranks"],
        bucket["seconds"],
        bucket["under"],
        bucket["exposed"],
    ) == (
        2**30,
        8,
        0.004,
        0.001,
        0.003,
    )
    assert forward["timeline"]["exposed"] == 0.003
    assert "spans" not in forward["timeline"]
    assert backward["timeline"] is None


def test_a_backward_that_runs_both_ways_is_counted_once():
    ways = ("forward", "backward", "backward_input", "backward_weight")
    both, halves = (
        [CompileReport(name, {}, (), {}, "abc", replace(TIMELINE, graph=name)) for name in names]
        for names in (ways, ("forward", *ways[2:]))
    )
    found = rank_timelines([*both, *halves])[0]
    assert [timeline.graph for timeline in found] == ["forward", "backward", "forward", *ways[2:]]
