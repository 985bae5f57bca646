"""Count the steps of a run whose processes are killed, with replica groups and without.

    python scripts/benchmark_faults.py                        # five minutes each, a kill a minute
    python scripts/benchmark_faults.py --minutes 10 --every 30 -- --checkpoint.interval 20

Both train the debug recipe on two CPU processes with the same batches: two replica groups that
may be lost, and two replicas of one world, where a lost process ends all, which start again from
the newest checkpoint (MAX_RESTARTS). At the same moments a process of one rank, the first and
the second in turn, is killed by SIGKILL. What counts is the step that is reached in the time. The
time of a step is the median of those before the first kill.
"""

import argparse
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from kill_groups import is_rank

from titan_lite.metrics.run_files import read_metrics
from titan_lite.processes import descendants

ROOT = Path(__file__).resolve().parents[1]
WARM_UP = 5  # steps that are not timed
ALWAYS = ["--validation.no-enable", "--metrics.log_freq=1", "--training.steps=1000000"]
WAYS = {  # name: (environment, options)
    "two groups": ({"NCOPIES": "2", "NGPU": "1"}, []),
    "restart of all": (
        {"NGPU": "2", "MAX_RESTARTS": "1000"},
        ["--parallelism.data_parallel_replicate_degree=2"],
    ),
}


def step_times(folder: Path) -> dict[int, float]:
    """Return the seconds of each step that counts so far."""
    steps = read_metrics(folder / "metrics.jsonl")
    return {step: values["step_time"] for step, values in steps.items() if "step_time" in values}


@dataclass(frozen=True)
class Result:
    step: int  # that was reached
    milliseconds: float  # of a step before the first kill, the median


def train(way: str, folder: Path, seconds: float, every: float, options: list[str]) -> Result:
    """Train for so many seconds after the first step."""
    environment, own = WAYS[way]
    command = [sys.executable, "-m", "titan_lite.launch", "debug_model"]
    command += ["--job.dump_folder", str(folder), *ALWAYS, *own, *options]
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    variables = os.environ | environment | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with open(folder.with_suffix(".log"), "w") as log:
        launcher = subprocess.Popen(command, env=variables, stdout=log, stderr=log)
        try:
            while not step_times(folder):
                if launcher.poll() is not None:
                    raise SystemExit(f"{way}: {Path(log.name).read_text()}")
                time.sleep(0.1)
            started = time.monotonic()
            kills = 0
            undisturbed: dict[int, float] = {}
            while time.monotonic() - started < seconds:
                if time.monotonic() - started > (kills + 0.5) * every:
                    undisturbed = undisturbed or step_times(folder)
                    if ranks := sorted(filter(is_rank, descendants())):
                        os.kill(ranks[kills % len(ranks)], signal.SIGKILL)
                    kills += 1
                time.sleep(0.1)
            step = max(step_times(folder), default=0)
        finally:
            launcher.send_signal(signal.SIGTERM)
            launcher.wait()
    times = list(undisturbed.values())[WARM_UP:] or [math.nan]
    result = Result(step, 1000 * statistics.median(times))
    print(
        f"{way:>16}: step {step} after {seconds / 60:g} minutes and {kills} kills;"
        f" {result.milliseconds:.0f} ms a step before the first",
        flush=True,
    )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5.0, metavar="N", help="of each way")
    parser.add_argument("--every", type=float, default=60.0, metavar="SECONDS", help="of kills")
    parser.add_argument("options", nargs="*", help="of both runs, after --")
    arguments = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        for number, way in enumerate(WAYS):
            folder = Path(scratch) / f"run-{number}"
            seconds = 60 * arguments.minutes
            results.append(train(way, folder, seconds, arguments.every, arguments.options))
    groups, world = results
    print(f"productive steps, relative to the restart of all: {groups.step / world.step:.2f}")
    print(f"groups without faults: {groups.milliseconds - world.milliseconds:+.0f} ms a step")


if __name__ == "__main__":
    main()
