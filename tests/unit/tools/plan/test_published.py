"""The figures of published runs: those of the table in docs/benchmarks.md, and what a plan says of
them.
"""

import re

import pytest
from pages import PAGES, ROOT

from titan_lite.config import load_config
from titan_lite.cost.machine import Machine
from titan_lite.cost.profiles import PROFILES, machine_from
from titan_lite.models.shapes import shape_of
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
    assert {name: (f"{ratio:.2f}", "") for name, ratio in RATIOS.items()} == {
        name: found for name, found in table.items() if not found[1]
    }


def bias(flavor: str, machine: Machine, *options: str) -> str:
    keys = [f"--model.flavor={flavor}", *options]
    config = load_config(ROOT / "train_configs/llama3_8b.toml", keys)
    return bias_of(shape_of(config.model), config, machine)


EAGER, AOT = "--compile.no-enable", "--compile.backend=aot_eager"
FLOAT8 = ("--float8.enable", "--compile.backend=inductor")
FLOAT32 = "--training.mixed_precision_param=float32"


@pytest.mark.parametrize(
    ("flavor", "machine", "options", "words"),
    [
        ("8B", "H100", (), "plans of 6 published runs (8B, inductor, bfloat16, H100) were 0.99 to"),
        ("8B", "H100", (EAGER,), "plans of 4 published runs (8B, eager, bfloat16, H100) were 0.89"),
        ("8B", "H100", ("--compile.components=loss",), "(8B, eager, bfloat16, H100) were 0.89"),
        ("8B", "H100", (AOT,), "plans of 2 published runs (8B, aot_eager, bfloat16, H100)"),
        ("8B", "H100", FLOAT8, "plans of 9 published runs (8B, inductor, float8, H100)"),
        ("8B", "H200", FLOAT8, "plans of 2 published runs (8B, inductor, float8, H200) were 1.18"),
        ("70B", "H100", (), "plans of 2 published runs (70B, inductor, bfloat16, H100) were 0.98"),
        ("405B", "H100", FLOAT8, "(405B, inductor, float8, H100) were 0.98 to 1.12"),
        ("405B", "H100", (), "no published run of this kind (405B, inductor, bfloat16, H100)"),
        ("8B", "A100", (), "no published run of this kind (8B, inductor, bfloat16, A100)"),
        ("8B", "H200", (), "no published run of this kind (8B, inductor, bfloat16, H200)"),
        ("8B", "H100", (FLOAT32,), "no published run of this kind (8B, inductor, float32, H100)"),
        (
            "8B",
            "H100",
            ("--model.name=qwen3",),
            "plans of 6 published runs (llama3 8B, inductor, bfloat16, H100) were 0.99 to",
        ),
        ("1B", "H100", (), "no published run of this kind (1B, inductor, bfloat16, H100)"),
    ],
)
def test_a_plan_names_published_runs_of_its_kind_alone(flavor, machine, options, words):
    assert words in bias(flavor, PROFILES[machine], *options)


def test_a_machine_of_a_file_has_no_published_runs():
    mine = machine_from({"like": "H100"}, "mine.toml")
    assert bias("8B", mine).startswith("no published run of this kind")
