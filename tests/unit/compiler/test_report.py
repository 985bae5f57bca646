"""The receipt of the compile stage: a line a graph, and JSON."""

import json

from titan_lite.compiler.bucketing import Bucket
from titan_lite.compiler.report import Receipt, describe, write_receipts

ONE, OTHER = (Bucket("all_gather", (fqn,), 2**29, "0") for fqn in ("layers.0.a.weight", "layers.0.b.weight"))
BOTH = Bucket("all_gather", (*ONE.fqns, *OTHER.fqns), 2**30, "0")
RECEIPTS = [Receipt("forward", (ONE, OTHER), (BOTH,), 1), Receipt("backward", (ONE,), (ONE,), 0, "not reordered: why")]


def test_a_line_a_graph():
    assert describe(RECEIPTS) == [
        "compiled forward: 2 all_gather -> 1 (1.000 GiB), 1 moved to overlap",
        "compiled backward: 1 all_gather -> 1 (0.500 GiB), not reordered: why",
    ]
    assert describe([Receipt("forward", (), (), 0)]) == [
        "compiled forward: no collectives of parameters (0.000 GiB), 0 moved to overlap"
    ]


def test_the_file_has_every_bucket_with_its_parameters(tmp_path):
    write_receipts(RECEIPTS, tmp_path / "compile.json")
    forward, backward = json.loads((tmp_path / "compile.json").read_text())
    assert forward["graph"] == "forward"
    assert forward["after"] == [
        {"kind": "all_gather", "fqns": ["layers.0.a.weight", "layers.0.b.weight"], "nbytes": 2**30, "group": "0"}
    ]
    assert len(forward["before"]) == 2
    assert backward["note"] == "not reordered: why"
