"""README.md and docs/: names and links exist, and parts written from the sources are up to date."""

import importlib.util
import json
import os
import re

import pytest
import torch
from pages import ALL, FAULTS, PAGES, README, ROOT, anchors, blocks, links
from tiny import DEBUG

from titan_lite.config import KEYS, SECTIONS, load_config
from titan_lite.config.errors import in_toml
from titan_lite.config.families import LLAMA3, QWEN3_MOE
from titan_lite.distributed.layout import Layout
from titan_lite.models.huggingface import config_to_hf

THE_READERS = {"train_configs/mine.toml", "train_configs/my_run.toml"}  # which pages let them write


def test_every_test_and_file_that_a_page_names_is_there():
    sources = "\n".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")
    )
    named = set(re.findall(r"`(test_\w+)`", ALL + FAULTS))
    assert len(named) > 100
    assert named <= set(re.findall(r"def (test_\w+)\(", sources))
    for path in re.findall(
        r"\b(?:titan_lite|scripts|tests|train_configs|docs|assets)/[\w/.]+\.(?:py|sh|toml|md|slurm|png)\b",
        ALL,
    ):
        assert (ROOT / path).is_file() or "NAME" in path or path in THE_READERS, path


def test_every_key_that_a_page_names_is_one():
    sections = {key.partition(".")[0] for key in KEYS}
    words = re.findall(r"`-*([a-z_]+)\.(\w+)\b(?![./(])", ALL)
    named = {
        f"{section}.{name}"
        for section, name in words
        if section in sections and name not in ("json", "jsonl", "py", "safetensors")
    }
    assert len(named) > 40
    assert named <= KEYS.keys()


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_a_page_and_a_heading(page):
    for target in links(PAGES[page]):
        path, _, fragment = target.partition("#")
        there = os.path.normpath(os.path.join(os.path.dirname(page), path)) if path else page
        assert (ROOT / there).is_file(), target
        assert not fragment or fragment in anchors(PAGES[there]), target


def test_every_page_is_reached_from_the_readme():
    assert {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} == {*PAGES} - {README}
    assert {*PAGES} - {README} <= set(links(PAGES[README]))


# parts of recipes in the pages: a line of each, and the test that trains with it or with one like it
TRAINED = {
    '"../prepared/books"': "test_its_commands_train_resume_and_export",
    "[[data.sources]]": "test_the_mixture_of_the_pages_trains_and_resumes",
    "training.global_batch_size = 256": "test_one_command_is_to_the_bit_the_phases_by_hand",
    "Llama-3.1-8B": "test_a_recipe_of_the_pages_goes_on_from_weights",
    "Qwen3-30B-A3B": (
        "test_a_run_goes_on_from_transformers_weights_and_transformers_from_the_runs"
    ),
    "my_models/gated.py": "test_the_family_of_the_pages_trains_and_its_steps_speak",
    "data.sources = [{": "test_one_command_is_to_the_bit_the_phases_by_hand",
    'name = "Lion"': "test_a_run_with_lion_resumes_to_the_bit",
}


def test_every_part_of_a_recipe_that_a_page_shows_is_one_and_is_trained_by_a_test(tmp_path):
    shown = blocks(ALL, "toml")
    sources = "\n".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")
    )
    assert len(shown) == len(TRAINED)
    models = {  # of which recipes have the model
        "Llama-3.1-8B": LLAMA3.flavors["8B"],
        "Qwen3-30B-A3B": QWEN3_MOE.flavors["30B-A3B"],
    }
    for name, model in models.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(
            json.dumps(config_to_hf(model, torch.bfloat16))
        )
    own_family = tmp_path / "recipes/my_models/gated.py"
    own_family.parent.mkdir(parents=True)
    own_family.write_text((ROOT / "tests/own_families/gated.py").read_text())
    for block in shown:
        (test,) = (test for line, test in TRAINED.items() if line in block)
        assert f"def {test}(" in sources
        recipe = tmp_path / "recipes/part.toml"
        recipe.parent.mkdir(exist_ok=True)
        recipe.write_text(f'extends = "{DEBUG}"\n{block}')
        Layout.from_config(load_config(recipe), world_size=2)


@pytest.fixture(scope="module")
def write_docs():
    spec = importlib.util.spec_from_file_location("write_docs", ROOT / "scripts/write_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_is_made_from_the_sources_is_up_to_date(write_docs):
    for name in write_docs.PARTS:
        assert write_docs.as_of_today(ROOT / "docs" / name) == PAGES[f"docs/{name}"], (
            "run python scripts/write_docs.py"
        )


def test_the_readme_says_how_many_blind_plans_are_in_their_range(write_docs):
    (blind,) = re.findall(r"^\| blind .*? (\d+) of (\d+) \|", write_docs.published_table(), re.M)
    (said,) = re.findall(r"Of (\d+) published .*? here, (\d+) were", PAGES[README])
    assert said == blind[::-1]


def test_plans_and_proxies_are_printed_alike_on_all_pages():
    """docs/plan.md has a table that tests/unit/tools/plan/test_planned_figures.py plans again."""
    for command, page in (("plan", "docs/plan.md"), ("verify", "docs/precision.md")):
        (shown,) = (
            block
            for block in blocks(PAGES[README])
            if block.startswith(f"$ titan-lite {command} llama3_405b")
        )
        assert set(shown.splitlines()[1:]) <= set(PAGES[page].splitlines())
    (row,) = re.findall(r"^\| `llama3_405b.toml` .*$", PAGES["docs/plan.md"], re.M)
    _, _, _, _, step, speed, memory, _ = (cell.strip(" *") for cell in row.split("|"))
    for figure in (f"step time        {step} s", f"per GPU {speed} ", f"{memory}"):
        assert figure in PAGES[README]


def test_the_keys_that_people_set_have_their_defaults():
    table = PAGES["docs/recipes.md"].partition("## Ten keys that people set")[2].partition("## ")[0]
    rows = re.findall(r"^\| `(\w+\.\w+)` \| `(.*?)` \|", table, re.M)
    assert len(rows) == 10
    for key, default in rows:
        section, _, name = key.partition(".")
        assert default == in_toml(SECTIONS[section].model_fields[name].default), key


def test_every_key_has_a_row(write_docs):
    rows = re.findall(r"^- `(\w+) = ", write_docs.keys_of_sections(), re.M)
    assert rows == [key.partition(".")[2] for key in KEYS]


@pytest.mark.slow
def test_a_page_that_is_not_up_to_date_is_found_and_written(
    write_docs, monkeypatch, tmp_path, capsys
):
    for name in write_docs.PARTS:
        (tmp_path / name).write_text(f"before\n{write_docs.BEGIN}old\n{write_docs.END}after\n")
    monkeypatch.setattr(write_docs, "DOCS", tmp_path)
    monkeypatch.setattr(write_docs, "ROOT", tmp_path)
    for arguments, code in ((["--check"], 1), ([], 0), (["--check"], 0)):
        monkeypatch.setattr("sys.argv", ["write_docs.py", *arguments])
        assert write_docs.main() == code
    text = (tmp_path / "recipes.md").read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "`mask_documents = false`" in text


def test_the_drawing_has_no_arrow_that_a_longer_way_replaces(write_docs):
    assert write_docs.shortened({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == {
        "a": {"b"},
        "b": {"c"},
        "c": set(),
    }
    with pytest.raises(ValueError, match="circle: a, b"):
        write_docs.shortened({"a": {"b"}, "b": {"a"}})
