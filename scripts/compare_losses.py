"""Compare the losses of this working tree with those of another commit, bit by bit, on seven
layouts.

    python scripts/compare_losses.py 5fc5bfc              # 20 steps of the debug recipe on each
    python scripts/compare_losses.py 5fc5bfc --only "tp 2"

A change that is not about numerics leaves them equal. The other commit is checked out into a
temporary worktree, and its metrics are kept in `--cache`, since they do not change. Exit code 1:
something differs.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMPARED = ("loss", "grad_norm", "lr", "validation_loss", "tokens_seen")
AOT_EAGER = ["--compile.enable", "--compile.backend", "aot_eager", "--compile.bucketing"]
LAYOUTS: dict[str, tuple[int, list[str]]] = {  # name: (ranks, options beside the debug recipe)
    "1 rank": (1, []),
    "2 ranks": (2, []),
    "2 ranks, aot_eager, block": (2, [*AOT_EAGER, "block"]),
    "2 ranks, aot_eager, greedy": (2, [*AOT_EAGER, "greedy"]),
    "pp 2": (2, ["--parallelism.pipeline_parallel_degree", "2"]),
    "tp 2": (2, ["--parallelism.tensor_parallel_degree", "2"]),
    "cp 2": (2, ["--parallelism.context_parallel_degree", "2"]),
}


def train(tree: Path, layout: str, steps: int) -> list[dict[str, float]]:
    """Train `steps` steps with the sources of `tree`; return the compared metrics of each logged
    step.
    """
    ranks, options = LAYOUTS[layout]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), "-m", "titan_lite.train"]
        command += [str(tree / "train_configs/debug_model.toml"), "--job.dump_folder", folder]
        command += ["--training.steps", str(steps), "--metrics.log_freq", "1"]
        command += ["--validation.steps", "2", *options]
        environment = os.environ | {
            "PYTHONPATH": str(tree),
            "PYTHONSAFEPATH": "1",
            "OMP_NUM_THREADS": "1",
        }
        ended = subprocess.run(command, env=environment, capture_output=True, text=True)
        if ended.returncode != 0:
            sys.exit(f"{layout}, {tree}: exit code {ended.returncode}\n{ended.stderr[-3000:]}")
        lines = (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    compared = [{k: r[k] for k in ("step", *COMPARED) if k in r} for r in records]
    return [record for record in compared if len(record) > 1]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("commit")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", choices=LAYOUTS)
    parser.add_argument(
        "--cache", type=Path, default=Path(tempfile.gettempdir()) / "titan_lite_losses"
    )
    options = parser.parse_args()
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.check_output([*git, "rev-parse", options.commit], text=True).strip()
    options.cache.mkdir(parents=True, exist_ok=True)

    differs = False
    with tempfile.TemporaryDirectory() as folder:
        before = Path(folder) / "tree"
        subprocess.check_call([*git, "worktree", "add", "--quiet", "--detach", str(before), commit])
        try:
            for layout in [options.only] if options.only else LAYOUTS:
                file = options.cache / f"{commit[:12]} {options.steps} {layout}.json"
                if not file.exists():
                    file.write_text(json.dumps(train(before, layout, options.steps)))
                expected = json.loads(file.read_text())
                metrics = train(ROOT, layout, options.steps)
                differs |= metrics != expected
                print(f"{layout}: {describe(expected, metrics)}", flush=True)
        finally:
            subprocess.call([*git, "worktree", "remove", "--force", str(before)])
    return int(differs)


def describe(expected: list[dict[str, float]], metrics: list[dict[str, float]]) -> str:
    """Return whether two lists of metrics are equal, or their first difference."""
    if metrics == expected:
        return f"equal to the bit, {len(metrics)} lines, last loss {last_loss(metrics)}"
    for one, other in zip(expected, metrics, strict=False):
        if one != other:
            return f"DIFFERS: before {one}, now {other}"
    return f"DIFFERS: {len(expected)} lines before, {len(metrics)} now"


def last_loss(metrics: list[dict[str, float]]) -> float:
    return [record["loss"] for record in metrics if "loss" in record][-1]


if __name__ == "__main__":
    sys.exit(main())
