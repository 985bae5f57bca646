"""The packages that setup.sh checks are the dependencies in pyproject.toml."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs tomllib")
def test_setup_asks_for_every_dependency():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.match(r"\w+", requirement)[0] for requirement in project["dependencies"]}
    asked = set()
    for line in re.findall(r"needs \+?= (\[.*?\])", (ROOT / "scripts/setup.sh").read_text())[:2]:
        asked |= set(re.findall(r'"(\w+)"', line))
    assert asked == declared
