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
