"""What the README names is there."""

import re
from pathlib import Path

from tiny import DEBUG

from titan_lite.config.recipe import load_config
from titan_lite.layout import make_layout

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_test_and_file_that_it_names_is_there():
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", README))
    assert len(named) > 20
    assert named <= set(re.findall(r"def (test_\w+)\(", sources))
    for path in re.findall(r"\b(?:titan_lite|scripts|tests|train_configs)/[\w/.]+\.(?:py|sh|toml)\b", README):
        assert (ROOT / path).is_file(), path


def test_the_spine_stays_under_3000_lines():
    section = README.partition("## Read it in this order")[2].partition("Then, as needed")[0]
    spine = re.findall(r"`(titan_lite/[\w/]+\.py)`", section)
    assert len(spine) == 13
    assert sum(len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in spine) < 3000


TRAINED = {  # parts of recipes in it: a line of each, and the test that trains with it, every default as it is
    "[[data.sources]]": "test_the_mixture_of_the_readme_trains_resumes_and_its_report_shows_the_sources",
    "global_batch_ramp": "test_a_ramp_takes_the_same_windows_on_any_ranks_with_any_workers",
}


def test_every_part_of_a_recipe_that_it_shows_is_one_and_is_trained_by_a_test(tmp_path):
    blocks = re.findall(r"```toml\n(.*?)```", README, re.DOTALL)
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(blocks) == len(TRAINED)
    for block in blocks:
        (test,) = (test for line, test in TRAINED.items() if line in block)
        assert f"def {test}(" in sources
        (tmp_path / "part.toml").write_text(f'extends = "{DEBUG}"\n{block}')
        make_layout(load_config(tmp_path / "part.toml")[0], world_size=2)
