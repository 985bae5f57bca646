"""What the README names is there."""

import re
from pathlib import Path

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
