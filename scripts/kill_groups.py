"""Kill processes of a run with replica groups at random moments, and look for what is lost.

    python scripts/kill_groups.py                        # two groups, twenty kills in a minute
    python scripts/kill_groups.py --groups 3 --kills 40 --seconds 300 --seed 1
    python scripts/kill_groups.py --async                # checkpoints are written in the background

The debug recipe, made small, trains on CPU processes. Again and again a random group is killed by
SIGKILL, at a random moment after all groups take part; --seconds are the sum of these times, on
average, without those in which a group starts. Then the run is stopped by a signal, which saves its
last step. Every step has to have one line in metrics.jsonl, every validation its loss, and every
interval its checkpoint. If all groups were dead at once, the run has gone on from its newest
checkpoint: steps before that line `resumed_from` do not count.

Exit code 0: nothing is lost. 1: what is, is printed.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from titan_lite.metrics.run_files import valid_entries
from titan_lite.processes import descendants
from titan_lite.resilience.exit_code import STOPPED

ROOT = Path(__file__).resolve().parents[1]
INTERVAL = 5  # steps from one checkpoint to the next, and from one validation to the next
OPTIONS = [
    *("--training.steps=1000000", "--training.seq_len=32", "--metrics.log_freq=1"),
    *("--model.n_layers=2", "--model.dim=64", "--model.hidden_dim=96", "--data.num_workers=0"),
    *(f"--checkpoint.interval={INTERVAL}", f"--validation.freq={INTERVAL}"),
    *("--validation.steps=1", "--training.compare_replicas_freq=1"),
    *("--checkpoint.keep_latest_k=0", "--fault_tolerance.timeout_seconds=20"),
]
START_LIMIT = 600  # seconds until all groups take part


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, default=2, metavar="N")
    parser.add_argument("--kills", type=int, default=20, metavar="N")
    parser.add_argument("--seconds", type=float, default=60, help="in which they happen")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--async", action="store_true", dest="saves_async")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary, "run")
        code, output = train_and_kill(folder, arguments)
        missing = what_is_missing(folder, output)
    print(output, end="")
    if code != STOPPED:
        missing.append(f"the run ended with exit code {code}, not {STOPPED}")
    for line in missing:
        print(f"LOST: {line}")
    if not missing:
        print("nothing is lost")
    return 1 if missing else 0


def train_and_kill(folder: Path, arguments: argparse.Namespace) -> tuple[int, str]:
    """Train in `folder`, and kill processes; return the exit code and the output."""
    options = [*OPTIONS, *(["--checkpoint.async_mode=async"] if arguments.saves_async else [])]
    command = [sys.executable, "-m", "titan_lite.launch", "debug_model"]
    variables = {"NCOPIES": str(arguments.groups), "NGPU": "1", "CUDA_VISIBLE_DEVICES": ""}
    log = folder.with_suffix(".log")
    with open(log, "w") as output:
        run = subprocess.Popen(
            [*command, f"--job.dump_folder={folder}", *options],
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1", **variables},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        chosen = random.Random(arguments.seed)
        for _ in range(arguments.kills):
            wait_for_steps(folder, run, arguments.groups)
            time.sleep(chosen.uniform(0, 2 * arguments.seconds / arguments.kills))
            kill_one(chosen)
        wait_for_steps(folder, run, arguments.groups)
        run.send_signal(signal.SIGTERM)
        return run.wait(), log.read_text()
    finally:
        run.kill()


def wait_for_steps(folder: Path, run: subprocess.Popen, groups: int) -> None:
    """Wait until the run has written a further line, of a step in which all groups take part."""
    path = folder / "metrics.jsonl"
    before = len(valid_entries(path))
    deadline = time.monotonic() + START_LIMIT
    while True:
        further = valid_entries(path)[before:]
        if any(line.get("copies") == groups for line in further):
            return
        if run.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"the run does not train:\n{folder.with_suffix('.log').read_text()}")
        time.sleep(0.1)


def kill_one(chosen: random.Random) -> None:
    """Kill one of the ranks that are there."""
    while not (alive := [pid for pid in descendants() if is_rank(pid)]):
        time.sleep(0.05)
    try:
        os.kill(chosen.choice(alive), signal.SIGKILL)
    except ProcessLookupError:
        print("a process had ended just before it was killed")


def is_rank(pid: int) -> bool:
    try:
        return b"titan_lite.train" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:  # it has ended meanwhile
        return False


def count_steps(folder: Path, name: str) -> Counter[int]:
    """Return how many lines each step has with a metric, since the run has last reached it."""
    counts: Counter[int] = Counter()
    for line in valid_entries(folder / "metrics.jsonl"):
        if "resumed_from" in line:
            counts = Counter({s: n for s, n in counts.items() if s <= line["resumed_from"]})
        elif name in line:
            counts[line["step"]] += 1
    return counts


def what_is_missing(folder: Path, output: str) -> list[str]:
    """Return a line for each thing that should be there once, and is not."""
    losses = count_steps(folder, "loss")
    validations = count_steps(folder, "validation_loss")
    last = max(losses)
    found = {path.name for path in (folder / "checkpoint").glob("step-*")}
    missing = [
        f"step {step} has {losses[step]} lines of metrics"
        for step in range(1, last + 1)
        if losses[step] != 1
    ]
    for step in range(0, last + 1, INTERVAL):
        if validations[step] != 1:
            missing.append(f"step {step} has {validations[step]} lines of a validation")
        is_named = f"step {step} is not on disk, as the group that was saving it is lost" in output
        if step and f"step-{step}" not in found and not is_named:
            missing.append(f"step {step} has no checkpoint, and no line says so")
    if f"step-{last}" not in found:
        missing.append(f"the last step, {last}, has no checkpoint")
    print(
        f"{last} steps, {len(found)} checkpoints, {output.count('has failed')} failures of groups"
    )
    return missing


if __name__ == "__main__":
    sys.exit(main())
