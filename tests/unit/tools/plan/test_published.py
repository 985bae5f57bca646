"""The figures of published runs: those of the table in docs/benchmarks.md, and what a plan says of
them.
"""

import re

from pages import PAGES

from titan_lite.config import Compile
from titan_lite.cost.profiles import PROFILES, machine_from
from titan_lite.tools.plan.published import RATIOS, bias_of


def test_the_figures_are_those_of_the_table():
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in PAGES["docs/benchmarks.md"].splitlines()
        if line[:1] == "|"
    ]
    table = {
        row[0]: (row[3], row[6])
        for row in rows
        if len(row) == 7 and re.fullmatch(r"\d\.\d\d", row[3])
    }
    assert {name: (f"{ratio:.2f}", "") for name, (_, ratio) in RATIOS.items()} == {
        name: found for name, found in table.items() if not found[1]
    }


def test_a_plan_says_how_those_of_its_kind_came_out():
    h100 = PROFILES["H100"]
    assert (
        bias_of(Compile(enable=True), h100)
        == "plans of 8 published runs (inductor) were 0.98 to 1.00 times as fast as the runs"
    )
    assert "0.89 to 0.98" in bias_of(Compile(enable=False), h100)
    assert "0.89 to 0.98" in bias_of(Compile(enable=True, components=("loss",)), h100)
    assert "of 24 published runs (float8)" in bias_of(Compile(enable=True), h100, float8=True)
    assert "(aot_eager)" in bias_of(Compile(enable=True, backend="aot_eager"), h100)
    assert (
        bias_of(Compile(enable=True), machine_from({"like": "H100"}, "mine.toml")) == ""
    )  # nobody knows
