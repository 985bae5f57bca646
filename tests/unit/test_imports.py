"""What a start leaves out, since each rank would wait for it."""

import subprocess
import sys

IMPORTED = """
import sys
import titan_lite.trainer
print("torch" in sys.modules, "torch._inductor.compile_fx" in sys.modules)
"""


def test_an_eager_run_imports_no_inductor():
    told = subprocess.run(
        [sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True
    )
    assert told.stdout.split() == ["True", "False"]
