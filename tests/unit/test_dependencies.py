"""What pyproject.toml lists is there: dependencies in setup.sh and constraints.txt, and packages."""

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


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs tomllib")
def test_constraints_pin_every_dependency_and_every_package_of_an_extra():
    import tomllib

    def name(requirement):
        return re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-")

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {name(each) for each in project["dependencies"]}
    for extra in project["optional-dependencies"].values():
        wanted |= {name(each) for each in extra}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {name(line) for line in lines if "==" in line}
    assert wanted - pinned == {"titan-lite"}  # an extra names others of its own project


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs tomllib")
def test_a_wheel_has_every_folder_with_modules():
    import tomllib

    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "titan_lite").rglob("*.py")}
    modules = {".".join(folder.parts) for folder in folders}
    assert {*setup["packages"]} - {*setup["package-dir"]} == modules
