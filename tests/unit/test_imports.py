"""What a start leaves out, since each rank would wait for it."""

import subprocess
import sys

import pytest

IMPORTED = """
import sys
import titan_lite.trainer
print(*(name in sys.modules for name in ("torch", "torch._inductor.compile_fx", "torchft")))
"""


@pytest.mark.slow
def test_an_eager_run_imports_no_inductor_and_one_without_copies_no_torchft():
    told = subprocess.run(
        [sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True
    )
    assert told.stdout.split() == ["True", "False", "False"]
