"""Measure steps of the debug MoE model by expert parallelism; also of torchtitan.

    python scripts/benchmark_experts.py
    python scripts/benchmark_experts.py --torchtitan OTHER_VENV/bin/python --rounds 5

Two ranks train the model of qwen3_moe_debug.toml on the CPU, on random tokens, in steps of forward,
backward and AdamW (first_step.py): with all experts gathered, and with half of them on each rank,
in eager mode and compiled by Inductor. Experts are not balanced, in neither program. Variants take
turns, in fresh processes; a figure is the median of rounds, of the median step of each.

--torchtitan takes the Python of an environment with torchtitan 0.3.0 and, to compare programs
alone, the same version of torch as this one's.
"""

import argparse
import itertools
import statistics
import sys
import tempfile

from benchmark_compile import run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    modes = ["eager", "inductor"]
    parser.add_argument("--modes", nargs="+", default=modes, choices=modes)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--torchtitan", metavar="PYTHON", help="measures torchtitan, too")
    arguments = parser.parse_args()
    pythons = {"titan_lite": sys.executable}
    if arguments.torchtitan:
        pythons["torchtitan"] = arguments.torchtitan
    variants = list(itertools.product(pythons, arguments.modes, ("1", "2")))
    seconds: dict[tuple[str, str, str], list[float]] = {variant: [] for variant in variants}
    with tempfile.TemporaryDirectory() as cache:
        for _ in range(arguments.rounds):
            for variant in variants:
                program, backend, degree = variant
                options = ["--recipe", "qwen3_moe_debug", "--steps", str(arguments.steps)]
                options += ["--backend", backend, "--expert-parallel", degree]
                found = run(pythons[program], program, options, cache)
                seconds[variant].append(found.step)
    first = statistics.median(seconds[variants[0]])
    print("| program | mode | expert parallel | step (s) | spread | relative speed |")
    print("|---|---|--:|--:|--:|--:|")
    for (program, backend, degree), found in seconds.items():
        median = statistics.median(found)
        spread = (max(found) - min(found)) / median
        print(
            f"| {program} | {backend} | {degree} | {median:.3f} | {spread:.0%}"
            f" | {first / median:.2f} |"
        )


if __name__ == "__main__":
    main()
