"""The faults that scripts/plant_faults.py plants are of the sources as they are now."""

import importlib.util
import subprocess
import sys

import pytest
from tiny import ROOT


@pytest.fixture(scope="module")
def script():
    path = ROOT / "scripts/plant_faults.py"
    spec = importlib.util.spec_from_file_location("plant_faults", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_fault_can_be_planted_and_every_folder_has_one(script):
    assert script.mistakes() == []


def test_a_fault_that_cannot_be_planted_is_told(script):
    line = "class AdamW(Elementwise):"
    gone, twice = (
        script.Fault("optim/lion.py", before, "", ("unit/optim", "unit/nowhere.py"))
        for before in ("class Soap", "import")
    )
    there = script.Fault("optim/adamw.py", line, "", ("unit/optim",))
    found = script.mistakes((*script.FAULTS, gone, twice, there))
    assert found[:2] == ["optim/lion.py: occurs 0 times: class Soap", "no tests/unit/nowhere.py"]
    assert [words for words in found if line in words] == []
    assert script.mistakes(script.FAULTS[:-1]) == ["no fault in titan_lite/tools/verify"]


def test_numbers_or_a_pattern_choose_faults(script):
    wanted = [
        number
        for number, fault in enumerate(script.FAULTS, 1)
        if script.is_wanted(number, fault, "1,3")
    ]
    assert wanted == [1, 3]
    files = {fault.file for fault in script.FAULTS if script.is_wanted(0, fault, "features/moe/*")}
    assert files == {"features/moe/balance.py", "features/moe/capacity.py"}


@pytest.mark.slow
def test_a_rule_that_is_not_registered_is_seen():
    command = [sys.executable, ROOT / "scripts/plant_faults.py", "--only", "rules/*"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "| default | unit/rules/" in done.stdout
    assert "faults: 1, seen by nobody: 0" in done.stdout
