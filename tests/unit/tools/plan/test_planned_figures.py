"""The planned figures on docs/plan.md and in published.csv are those of today: what changes a price
changes them there, in the same commit, which says why.
"""

import json
import re

import pytest
from commands import python, run
from test_plan import by_formula, check_sum
from tiny import RECIPES, ROOT

from titan_lite.tools.plan.command import main

SAME = 0.005  # relative; other versions of torch trace a little more or less
QUICK = ("llama3_1b.toml", "qwen3_30b_a3b.toml")


def numbers(text):
    """Those of a cell, such as "1,050 to 1,200"."""
    return [float(number.replace(",", "")) for number in re.findall(r"[\d,]*\.?\d+", text)]


def table(page, heading):
    """The rows of the first table behind a heading of a page, without its head, by their first
    cell.
    """
    text = (ROOT / "docs" / page).read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2]
    lines = text[text.index("\n|") + 1 :].partition("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]
    return {first: cells for first, *cells in rows}


PLANNED = table("plan.md", "The recipes, as planned")


def test_every_recipe_for_a_cluster_has_its_row():
    for_clusters = {
        recipe.name
        for recipe in RECIPES.glob("*.toml")
        if re.search(r"^# world_size: \d+$", recipe.read_text(encoding="utf-8"), re.MULTILINE)
        and "debug" not in recipe.name
    }
    assert set(PLANNED) == for_clusters


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.release) for name in PLANNED],
)
def test_the_page_has_what_a_recipe_is_planned_with_today(recipe, capsys):
    ranks, _, step, speed, memory = PLANNED[recipe]
    assert main([str(RECIPES / recipe), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["world_size"] == int(ranks)
    assert plan["memory"]["fits"]
    check_sum(plan)
    if recipe.startswith(
        "llama3"
    ):  # the formula is a lower bound, of long sequences less than half
        total = plan["memory"]["total"]
        assert 0.45 * total < by_formula(recipe.removesuffix(".toml")) < total
    seconds, tokens = plan["step_seconds"], plan["tokens_per_second"]
    assert numbers(step) == pytest.approx([seconds["fast"], seconds["slow"]], rel=SAME)
    assert numbers(speed) == pytest.approx([tokens["slow"], tokens["fast"]], rel=SAME)
    assert numbers(memory) == pytest.approx([plan["memory"]["total"] / 2**30], rel=SAME)


@pytest.mark.slow
@pytest.mark.parametrize(
    "rows",
    ["torchao: 8B on 8 B200", pytest.param("", marks=pytest.mark.release)],
    ids=["one", "all"],
)
def test_the_file_has_what_published_runs_are_planned_with_today(rows):
    done = run(*python(ROOT / "scripts/compare_published.py", "--rows", rows), seconds=1800)
    assert done.returncode == 0
    assert re.search(r"^0 of [1-9]\d* plans changed", done.stdout, re.MULTILINE), done.stdout
