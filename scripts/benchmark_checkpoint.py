"""Measure the cost of a save: seconds in which the training loop is blocked, sync and async, for a
model and AdamW in fp32.

    python scripts/benchmark_checkpoint.py      # two layers of 1B: 0.38B parameters, 4.3 GiB a step
    python scripts/benchmark_checkpoint.py --flavor debug --layers 6 --folder /dev/shm

Two processes (--world-size) hold shards on CPU, or on a GPU each where there are enough, and
"train": matmuls, between which they ask after the save as the trainer does. Modes save in
turn, --saves times, into --folder, which the page cache is in front of; every file is synced. The
table has medians of

    blocked         seconds in `save` itself
    complete after  seconds until the checkpoint has its name
    lost            seconds that `save` and the steps beside it took more than as many steps alone:
                    what a save costs training

The first save of each mode is left out: it finds memory, files and groups to be made.
"""

import argparse
import dataclasses
import logging
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from benchmark_fsdp import join_world, start_world
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from titan_lite.checkpoint.manager import Checkpointer
from titan_lite.checkpoint.state import RunState
from titan_lite.config import Checkpoint
from titan_lite.config.families import LLAMA3
from titan_lite.logging import logger
from titan_lite.models.transformer import Transformer

MODES = ("disabled", "async", *(("async_with_pinned_mem",) if torch.cuda.is_available() else ()))


def build_tensors(flavor: str, layers: int, device: torch.device) -> dict[str, DTensor]:
    """Return this rank's shards of parameters and of two moments of each, by name."""
    with torch.device("meta"):
        model = Transformer(
            dataclasses.replace(LLAMA3.flavors[flavor], n_layers=layers, max_seq_len=1)
        )
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    tensors: dict[str, DTensor] = {}
    for name, parameter in model.named_parameters():
        for key in (name, f"optimizer.state.{name}.exp_avg", f"optimizer.state.{name}.exp_avg_sq"):
            shards = torch.tensor_split(torch.empty(parameter.shape, device="meta"), mesh.size())
            local = torch.randn(shards[mesh.get_local_rank()].shape, device=device)
            tensors[key] = DTensor.from_local(
                local, mesh, [Shard(0)], shape=parameter.shape, stride=parameter.stride()
            )
    return tensors


def rank_main(  # noqa: PLR0913  arguments of a process
    pipe: Connection,
    rank: int,
    world_size: int,
    store: str,
    flavor: str,
    layers: int,
    folder: str,
    saves: int,
) -> None:
    """Send the bytes of a step, then of each save (mode, seconds blocked, complete after, lost)."""
    logger.setLevel(logging.ERROR)
    device = join_world(rank, world_size, store)
    tensors = build_tensors(flavor, layers, device)
    matrix = torch.randn(1024, 1024, device=device)

    def step() -> float:
        start = time.perf_counter()
        for _ in range(3):
            matrix @ matrix
        if device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        return time.perf_counter() - start

    checkpointers = {
        mode: Checkpointer(
            Checkpoint(enable=True, async_mode=mode, keep_latest_k=1, folder=mode), Path(folder)
        )
        for mode in MODES
    }
    pipe.send(sum(tensor.numel() * tensor.itemsize for tensor in tensors.values()))
    for number in range(saves + 1):
        for mode, checkpointer in checkpointers.items():
            alone = statistics.median(step() for _ in range(5))
            start = time.perf_counter()
            checkpointer.save(number, tensors, RunState())
            blocked = time.perf_counter() - start
            steps = 0
            while checkpointer.background_save is not None:
                step()
                checkpointer.poll()
                steps += 1
            complete = time.perf_counter() - start
            if number:
                pipe.send((mode, blocked, complete, complete - steps * alone))
            dist.barrier()
    pipe.send(None)
    pipe.recv()
    dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--flavor", choices=LLAMA3.flavors, default="1B")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--folder", default=None, help="where to save; a temporary one by default")
    options = parser.parse_args(arguments)
    folder = tempfile.mkdtemp(dir=options.folder)
    try:
        parts = (options.flavor, options.layers, folder, options.saves)
        world = start_world(rank_main, options.world_size, Path(folder) / "store", *parts)
        size, *_ = world.receive()
        found: dict[str, list[tuple[float, ...]]] = {mode: [] for mode in MODES}
        while (results := world.receive()) and results[0] is not None:
            mode = results[0][0]
            found[mode].append(
                tuple(
                    max(seconds)
                    for seconds in zip(*(result[1:] for result in results), strict=True)
                )
            )
        world.end()
    finally:
        shutil.rmtree(folder)
    print(
        f"{options.flavor}, {options.layers} layers: {size / 12 / 1e9:.2f}B parameters,"
        f" {size / 2**30:.1f} GiB a step"
    )
    print("\n| async_mode | blocked s | complete after s | lost s |\n|---|--:|--:|--:|")
    for mode, each in found.items():
        medians = [f"{statistics.median(column):.2f}" for column in zip(*each, strict=True)]
        print(f"| {mode} | {' | '.join(medians)} |")


if __name__ == "__main__":
    main()
