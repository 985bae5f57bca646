"""Measure the seconds from building a model to the end of its first step, by number of blocks.

    python scripts/benchmark_compile.py                         # 2, 4, 8 and 16 blocks
    python scripts/benchmark_compile.py --blocks 32 --backend aot_eager

Each number of blocks is measured twice, in fresh processes: cold, with an empty cache of compiled
code, and warm, with what the cold one has left. Two ranks train a model of the debug flavor's width
on the CPU, on random tokens, in steps of forward, backward and AdamW. The time does not include the
import of torch and the start of the process group.

The table also has the median time of a later step of the warm process, and how many of the graphs'
segments are different (compile/segments.py).
"""

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from titan_lite.compile.report import CompileReport
from titan_lite.config import Config, load_config
from titan_lite.distributed.layout import Layout
from titan_lite.distributed.mesh import build_mesh
from titan_lite.distributed.parallelize import ParallelModel, parallelize
from titan_lite.distributed.pipeline_schedule import PipelineSchedule

SEQ_LEN = 512
LOCAL_BATCH_SIZE = 4
RANKS = 2


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Times of rank 0, in seconds."""

    first_step: float  # from building the model to the end of the first step
    step: float  # median of the others
    segments: str  # "8 of 19, 11 of 51": different ones and all, of forward and of backward


def measure(rank: int, config: Config, blocks: int, steps: int, folder: str) -> None:
    """Train on one rank; rank 0 writes its Measurement into `folder`."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS
    )
    started = time.perf_counter()
    model = build(config, blocks)
    optimizer = torch.optim.AdamW(model.parameters.values(), lr=1e-3)
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(0, 256, (LOCAL_BATCH_SIZE, SEQ_LEN + 1), generator=generator)
    batch = model.to_device(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), bos_id=0, eos_id=1)
    tokens = torch.tensor(float(RANKS * LOCAL_BATCH_SIZE * SEQ_LEN))

    ends = [started]
    for _ in range(steps):
        for _ in model.forward_backward([batch], tokens):
            pass
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.perf_counter())
    seconds = [end - begin for begin, end in itertools.pairwise(ends)]
    if rank == 0:
        result = Measurement(
            seconds[0], statistics.median(seconds[1:]), describe(model.compile_reports)
        )
        Path(folder, "measurement").write_text(json.dumps(dataclasses.asdict(result)))
    dist.destroy_process_group()


def build(config: Config, blocks: int) -> ParallelModel:
    """Return a model of so many blocks, initialized."""
    layout = Layout.from_config(config, RANKS)
    names = ("tok_embeddings", *(f"layers.{number}" for number in range(blocks)), "norm", "output")
    layout = dataclasses.replace(
        layout,
        model=dataclasses.replace(layout.model, n_layers=blocks),
        pipeline=PipelineSchedule((names,), (0,), layout.pipeline.microbatches),
    )
    model = parallelize(config, layout, build_mesh(layout.degrees, "cpu"))
    model.materialize(torch.device("cpu"))
    model.init_weights(seed=0)
    return model


def describe(reports: Sequence[CompileReport]) -> str:
    return ", ".join(
        f"{report.different_segments} of {report.segments}"
        for report in reports
        if report.graph != "inference"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--backend", default="inductor", choices=["inductor", "aot_eager"])
    parser.add_argument("--bucketing", default="block")
    parser.add_argument("--steps", type=int, default=6)
    arguments = parser.parse_args()
    if arguments.steps < 2:
        parser.error("--steps: at least 2, since the first one compiles")

    config = load_config(
        "debug_model",
        [
            "--compile.enable",
            "--compile.components=model",
            f"--compile.backend={arguments.backend}",
            f"--compile.bucketing={arguments.bucketing}",
            f"--training.local_batch_size={LOCAL_BATCH_SIZE}",
            f"--training.seq_len={SEQ_LEN}",
        ],
    )
    print("| blocks | first step, cold (s) | warm (s) | a step (s) | different segments |")
    print("|--:|--:|--:|--:|---|", flush=True)
    for blocks in arguments.blocks:
        with tempfile.TemporaryDirectory() as cache:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
            cold, warm = (run(config, blocks, arguments.steps) for _ in range(2))
        print(
            f"| {blocks} | {cold.first_step:.1f} | {warm.first_step:.1f} | {warm.step:.3f}"
            f" | {warm.segments or 'none'} |",
            flush=True,
        )


def run(config: Config, blocks: int, steps: int) -> Measurement:
    """Measure in fresh processes."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, args=(config, blocks, steps, folder), nprocs=RANKS)
        return Measurement(**json.loads(Path(folder, "measurement").read_text()))


if __name__ == "__main__":
    main()
