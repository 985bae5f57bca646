"""How plans of published runs came out: the one place for the figures, which docs/benchmarks.md and every plan show.

`python scripts/compare_published.py` plans the runs and says where a ratio is another one now. Kept are those alike in everything
that a recipe says; what differs in others (float8, stages, whether compiled) stands in the script's table.
"""

from titan_lite.compiler.hardware import PROFILES, Machine
from titan_lite.config import Compile

# name in scripts/compare_published.py -> how it was compiled, tokens a second as stated / as published
RATIOS = {
    "TorchTitan paper: 8B on 8, eager": ("eager", 0.98),
    "TorchTitan paper: 8B on 128, eager": ("eager", 1.05),
    "TorchTitan paper: 8B on 8, compiled": ("inductor", 1.26),
    "TorchTitan paper: 8B on 128, compiled": ("inductor", 1.30),
    "torchtitan 1881: 8B, FSDP 8": ("aot_eager", 0.82),
    "torchtitan 1881: 8B, FSDP 4 x TP 2": ("aot_eager", 0.89),
}


def bias_of(compile: Compile, machine: Machine) -> str:
    """By how much plans of published runs, compiled in this way, missed the speed; empty for a machine that is no profile."""
    way = compile.backend if compile.compiles("model") else "eager"
    found = [ratio for how, ratio in RATIOS.values() if how == way]
    if PROFILES.get(machine.name) != machine or not found:
        return ""
    ratios = " to ".join(f"{ratio:.2f}" for ratio in (min(found), max(found)))
    return f"plans of {len(found)} published runs ({way}) came out {ratios} times as fast as the runs"
