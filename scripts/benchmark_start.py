"""Measure where the seconds go from `./run_train.sh` to the end of the first step.

    python scripts/benchmark_start.py                   # eager and compiled, new and resumed
    python scripts/benchmark_start.py --modes eager --rounds 5 --beside ../other_checkout

Two CPU ranks train the debug recipe for two steps, in a new folder and with an empty cache of
compiled code, and resume for two more, with what the first start has left. Each start
writes the seconds of its parts into events.jsonl (titan_lite/metrics/start_times.py). Beside them:
when the launcher says that it starts processes, and what a later step takes, so that the rest of
the first one is tracing, compilation and first allocations.

The table has medians over rounds, in seconds. With --beside, the same starts of another checkout,
which has to write these events, too, are measured in turn.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODES = {
    "eager": ["--compile.no-enable"],
    "aot_eager": ["--compile.enable", "--compile.backend", "aot_eager"],
    "inductor": ["--compile.enable", "--compile.backend", "inductor"],
}
STARTS = ("new", "resumed")
STEPS = 2  # of a start; the second is a later step
PARTS = {  # of a start: what it consists of
    "recipe check": "the shell finds a Python; the launcher checks environment, recipe and data",
    "torchrun": "its import, and its rendezvous",
    "recipe": "a rank's Python, environment and recipe",
    "imports": "torch, titan_lite, and with compile.enable Inductor",
    "checks": "tokenizer, data and machine",
    "agreement of ranks": "store, hashes of documents and sources, git revision",
    "process group": "gloo, locks, mesh",
    "model": "on the meta device, shards, initial weights, optimizer",
    "data": "loaders",
    "checkpoint": "the newest step is found, hashed and read",
    "metrics": "files, TensorBoard, first lines of the log, first batch",
    "validation": "before the first step of a new run",
    "first step: beyond a later one": "tracing, compilation, first allocations",
    "first step: as a later one": "",
}

Seconds = dict[str, float]  # by part


def start(checkout: Path, folder: Path, steps: int, options: list[str]) -> Seconds:
    """Train until `steps`, and return the seconds of each part of the start."""
    command = [str(checkout / "run_train.sh"), "--job.dump_folder", str(folder / "run")]
    command += ["--training.steps", str(steps), "--metrics.log_freq", "1", *options]
    environment = os.environ | {
        "NGPU": "2",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(checkout),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # else our modules are compiled at each start
    environment["CONFIG_FILE"] = str(checkout / "train_configs/debug_model.toml")
    started = time.perf_counter()
    output = []
    launched = 0.0
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            output.append(line)
            if line.startswith("titan_lite: starting"):
                launched = time.perf_counter() - started
    if process.returncode != 0:
        sys.exit(f"{' '.join(command)}: exit code {process.returncode}\n{''.join(output)[-3000:]}")

    events = read_lines(folder / "run/events.jsonl")
    parts = [event["seconds"] for event in events if event["event"] == "first step"][-1]
    later = [row["step_time"] for row in read_lines(folder / "run/metrics.jsonl") if "loss" in row]
    launcher = parts.pop("launcher")
    first_step = parts.pop("first step")
    return {
        "recipe check": launched,
        "torchrun": launcher - launched,
        **parts,
        "first step: beyond a later one": first_step - later[-1],
        "first step: as a later one": later[-1],
    }


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["eager", "inductor"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--beside", type=Path, metavar="CHECKOUT")
    arguments = parser.parse_args()
    checkouts = {"": ROOT}
    if arguments.beside:
        checkouts = {"before, ": arguments.beside.resolve(), "now, ": ROOT}

    measured: dict[str, list[Seconds]] = defaultdict(list)  # by column
    for _ in range(arguments.rounds):
        for mode in arguments.modes:
            for name, checkout in checkouts.items():
                with tempfile.TemporaryDirectory() as folder:
                    for number, kind in enumerate(STARTS, start=1):
                        steps = start(checkout, Path(folder), STEPS * number, MODES[mode])
                        measured[f"{name}{mode}, {kind}"].append(steps)
    print_table(measured)


def print_table(measured: dict[str, list[Seconds]]) -> None:
    """Print a Markdown table: a row for each part, a column for each kind of start."""
    print(f"| part | {' | '.join(measured)} |")
    print(f"|---|{'--:|' * len(measured)}")
    for part, meaning in PARTS.items():
        values = [of_part(starts, part) for starts in measured.values()]
        print(f"| {part}{f' ({meaning})' if meaning else ''} | {' | '.join(values)} |")
    wholes = [
        f"{statistics.median(sum(seconds.values()) for seconds in starts):.1f}"
        for starts in measured.values()
    ]
    print(f"| whole | {' | '.join(wholes)} |")


def of_part(starts: list[Seconds], part: str) -> str:
    """Return the median, or "" for what these starts do not have."""
    seconds = [each[part] for each in starts if part in each]
    return f"{statistics.median(seconds):.1f}" if seconds else ""


if __name__ == "__main__":
    main()
