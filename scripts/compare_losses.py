"""Compare the numbers of this working tree with those of another commit, bit by bit: the metrics of
each step, and a hash of all that a checkpoint has at the end.

    python scripts/compare_losses.py 5fc5bfc              # 10 steps on each of about 30 layouts
    python scripts/compare_losses.py 5fc5bfc --only "tp 2" "cp 2"

A change that is not about numerics leaves them equal. The other commit is checked out into a
temporary worktree, and what it has trained is kept in `--cache`, since it does not change. Exit
code 1: something differs.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

ROOT = Path(__file__).resolve().parents[1]
COMPARED = ("loss", "grad_norm", "lr", "validation_loss", "tokens_seen")


class Layout(NamedTuple):
    """A run: options are those of the command line, without dashes, beside the recipe's."""

    ranks: int
    options: str = ""
    recipe: str = "debug_model"
    mixes_data: bool = False


MOE = "qwen3_moe_debug"
AOT_EAGER = "compile.enable compile.backend=aot_eager"
EP = "parallelism.expert_parallel_degree=2"
COPIES = "parallelism.data_parallel_replicate_degree=2"
POWERSGD = "parallelism.replicate_compression=powersgd parallelism.replicate_uncompressed_steps=3"
PP = "parallelism.pipeline_parallel_degree=2 training.local_batch_size=4"
ZERO_BUBBLE = "parallelism.pipeline_parallel_schedule=ZBVZeroBubble"
TP = "parallelism.tensor_parallel_degree=2"
LAYOUTS = {
    "1 rank": Layout(1),
    "2 ranks": Layout(2),
    "once a microbatch": Layout(2, "parallelism.fsdp_communication=microbatch"),
    "hsdp": Layout(4, COPIES),
    "powersgd": Layout(2, f"{COPIES} {POWERSGD}"),
    "aot_eager, block": Layout(2, AOT_EAGER),
    "aot_eager, greedy": Layout(2, f"{AOT_EAGER} compile.bucketing=greedy"),
    "aot_eager, auto": Layout(2, f"{AOT_EAGER} compile.bucketing=auto"),
    "pp 2": Layout(2, PP),
    "zero bubble": Layout(2, f"{PP} {ZERO_BUBBLE}"),
    "zero bubble, aot_eager": Layout(2, f"{PP} {ZERO_BUBBLE} {AOT_EAGER}"),
    "tp 2": Layout(2, TP),
    "tp 2, chunks": Layout(2, f"{TP} {AOT_EAGER} compile.tensor_parallel_chunks=2"),
    "cp 2": Layout(2, "parallelism.context_parallel_degree=2"),
    "pp 2, tp 2": Layout(4, f"{PP} {TP}"),
    "full checkpointing": Layout(2, "activation_checkpoint.mode=full"),
    "selective checkpointing": Layout(2, "activation_checkpoint.mode=selective"),
    "every second block": Layout(
        2, "activation_checkpoint.mode=selective activation_checkpoint.selective_ac_option=2"
    ),
    "memory budget": Layout(2, f"{AOT_EAGER} activation_checkpoint.mode=memory_budget"),
    "loss chunks": Layout(2, "training.loss_chunk_tokens=64"),
    "document masks": Layout(2, "training.mask_documents"),
    "data mix": Layout(2, mixes_data=True),
    "float8": Layout(2, "float8.enable"),
    "float8, gathered": Layout(2, "float8.enable float8.all_gather"),
    "Muon": Layout(2, "optimizer.name=Muon"),
    "Shampoo": Layout(2, "optimizer.name=Shampoo optimizer.start_preconditioning_step=3"),
    "Lion": Layout(1, "optimizer.name=Lion"),
    "experts, step": Layout(2, "experts.balance=step", MOE),
    "experts, sequence": Layout(2, "experts.balance=sequence", MOE),
    "experts, bias": Layout(2, "experts.balance=bias", MOE),
    "ep 2": Layout(2, EP, MOE),
    "ep 2, capacity": Layout(2, f"{EP} experts.capacity_factor=1.01", MOE),
    "ep 2, tp 2, aot_eager": Layout(4, f"{EP} {TP} {AOT_EAGER}", MOE),
}
MIX = """
[[data.sources]]
dataset = "stdlib"
weight = 3.0

[[data.sources]]
dataset = "local"
path = "numbers.jsonl"
"""


def train(tree: Path, name: str, steps: int) -> list[dict[str, Any]]:
    """Train `steps` steps with the sources of `tree`; return the compared metrics of each step, and
    the hash of the last checkpoint.
    """
    layout = LAYOUTS[name]
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "recipe.toml"
        extended = tree / f"train_configs/{layout.recipe}.toml"
        recipe.write_text(f'extends = "{extended}"\n{MIX if layout.mixes_data else ""}')
        numbers = (json.dumps({"text": f"{n} times {n} is {n * n}. " * 9}) for n in range(2000))
        Path(folder, "numbers.jsonl").write_text("\n".join(numbers))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(layout.ranks), "-m", "titan_lite.train", str(recipe)]
        command += ["--job.dump_folder", f"{folder}/run", "--training.steps", str(steps)]
        command += ["--metrics.log_freq", "1", "--validation.steps", "2"]
        command += [f"--{option}" for option in layout.options.split()]
        environment = os.environ | {
            "PYTHONPATH": str(tree),
            "PYTHONSAFEPATH": "1",
            "OMP_NUM_THREADS": "1",
        }
        ended = subprocess.run(command, env=environment, capture_output=True, text=True)
        if ended.returncode != 0:
            output = (ended.stdout + ended.stderr)[-3000:]
            sys.exit(f"{name}, {tree}: exit code {ended.returncode}\n{output}")
        run = Path(folder) / "run"
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        trained = hash_of(run / f"checkpoint/step-{steps}")
    records = [json.loads(line) for line in lines]
    compared = [{k: r[k] for k in ("step", *COMPARED) if k in r} for r in records]
    return [*(record for record in compared if len(record) > 1), {"tensors": trained}]


def hash_of(step: Path) -> str:
    """Return a SHA-256 of the names and values of a checkpoint's tensors."""
    reader = dcp.FileSystemReader(step)
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("commit")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--only", choices=LAYOUTS, nargs="+", default=list(LAYOUTS))
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
            for layout in options.only:
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


def describe(expected: list[dict[str, Any]], metrics: list[dict[str, Any]]) -> str:
    """Return whether two lists of metrics are equal, or their first difference."""
    if metrics == expected:
        return f"equal to the bit, {len(metrics)} lines, last loss {last_loss(metrics)}"
    for one, other in zip(expected, metrics, strict=False):
        if one != other:
            return f"DIFFERS: before {one}, now {other}"
    return f"DIFFERS: {len(expected)} lines before, {len(metrics)} now"


def last_loss(metrics: list[dict[str, Any]]) -> float:
    return [record["loss"] for record in metrics if "loss" in record][-1]


if __name__ == "__main__":
    sys.exit(main())
