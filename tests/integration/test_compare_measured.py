"""`scripts/compare_measured.py`: bytes of live tensors as planned, in every layout of two and four CPU processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/compare_measured.py"


@pytest.mark.slow
def test_tensors_take_what_was_planned():
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}  # it imports its neighbour
    command = [sys.executable, SCRIPT, "--rounds", "1", "--steps", "1"]
    result = subprocess.run(
        command, cwd=ROOT, env={**environment, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=1200
    )
    print(result.stdout, result.stderr)
    assert result.returncode == 0
    rows = [line.strip("| ").split(" | ") for line in result.stdout.splitlines()[2:]]
    assert len(rows) >= 6
    for name, *_, planned, measured, _ in rows:
        assert float(planned) == pytest.approx(float(measured), rel=0.05), name
