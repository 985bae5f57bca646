"""Measure the seconds to the end of the first step, by number of blocks; also of torchtitan.

    python scripts/benchmark_compile.py                         # 2, 4, 8 and 16 blocks
    python scripts/benchmark_compile.py --blocks 6 32 126 --backends inductor aot_eager
    python scripts/benchmark_compile.py --blocks 6 16 32 --torchtitan OTHER_VENV/bin/python

Each number of blocks is measured twice, in fresh processes: cold, with an empty cache of compiled
code, and warm, with what the cold one has left. Two ranks train a model of the debug flavor's width
on the CPU, on random tokens, in steps of forward, backward and AdamW (first_step.py).

Times begin when the processes of the ranks are started, and end with the first step. They include
Python, the imports of torch and of the program, the process group, building the model, tracing and
compilation. "before the model" is the part of the warm time until all is imported and a model is
built next; what a program imports only when it compiles is in the rest. They do not include a
launcher, nor data and checkpoints, whose seconds each run logs.

The table also has the median time of a later step of the warm process, and of titan_lite how many
of the graphs' segments are different (compile/segments.py).

--torchtitan takes the Python of an environment with torchtitan 0.3.0 and, to compare programs
alone, the same version of torch as this one's.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from first_step import Measurement

MAX_BLOCKS = 126  # of Llama 3.1 405B
FIRST_STEP = Path(__file__).with_name("first_step.py")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument(
        "--backends", nargs="+", default=["inductor"], choices=["inductor", "aot_eager"]
    )
    parser.add_argument("--bucketing", default="block", help="of titan_lite")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--torchtitan", metavar="PYTHON", help="measures torchtitan, too")
    arguments = parser.parse_args()
    if arguments.steps < 2:
        parser.error("--steps: at least 2, since the first one compiles")
    if not all(0 < blocks <= MAX_BLOCKS for blocks in arguments.blocks):
        parser.error(f"--blocks: from 1 to {MAX_BLOCKS}")
    pythons = {"titan_lite": sys.executable}
    if arguments.torchtitan:
        pythons["torchtitan"] = arguments.torchtitan

    print(
        "| blocks | program | backend | first step, cold (s) | warm (s)"
        " | of it before the model (s) | a later step (s) | different segments |"
    )
    print("|--:|---|---|--:|--:|--:|--:|---|", flush=True)
    for blocks in arguments.blocks:
        for backend in arguments.backends:
            for program, python in pythons.items():
                options = ["--blocks", str(blocks), "--backend", backend]
                options += ["--bucketing", arguments.bucketing, "--steps", str(arguments.steps)]
                with tempfile.TemporaryDirectory() as cache:
                    cold, warm = (run(python, program, options, cache) for _ in range(2))
                print(
                    f"| {blocks} | {program} | {backend} | {cold.first_step:.1f}"
                    f" | {warm.first_step:.1f} | {warm.imports:.1f} | {warm.step:.3f}"
                    f" | {warm.segments} |",
                    flush=True,
                )


def run(python: str, program: str, options: list[str], cache: str) -> Measurement:
    """Measure in fresh processes. cache: the folder of Inductor's compiled code."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed program has its bytecode
    if program != "titan_lite":  # an environment of its own
        environment.pop("PYTHONPATH", None)
    command = [python, str(FIRST_STEP), program, *options]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    if ended.returncode != 0:
        sys.exit(f"{' '.join(command)}: exit code {ended.returncode}\n{ended.stderr[-3000:]}")
    return Measurement(**json.loads(ended.stdout.splitlines()[-1]))


if __name__ == "__main__":
    main()
