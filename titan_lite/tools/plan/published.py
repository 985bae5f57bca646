"""Ratios of planned to published speed, which docs/benchmarks.md and every plan show.

`python scripts/compare_published.py` plans the runs and reports ratios that have changed. Only runs
of which all is published that a plan needs are here, except the number of a pipeline's
microbatches; the script's table has what is missing of the others. Some had asynchronous tensor
parallelism beside float8, which a run here refuses.
"""

from titan_lite.config import Compile
from titan_lite.cost.machine import Machine
from titan_lite.cost.profiles import PROFILES

# name in scripts/compare_published.py -> (compilation or float8, nominal planned tokens per second
# / published)
RATIOS = {
    "TorchTitan paper: 8B on 8, eager": ("eager", 0.89),
    "TorchTitan paper: 8B on 8, compiled": ("inductor", 0.99),
    "TorchTitan paper: 8B on 128, eager": ("eager", 0.97),
    "TorchTitan paper: 8B on 128, compiled": ("inductor", 1.00),
    "TorchTitan paper: 8B on 8, float8": ("float8", 0.94),
    "TorchTitan paper: 8B on 128, float8": ("float8", 0.94),
    "TorchTitan paper: 70B on 256, float8": ("float8", 0.93),
    "TorchTitan paper: 70B on 256, float8, async TP": ("float8", 0.89),
    "TorchTitan paper: 405B on 512, float8, 1F1B": ("float8", 0.98),
    "TorchTitan paper: 405B on 512, float8, interleaved": ("float8", 1.00),
    "torchtitan 1881: 8B, FSDP 8": ("aot_eager", 0.86),
    "torchtitan 1881: 8B, FSDP 4 x TP 2": ("aot_eager", 0.93),
    "torchtitan 2024-12: 8B on 8, eager": ("eager", 0.96),
    "torchtitan 2024-12: 8B on 8, compiled": ("inductor", 0.99),
    "torchtitan 2024-12: 8B on 128, eager": ("eager", 0.98),
    "torchtitan 2024-12: 8B on 128, compiled": ("inductor", 1.00),
    "torchtitan 2024-12: 8B on 8, float8": ("float8", 1.04),
    "torchtitan 2024-12: 8B on 128, float8": ("float8", 1.05),
    "torchtitan 2024-12: 8B on 8, float8, 32k tokens": ("float8", 0.99),
    "torchtitan 2024-12: 8B, float8, FSDP 4 x CP 2, 64k tokens": ("float8", 0.88),
    "torchtitan 2024-12: 8B, float8, FSDP 2 x CP 4, 128k tokens": ("float8", 1.15),
    "torchtitan 2024-12: 70B on 256, float8": ("float8", 1.01),
    "torchtitan 2024-12: 70B on 256, float8, async TP": ("float8", 1.03),
    "torchtitan 2024-12: 405B on 512, float8, 1F1B": ("float8", 1.08),
    "torchtitan 2024-12: 405B on 512, float8, interleaved": ("float8", 1.10),
    "torchtitan 2024-12: 405B on 512, float8, CP 1, 32k tokens": ("float8", 0.98),
    "torchtitan 2024-12: 405B on 512, float8, CP 2, 64k tokens": ("float8", 1.12),
    "torchtitan 2024-12: 405B on 512, float8, CP 4, 128k tokens": ("float8", 1.07),
    "torchtitan 2025-06: 8B on 64, FSDP 8 x TP 8": ("inductor", 0.99),
    "torchtitan 2025-06: 8B on 64, FSDP 8 x TP 8, async TP": ("inductor", 0.99),
    "torchtitan 2025-06: 8B on 64, float8": ("float8", 1.14),
    "torchtitan 2025-06: 8B on 64, float8, async TP": ("float8", 1.10),
    "torchtitan 2025-06: 70B on 256, FSDP 32 x TP 8": ("inductor", 0.98),
    "torchtitan 2025-06: 70B on 256, FSDP 32 x TP 8, async TP": ("inductor", 0.99),
    "torchtitan 2025-06: 70B on 256, float8": ("float8", 1.03),
    "torchtitan 2025-06: 70B on 256, float8, async TP": ("float8", 0.96),
    "torchtitan 2025-06, H200: 8B on 32, float8": ("float8", 1.18),
    "torchtitan 2025-06, H200: 8B on 64, float8": ("float8", 1.20),
}


def bias_of(compile: Compile, machine: Machine, float8: bool = False) -> str:
    """Return the error of plans of published runs like these, in words; "" for a machine that is
    not a profile.
    """
    if float8:
        kind = "float8"
    elif compile.compiles("model"):
        kind = compile.backend
    else:
        kind = "eager"
    ratios = [ratio for kind_of_run, ratio in RATIOS.values() if kind_of_run == kind]
    if PROFILES.get(machine.name) != machine or not ratios:
        return ""
    return (
        f"plans of {len(ratios)} published runs ({kind}) were {min(ratios):.2f} to"
        f" {max(ratios):.2f} times as fast as the runs"
    )
