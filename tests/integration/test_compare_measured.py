"""`scripts/compare_measured.py`: bytes of live tensors as planned, in every layout of two and four
CPU processes.
"""

import pytest
from commands import python, run
from tiny import ROOT


@pytest.mark.release
def test_measured_bytes_of_tensors_are_those_planned():
    command = python(ROOT / "scripts/compare_measured.py", "--rounds", "1", "--steps", "1")
    result = run(*command, seconds=1200, PYTHONSAFEPATH=None)  # it imports its neighbour
    assert result.returncode == 0
    rows = [
        line.strip("| ").split(" | ") for line in result.stdout.splitlines() if line.startswith("|")
    ][2:]
    assert len(rows) >= 6
    for name, *_, planned, measured, _ in rows:
        assert float(planned) == pytest.approx(float(measured), rel=0.05), name
