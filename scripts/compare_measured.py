"""Planned against measured, on this machine's CPU: step time and the bytes of live tensors, of
small models in several layouts.

    python scripts/compare_measured.py                        # all; some minutes
    python scripts/compare_measured.py --layouts "FSDP 2"     # those whose name has this in it
    python scripts/compare_measured.py --keep found.json      # measured once, and read from there when it is planned again

Each layout is a world of fresh processes that build the trainer of the debug recipe and run its
steps, over gloo with one thread each. In turn with the steps, the same processes measure what this
machine reaches meanwhile: large products, attention, memory, links. From these numbers and the
recipe alone the step is then planned; nothing is fitted to a step.

    seconds    of a step: planned from the medians of what the rounds measured; measured, the median of all steps
    MB         of tensors on the rank that has most, at the peak of a step, parameters and optimizer state included, as the
               allocator counts them; planned without the reserves for what no tensor has
"""

import argparse
import ctypes
import dataclasses
import gc
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from benchmark_fsdp import peak_memory, start_world
from torch import Tensor

from titan_lite.config import load_config
from titan_lite.cost.collectives import all_gather_single
from titan_lite.cost.machine import GB, Link, Machine
from titan_lite.cost.measure import find_machine, fit_link, seconds_of, times_of
from titan_lite.cost.profiles import machine_from
from titan_lite.models.llama3 import ModelConfig
from titan_lite.tools.plan.command import lay_out
from titan_lite.tools.plan.summary import make_plan
from titan_lite.trainer import Trainer

CACHES = 2**26  # bytes: more than the caches of a core
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
RECIPE = Path(__file__).parents[1] / "train_configs" / "debug_model.toml"
COMMON = (
    "--training.seq_len=512 --training.local_batch_size=2 --training.global_batch_size=-1"
    " --data.num_workers=0 --checkpoint.no-enable --validation.no-enable"
    " --metrics.no-enable_tensorboard --training.steps=1000"
)
COMPILED = "--compile.enable --compile.backend=aot_eager"
LAYOUTS = {  # name: (ranks, what the recipe has beside COMMON)
    "FSDP 2": (2, ""),
    "FSDP 2, compiled": (2, COMPILED),
    "FSDP 2, compiled, full checkpointing": (2, f"{COMPILED} --activation_checkpoint.mode=full"),
    "FSDP 2, compiled, two local batches": (2, f"{COMPILED} --training.global_batch_size=8"),
    "TP 2, compiled": (2, f"{COMPILED} --parallelism.tensor_parallel_degree=2"),
    "PP 2": (2, "--parallelism.pipeline_parallel_degree=2"),
    "CP 2, compiled": (2, f"{COMPILED} --parallelism.context_parallel_degree=2"),
    "FSDP 4": (4, ""),
    "FSDP 2 x TP 2, compiled": (4, f"{COMPILED} --parallelism.tensor_parallel_degree=2"),
    "2 copies of FSDP 2, compiled": (
        4,
        f"{COMPILED} --parallelism.data_parallel_replicate_degree=2",
    ),
    "PP 2 x FSDP 2": (4, "--parallelism.pipeline_parallel_degree=2"),
    "PP 2 x TP 2": (
        4,
        "--parallelism.pipeline_parallel_degree=2 --parallelism.tensor_parallel_degree=2",
    ),
}
WARM_UP_STEPS = 3


@dataclass(frozen=True)
class Measured:
    """seconds: of each step; peak: bytes; figures: what `measure` says, in each round."""

    seconds: list[float]
    peak: int
    figures: list[dict[str, float]]
    machine: Machine


@dataclass(frozen=True)
class Shapes:
    """The shapes of a rank's work in one forward."""

    model: ModelConfig
    sequences: int
    tokens: int  # per sequence
    tp: int  # ranks that share the model's matrices and heads
    dtype: torch.dtype


def measure(shapes: Shapes, device: torch.device, seconds: float = 0.15) -> dict[str, float]:
    """Measure what the ranks reach, in about 10 x `seconds`. A collective; the slowest rank counts.

    matmul, attention        FLOP/s, forward and backward
    memory                   bytes per second, read and written by pointwise operators on as many tensors as no cache holds
    launch                   seconds of an operator on one element, with a view before and after it
    latency, bandwidth       all-gather over all ranks, as a ring: seconds per hop, bytes per second and rank
    reduction                reduce-scatter time divided by all-gather time, for the same bytes
    """
    model, tp, dtype = shapes.model, shapes.tp, shapes.dtype
    rows, hidden, head = shapes.sequences * shapes.tokens, model.hidden_dim // tp, model.head_dim

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device=device)

    x, w, gradient = random(rows, model.dim), random(hidden, model.dim), random(rows, hidden)
    products = seconds_of(lambda: (x @ w.T, gradient @ w, gradient.T @ x), device, seconds)
    q = random(shapes.sequences, max(1, model.n_heads // tp), shapes.tokens, head).requires_grad_()
    k, v = (
        random(
            shapes.sequences, max(1, model.n_kv_heads // tp), shapes.tokens, head
        ).requires_grad_()
        for _ in range(2)
    )
    upstream = torch.ones_like(q)

    def attend() -> None:
        torch.autograd.grad(
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
            (q, k, v),
            upstream,
        )

    attention = seconds_of(attend, device, seconds)
    gradients = [gradient, *(random(rows, hidden) for _ in range(CACHES // gradient.nbytes))]
    # Results are kept, as in a step's heap. glibc returns others to the system, whose new pages
    # would be measured instead.
    results = [[torch.empty_like(each) for each in gradients] for _ in range(2)]

    def gate() -> None:
        for each, gated, product in zip(gradients, *results, strict=True):
            torch.mul(torch.sigmoid(each, out=gated), each, out=product)

    pointwise = seconds_of(gate, device, seconds) / len(gradients)
    one = torch.ones(1, dtype=dtype, device=device)
    found = {
        "matmul": 3 * 2 * rows * model.dim * hidden / products,
        "attention": (
            7 * 2 * q.numel() * shapes.tokens / 2 / attention
        ),  # two products forward, five backward, each half (causal)
        "memory": 5 * gradient.nbytes / pointwise,
        # negative: the largest counts
        "launch": (
            -seconds_of(
                lambda: [(one.view(1, 1) + one).view(1) for _ in range(100)], device, seconds / 5
            )
            / 100
        ),
    }
    figures = torch.tensor(list(found.values()), dtype=torch.float64, device=device)
    if dist.get_world_size() > 1:
        dist.all_reduce(figures, dist.ReduceOp.MIN)
    found = dict(zip(found, figures.tolist(), strict=True))
    found["launch"] *= -1
    if dist.get_world_size() == 1:
        return found
    gathers = times_of(all_gather_single, device)
    reduces = times_of(lambda full, shard: reduce_scatter_single(shard, full), device)
    return found | fit_link(gathers) | {"reduction": sum(reduces) / sum(gathers)}


def rank_main(
    pipe: Connection, rank: int, ranks: int, store: str, overrides: str, rounds: int, steps: int
) -> None:
    count_all = ctypes.c_bool.in_dll(
        ctypes.CDLL(torch._C.__file__), "FLAGS_caffe2_report_cpu_memory_usage"
    )
    count_all.value = True  # before the first tensor, as in benchmark_fsdp.py
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store}
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(
            RECIPE, [*COMMON.split(), *overrides.split(), f"--job.dump_folder={folder}"]
        )
        layout = lay_out(config, ranks)
        trainer = Trainer(config)
        device = torch.device("cpu")
        torch.set_num_threads(1)
        machine = find_machine("", device)
        assert machine is not None

        def step() -> None:
            trainer.progress.step += 1
            trainer.train_step()
            trainer.read_metrics(wait=True)

        for _ in range(WARM_UP_STEPS):
            step()
        gc.collect()
        peak = peak_memory(step, device)  # type: ignore[arg-type]
        count_all.value = False
        shapes = Shapes(
            layout.model,
            layout.microbatch_size,
            len(trainer.model.positions),
            layout.degrees["tp"],
            torch.float32,
        )
        figures, seconds = [], []
        for _ in range(rounds):
            figures.append(measure(shapes, device))
            gc.collect()
            dist.barrier()
            for _ in range(steps):
                start = time.perf_counter()
                step()
                seconds.append(time.perf_counter() - start)
        pipe.send(Measured(seconds, peak, figures, machine))
        trainer.watchdog.disable()
        dist.barrier()
        dist.destroy_process_group()


def run(ranks: int, overrides: str, rounds: int, steps: int) -> dict[str, Any]:
    """Seconds of a step, bytes of the rank that has most, the machine as its ranks found it, and
    what they measured meanwhile.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = start_world(rank_main, ranks, Path(str(port)), overrides, rounds, steps)
    found: list[Measured] = world.receive()
    for process in world.processes:
        process.join()
    first = found[0]
    reached = {
        key: statistics.median(each[key] for each in first.figures) for key in first.figures[0]
    }
    machine = {
        key: value for key, value in dataclasses.asdict(first.machine).items() if key != "like"
    }  # as in a machine's file
    peak = max(each.peak for each in found)
    return {
        "seconds": statistics.median(first.seconds),
        "peak": peak,
        "reached": reached,
        "machine": machine,
    }


def calibrated(machine: Machine, reached: Mapping[str, float], dtype: torch.dtype) -> Machine:
    """Return a CPU's machine with the measured speeds in `dtype`.

    A CPU has no datasheet: its peaks are measured, too.
    """
    name = str(dtype).removeprefix("torch.")
    machine = dataclasses.replace(
        machine,
        tflops={**machine.tflops, name: reached["matmul"] / 1e12},
        memory_bandwidth=reached["memory"] / GB,
        launch=1e6 * reached["launch"],
        reduction=reached["reduction"],
    )
    latency = 1e6 * reached["latency"]
    link = Link(reached["bandwidth"] / GB / machine.link_efficiency, latency)
    return dataclasses.replace(
        machine,
        attention_efficiency=min(1.0, reached["attention"] / machine.flops(dtype)),
        intra_node=link,
        inter_node=link,
        collective_launch=latency,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layouts", default="", help="only those whose name has this in it")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="in one round")
    parser.add_argument(
        "--keep",
        type=Path,
        help="a file for what is measured; what it has already is not measured again",
    )
    parser.add_argument("--show", action="store_true", help="what the step is planned from, and of")
    arguments = parser.parse_args()
    kept = (
        json.loads(arguments.keep.read_text()) if arguments.keep and arguments.keep.exists() else {}
    )
    wanted = {name: layout for name, layout in LAYOUTS.items() if arguments.layouts in name}
    for name, (ranks, overrides) in wanted.items():
        if name not in kept:
            kept[name] = run(ranks, overrides, arguments.rounds, arguments.steps)
            print(
                f"{name}: {kept[name]['seconds']:.3f} s, {kept[name]['peak'] / 1e6:.1f} MB",
                file=sys.stderr,
                flush=True,
            )
            if arguments.keep:
                arguments.keep.write_text(json.dumps(kept, indent=1))
    print("| layout | ranks | s planned | measured | ratio | MB planned | measured | ratio |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|", flush=True)
    for name, (ranks, overrides) in wanted.items():
        found = kept[name]
        machine = calibrated(machine_from(found["machine"], name), found["reached"], torch.float32)
        config = load_config(RECIPE, [*COMMON.split(), *overrides.split()])
        plan = make_plan(lay_out(config, ranks), [machine])
        (planned, seconds), (expected, peak) = (
            (plan.steps[0].seconds, found["seconds"]),
            (plan.memory.peak, found["peak"]),
        )
        times = f"{planned:.3f} | {seconds:.3f} | {planned / seconds:.2f}"
        print(
            f"| {name} | {ranks} | {times} | {expected / 1e6:.1f} | {peak / 1e6:.1f} |"
            f" {expected / peak:.2f} |",
            flush=True,
        )
        if arguments.show:
            print(found["reached"], dict(plan.steps[0].parts), plan.memory, sep="\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
