"""What a start leaves out, since each rank would wait for it."""

import subprocess
import sys

import pytest

IMPORTED = """
import sys
import titan_lite.trainer
from titan_lite.feature import all_features
all_features()
print(*(name in sys.modules for name in ("torch", "torch._inductor.compile_fx", "torchft")))
parts = [name.split(".")[2:] for name in sys.modules if name.startswith("titan_lite.features.")]
print(*{part[1] for part in parts if len(part) > 1})
"""


@pytest.mark.slow
def test_a_run_imports_no_inductor_torchft_or_what_features_compute_with_unless_it_needs_them():
    told = subprocess.run(
        [sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True
    )
    packages, of_features = told.stdout.splitlines()
    assert packages.split() == ["True", "False", "False"]
    assert set(of_features.split()) == {"keys", "rules", "feature"}
