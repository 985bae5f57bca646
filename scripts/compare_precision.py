"""Compare the loss of a small debug model with matmuls in float32, bfloat16 and float8.

    python scripts/compare_precision.py      # 300 steps of 8 sequences of 64 tokens, 3 seeds
    python scripts/compare_precision.py --whole --ways float32 bfloat16 float8 --steps 600   # hours

The small model has two blocks of width 128. With --whole, it is the debug recipe's own model with
its 8 sequences of 256 tokens a step. Each run is one process with one thread. The loss is that of
held-out documents after the last step, over 10 batches. Each run is printed when it ends, before
the rows of the table.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
from pathlib import Path

from titan_lite.config import load_config
from titan_lite.environment import loopback_port
from titan_lite.metrics.run_files import read_metrics
from titan_lite.trainer import Trainer

RECIPE = Path(__file__).parents[1] / "train_configs" / "debug_model.toml"
HALF = "--training.mixed_precision_param=bfloat16"
EIGHT = "--float8.enable"
WAYS = {  # matmuls: what the recipe has beside COMMON
    "float32": [],
    "bfloat16": [HALF],
    "float8, tensorwise": [HALF, EIGHT, "--float8.all_gather"],
    "float8, rowwise": [HALF, EIGHT, "--float8.recipe=rowwise"],
    "float8, rowwise_with_gw_hp": [HALF, EIGHT, "--float8.recipe=rowwise_with_gw_hp"],
}
SEQUENCES = "--training.local_batch_size={0} --training.global_batch_size={0}"
SMALL = (
    "--model.dim=128 --model.n_layers=2 --model.hidden_dim=256 --training.seq_len=64"
    f" {SEQUENCES.format(8)}"
)
COMMON = (
    "--data.num_workers=0 --checkpoint.no-enable --validation.freq=1000000"
    " --metrics.no-enable_tensorboard"
)


def train(arguments: list[str], port: int, rank: int, ranks: int) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    Trainer(load_config(RECIPE, [*COMMON.split(), *arguments])).train()
    os._exit(0)


def validation_loss(arguments: list[str], ranks: int = 1) -> float:
    """Train in processes of its own, and return the last validation loss."""
    port = loopback_port()
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        arguments = [*arguments, f"--job.dump_folder={folder}"]
        processes = [
            fork.Process(target=train, args=(arguments, port, rank, ranks)) for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            sys.exit(f"a run with {' '.join(arguments)} failed")
        *_, last = read_metrics(Path(folder) / "metrics.jsonl").values()
    return float(last["validation_loss"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--ways",
        nargs="+",
        default=[""],
        help="only those with matmuls whose name begins with one of these",
    )
    parser.add_argument("--whole", action="store_true", help="the debug recipe's own model")
    parser.add_argument("--sequences", type=int, default=8, help="of a step")
    chosen = parser.parse_args()
    seeds = range(chosen.seeds)
    print(f"| matmuls | {' | '.join(f'seed {seed}' for seed in seeds)} | mean | against float32 |")
    print(f"|---|{'--:|' * (len(seeds) + 2)}", flush=True)
    first = 0.0
    for way, overrides in WAYS.items():
        if not way.startswith(tuple(chosen.ways)):
            continue
        size = f"{'' if chosen.whole else SMALL} {SEQUENCES.format(chosen.sequences)}"
        run = [*size.split(), f"--training.steps={chosen.steps}", *overrides]
        losses = []
        for seed in seeds:
            losses.append(validation_loss([*run, f"--debug.seed={seed}"]))
            print(f"{way}, seed {seed}: {losses[-1]:.4f}", file=sys.stderr, flush=True)
        mean = statistics.fmean(losses)
        first = first or mean
        each = " | ".join(f"{loss:.4f}" for loss in losses)
        print(f"| {way} | {each} | {mean:.4f} | {100 * (mean / first - 1):+.2f}% |", flush=True)


if __name__ == "__main__":
    main()
