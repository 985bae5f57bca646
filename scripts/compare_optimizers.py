"""Compare AdamW, Lion, Muon and Shampoo on a debug model: losses, also in fewer steps, and times of
an update.

    python scripts/compare_optimizers.py              # 200 steps, 3 seeds, 3 learning rates each
    python scripts/compare_optimizers.py --whole      # the debug recipe's model and batch; hours
    python scripts/compare_optimizers.py --updates    # seconds of an update on two ranks, in turn
    python scripts/compare_optimizers.py --powersgd 8 # losses and bytes of copies, with PowerSGD

The model and the runs are those of compare_precision.py: two blocks of width 128, one process with
one thread, the loss of held-out documents. An optimizer's best learning rate has the least loss
after the last step, with seed 0. There, all but AdamW are trained with --shares of the steps as
well: each is a run with a learning-rate schedule of its own length. The update is that of the debug
recipe's model, in float32 on gloo, with the iteration in bfloat16: AdamW, Lion, Muon and Shampoo,
whose matrices have owners, and torch.optim.Muon, which computes every matrix on every rank. Shampoo
is timed with the roots in every update, and with those of the first one. --powersgd trains on two
copies (DDP), with AdamW, on as many tokens a step.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from compare_precision import RECIPE, SMALL, validation_loss
from torch import nn

from titan_lite.config import Config, Model, Optimizer, Training, load_config
from titan_lite.config.optimizers import OPTIMIZERS
from titan_lite.distributed.layout import Layout
from titan_lite.distributed.mesh import build_mesh
from titan_lite.distributed.parallelize import parallelize
from titan_lite.features.powersgd.compression import compressed_sizes
from titan_lite.models.fqns import is_matrix
from titan_lite.optim.build import build_optimizer

NAMES = tuple(OPTIMIZERS)


def loss_after(name: str, rate: float, seed: int, steps: int, size: str) -> float:
    """Return the loss of held-out documents after the last step of a run.

    size: options of the model, and others for all runs.
    """
    options = [
        f"--optimizer.name={name}",
        f"--optimizer.lr={rate}",
        f"--debug.seed={seed}",
        f"--training.steps={steps}",
    ]
    return validation_loss([*size.split(), *options, "--validation.steps=4"])


def compare_losses(
    names: list[str], steps: int, seeds: int, rates: list[float], shares: list[float], size: str
) -> None:
    print(
        "| optimizer | learning rate | steps |"
        f" {' | '.join(f'seed {seed}' for seed in range(seeds))} | mean |"
    )
    print(f"|---|--:|--:|{'--:|' * (seeds + 1)}", flush=True)
    for name in names:
        first = {rate: loss_after(name, rate, 0, steps, size) for rate in rates}
        best = min(rates, key=first.__getitem__)
        for rate in rates:
            if rate != best:
                print(
                    f"| {name} | {rate:g} | {steps} | {first[rate]:.4f} |{' |' * seeds}", flush=True
                )
        for share in (1.0, *(shares if name != "AdamW" else ())):
            done = round(share * steps)
            ends = [first[best]] if share == 1 else []
            ends += [loss_after(name, best, seed, done, size) for seed in range(len(ends), seeds)]
            each = " | ".join(f"{loss:.4f}" for loss in ends)
            print(
                f"| {name} | {best:g} | {done} | {each} | {statistics.fmean(ends):.4f} |",
                flush=True,
            )


def compare_compression(rank: int, steps: int, seeds: int, size: str) -> None:
    common = [
        *size.split(),
        "--parallelism.data_parallel_replicate_degree=2",
        f"--training.steps={steps}",
    ]
    common += ["--training.local_batch_size=4", "--validation.steps=8"]
    compressed = [
        "--parallelism.replicate_compression=powersgd",
        f"--parallelism.replicate_rank={rank}",
    ]
    compressed += [f"--parallelism.replicate_uncompressed_steps={steps // 10}"]
    print(
        f"| between copies | {' | '.join(f'seed {seed}' for seed in range(seeds))} | mean | bytes"
        " of a step |"
    )
    print(f"|---|{'--:|' * (seeds + 2)}", flush=True)
    config = load_config(RECIPE, [*common, *compressed])
    sent = compressed_sizes(config.parallelism, Layout.from_config(config, 2)).values()
    whole, factors = (
        4 * sum(numbers for numbers, _ in sent),
        4 * sum(factors or numbers for numbers, factors in sent),
    )
    means = []
    for name, options, nbytes in (
        ("none", [], whole),
        (f"powersgd, rank {rank}", compressed, factors),
    ):
        ends = [
            validation_loss([*common, *options, f"--debug.seed={seed}"], ranks=2)
            for seed in range(seeds)
        ]
        means.append(statistics.fmean(ends))
        print(
            f"| {name} | {' | '.join(f'{loss:.4f}' for loss in ends)} | {means[-1]:.4f} |"
            f" {nbytes:,} |",
            flush=True,
        )
    print(
        f"loss with PowerSGD against none: {100 * (means[1] / means[0] - 1):+.2f}%, with"
        f" 1/{whole / factors:.1f} of the bytes"
    )


def time_updates(rank: int, folder: str, rounds: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = build_mesh(dict(pp=1, dp_replicate=1, dp_shard=2, cp=1, tp=1), "cpu")
    config = Config(
        model=Model(flavor="debug"),
        training=Training(seq_len=64, mixed_precision_param="float32"),
    )
    model = parallelize(config, Layout.from_config(config, world_size=2), mesh)
    model.materialize(torch.device("cpu"))
    model.init_weights(seed=0)
    named = model.parameters
    for parameter in named.values():
        parameter.grad = torch.randn_like(parameter)
    roots = dict(start_preconditioning_step=1)
    timed = {name: Optimizer(name=name) for name in NAMES if name != "Shampoo"}
    timed["Shampoo with roots"] = Optimizer(name="Shampoo", precondition_frequency=1, **roots)
    timed["Shampoo without"] = Optimizer(name="Shampoo", precondition_frequency=10**9, **roots)
    updates: dict[str, Callable] = {
        name: build_optimizer(config.replace(optimizer=each), named).step
        for name, each in timed.items()
    }
    updates["torch.optim.Muon"] = torchs_muon(named)
    seconds: dict[str, list[float]] = {name: [] for name in updates}
    for _ in range(rounds + 1):
        for name, update in updates.items():
            dist.barrier()
            started = time.perf_counter()
            update()
            dist.barrier()
            seconds[name].append(time.perf_counter() - started)
    for name, each in seconds.items() if rank == 0 else ():
        print(
            f"{name:<18} {1e3 * statistics.median(each[1:]):7.0f} ms an update (median of {rounds},"
            " in turn)",
            flush=True,
        )
    dist.destroy_process_group()


def torchs_muon(named: dict[str, nn.Parameter]) -> Callable[[], None]:
    """Return the step of torch.optim.Muon for matrices within blocks, and of our AdamW for the
    others.
    """
    matrices = {fqn: parameter for fqn, parameter in named.items() if is_matrix(fqn)}
    muon = torch.optim.Muon([*matrices.values()], lr=3e-4, adjust_lr_fn="match_rms_adamw")
    others = {fqn: parameter for fqn, parameter in named.items() if fqn not in matrices}
    adamw = build_optimizer(Config(), others)

    def step() -> None:
        muon.step()
        adamw.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 3e-3, 1e-2])
    parser.add_argument("--names", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--shares", type=float, nargs="*", default=[0.75])
    parser.add_argument(
        "--whole", action="store_true", help="the debug recipe's own model and batch"
    )
    parser.add_argument(
        "--updates", action="store_true", help="time updates on two ranks, and train nothing"
    )
    parser.add_argument("--rounds", type=int, default=7, help="updates of each")
    parser.add_argument(
        "--powersgd",
        type=int,
        default=0,
        metavar="RANK",
        help="compare compression between two copies instead",
    )
    parser.add_argument(
        "--options",
        default="",
        help="of all runs at learning rates: --options=--optimizer.momentum=0.9",
    )
    chosen = parser.parse_args()
    if chosen.options and (chosen.powersgd or chosen.updates):
        parser.error(
            "--options is for losses at learning rates; leave it out with --powersgd and --updates"
        )
    size = f"{'' if chosen.whole else SMALL} {chosen.options}"
    if chosen.powersgd:
        compare_compression(chosen.powersgd, chosen.steps, chosen.seeds, size)
        return
    if not chosen.updates:
        compare_losses(chosen.names, chosen.steps, chosen.seeds, chosen.rates, chosen.shares, size)
        return
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            time_updates, args=(folder, chosen.rounds), nprocs=2, start_method="fork"
        )


if __name__ == "__main__":
    main()
