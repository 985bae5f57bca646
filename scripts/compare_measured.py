"""Planned against measured, on this machine's CPU: step time and the bytes of live tensors, of
small models in several layouts.

    python scripts/compare_measured.py                        # all; some minutes
    python scripts/compare_measured.py --layouts "FSDP 2"     # those whose name has this in it
    python scripts/compare_measured.py --keep measured.json   # measured once, then read from there

Each layout is a world of fresh processes that build the trainer of the debug recipe and run its
steps, over gloo with one thread each. In turn with the steps, the same processes measure what this
machine reaches meanwhile: large matmuls, attention, memory, links. From these numbers and the
recipe alone the step is then planned; nothing is fitted to a step.

    seconds    of a step: planned from the medians of what the rounds measured; measured, the median
               of all steps
    MB         of tensors on the rank that has most, at the peak of a step, parameters and optimizer
               state included, as the allocator counts them; planned without the reserves for what
               no tensor has
"""

import argparse
import ctypes
import dataclasses
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from benchmark_fsdp import peak_memory, start_world
from torch import Tensor

from titan_lite import progress
from titan_lite.collectives import all_gather_single
from titan_lite.config import load_config
from titan_lite.config.families import ModelConfig
from titan_lite.cost.machine import GB, Link, Machine
from titan_lite.cost.measure import find_machine, fit_ring, seconds_of, times_of
from titan_lite.cost.profiles import machine_from
from titan_lite.environment import loopback_port
from titan_lite.tools.plan.command import lay_out
from titan_lite.tools.plan.plan import make_plan
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
class Speeds:
    """The speeds that a rank reaches."""

    matmul: float  # FLOP/s, forward and backward
    attention: float  # the same
    memory: float  # bytes per second, read and written
    launch: float  # seconds of an operator
    # Of an all-gather over all ranks, as a ring; 0 with one rank.
    latency: float = 0.0  # seconds per hop
    bandwidth: float = 0.0  # bytes per second and rank
    reduction: float = 1.0  # time of a reduce-scatter divided by that of an all-gather


@dataclass(frozen=True)
class Measured:
    """The measurements of a rank."""

    seconds: list[float]  # of each step
    peak: int  # bytes
    speeds: list[Speeds]  # in each round
    machine: Machine


@dataclass(frozen=True)
class Shapes:
    """The shapes of a rank's work in one forward."""

    model: ModelConfig
    sequences: int
    tokens: int  # per sequence
    tp: int  # ranks that share the model's matrices and heads
    dtype: torch.dtype

    @property
    def all_tokens(self) -> int:
        return self.sequences * self.tokens

    @property
    def hidden(self) -> int:
        return self.model.hidden_dim // self.tp


def measure(shapes: Shapes, device: torch.device, seconds: float = 0.15) -> Speeds:
    """Measure what the slowest rank reaches, in about 10 x `seconds`. A collective."""
    slowest = torch.tensor(
        [
            matmul_flops(shapes, device, seconds),
            attention_flops(shapes, device, seconds),
            memory_bandwidth(shapes, device, seconds),
            -operator_seconds(shapes.dtype, device, seconds / 5),  # the largest counts
        ],
        dtype=torch.float64,
        device=device,
    )
    if dist.get_world_size() == 1:
        matmul, attention, memory, launch = slowest.tolist()
        return Speeds(matmul, attention, memory, -launch)
    dist.all_reduce(slowest, dist.ReduceOp.MIN)
    matmul, attention, memory, launch = slowest.tolist()
    gather = times_of(all_gather_single, device)
    reduce = times_of(lambda full, shard: reduce_scatter_single(shard, full), device)
    ring = fit_ring(gather)
    return Speeds(
        matmul,
        attention,
        memory,
        -launch,
        latency=ring.latency,
        bandwidth=ring.bandwidth,
        reduction=sum(reduce) / sum(gather),
    )


def matmul_flops(shapes: Shapes, device: torch.device, seconds: float) -> float:
    """Measure the FLOP/s of a feed-forward's matmul, forward and backward."""
    dim = shapes.model.dim
    x = random_tensor(shapes, device, shapes.all_tokens, dim)
    weight = random_tensor(shapes, device, shapes.hidden, dim)
    gradient = random_tensor(shapes, device, shapes.all_tokens, shapes.hidden)
    taken = seconds_of(lambda: (x @ weight.T, gradient @ weight, gradient.T @ x), device, seconds)
    return 3 * 2 * shapes.all_tokens * dim * shapes.hidden / taken


def attention_flops(shapes: Shapes, device: torch.device, seconds: float) -> float:
    """Measure the FLOP/s of causal attention, forward and backward."""
    model = shapes.model
    heads = max(1, model.n_heads // shapes.tp)
    kv_heads = max(1, model.n_kv_heads // shapes.tp)

    def random_heads(count: int) -> Tensor:
        size = (shapes.sequences, count, shapes.tokens, model.head_dim)
        return random_tensor(shapes, device, *size).requires_grad_()

    q = random_heads(heads)
    k = random_heads(kv_heads)
    v = random_heads(kv_heads)
    upstream = torch.ones_like(q)

    def attend() -> None:
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        torch.autograd.grad(attended, (q, k, v), upstream)

    taken = seconds_of(attend, device, seconds)
    # Two matmuls forward, five backward, each half (causal).
    return 7 * 2 * q.numel() * shapes.tokens / 2 / taken


def memory_bandwidth(shapes: Shapes, device: torch.device, seconds: float) -> float:
    """Measure the bytes per second that pointwise operators read and write.

    They work on as many tensors as no cache holds. Results are kept, as in a step's heap: glibc
    returns others to the system, whose new pages would be measured instead.
    """
    first = random_tensor(shapes, device, shapes.all_tokens, shapes.hidden)
    others = CACHES // first.nbytes
    inputs = [first] + [torch.randn_like(first) for _ in range(others)]
    gates = [torch.empty_like(first) for _ in inputs]
    products = [torch.empty_like(first) for _ in inputs]

    def gate() -> None:
        for x, gated, product in zip(inputs, gates, products, strict=True):
            torch.mul(torch.sigmoid(x, out=gated), x, out=product)

    taken = seconds_of(gate, device, seconds) / len(inputs)
    return 5 * first.nbytes / taken


def operator_seconds(dtype: torch.dtype, device: torch.device, seconds: float) -> float:
    """Measure the seconds of an operator on one element, with a view before and after it."""
    one = torch.ones(1, dtype=dtype, device=device)

    def add_often() -> None:
        for _ in range(100):
            (one.view(1, 1) + one).view(1)

    return seconds_of(add_often, device, seconds) / 100


def random_tensor(shapes: Shapes, device: torch.device, *size: int) -> Tensor:
    return torch.randn(*size, dtype=shapes.dtype, device=device)


def rank_main(  # noqa: PLR0913
    pipe: Connection,
    rank: int,
    ranks: int,
    port: str,
    folder: str,
    overrides: str,
    rounds: int,
    steps: int,
) -> None:
    """Train on this rank. folder: of the run, the same on all ranks."""
    libtorch = ctypes.CDLL(torch._C.__file__)
    count_all = ctypes.c_bool.in_dll(libtorch, "FLAGS_caffe2_report_cpu_memory_usage")
    count_all.value = True  # before the first tensor, as in benchmark_fsdp.py
    os.environ["RANK"] = str(rank)
    os.environ["WORLD_SIZE"] = str(ranks)
    os.environ["LOCAL_RANK"] = str(rank)
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = port
    config = load_config(
        RECIPE, [*COMMON.split(), *overrides.split(), f"--job.dump_folder={folder}"]
    )
    layout = lay_out(config, ranks)
    trainer = Trainer(config)
    trainer.hooks = []  # which expect `train` to have begun
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
    speeds: list[Speeds] = []
    seconds: list[float] = []
    for _ in range(rounds):
        speeds.append(measure(shapes, device))
        gc.collect()
        dist.barrier()
        for _ in range(steps):
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
    pipe.send(Measured(seconds, peak, speeds, machine))
    progress.end_phases()
    dist.barrier()
    dist.destroy_process_group()


def run(ranks: int, overrides: str, rounds: int, steps: int) -> dict[str, Any]:
    """Train a layout. Return its seconds and bytes, and what it is planned from, as JSON."""
    port = Path(str(loopback_port()))
    with tempfile.TemporaryDirectory() as folder:
        world = start_world(rank_main, ranks, port, folder, overrides, rounds, steps)
        of_ranks: list[Measured] = world.receive()
        for process in world.processes:
            process.join()
    first = of_ranks[0]
    rounds_of_first = [dataclasses.asdict(speeds) for speeds in first.speeds]
    reached = {
        name: statistics.median(speeds[name] for speeds in rounds_of_first)
        for name in rounds_of_first[0]
    }
    machine = dataclasses.asdict(first.machine)
    del machine["like"]  # as in a machine's file
    return {
        "seconds": statistics.median(first.seconds),
        "peak": max(measured.peak for measured in of_ranks),
        "reached": reached,
        "machine": machine,
    }


def calibrated(machine: Machine, reached: Speeds, dtype: torch.dtype) -> Machine:
    """Return a CPU's machine with the measured speeds in `dtype`.

    A CPU has no datasheet: its peaks are measured, too.
    """
    name = str(dtype).removeprefix("torch.")
    machine = dataclasses.replace(
        machine,
        tflops={**machine.tflops, name: reached.matmul / 1e12},
        memory_bandwidth=reached.memory / GB,
        launch=1e6 * reached.launch,
        reduction=reached.reduction,
    )
    latency = 1e6 * reached.latency
    link = Link(reached.bandwidth / GB / machine.link_efficiency, latency)
    return dataclasses.replace(
        machine,
        attention_efficiency=min(1.0, reached.attention / machine.flops(dtype)),
        intra_node=link,
        inter_node=link,
        collective_launch=latency,
    )


def compared_row(
    name: str, ranks: int, overrides: str, measured: dict[str, Any], *, show: bool
) -> str:
    """Plan a layout on the measured machine. Return a row of the table; show: and its parts."""
    reached = Speeds(**measured["reached"])
    machine = calibrated(machine_from(measured["machine"], name), reached, torch.float32)
    config = load_config(RECIPE, [*COMMON.split(), *overrides.split()])
    plan = make_plan(lay_out(config, ranks), machine)
    planned = plan.nominal.seconds
    seconds = measured["seconds"]
    expected = plan.memory.peak
    peak = measured["peak"]
    row = (
        f"| {name} | {ranks} | {planned:.3f} | {seconds:.3f} | {planned / seconds:.2f} |"
        f" {expected / 1e6:.1f} | {peak / 1e6:.1f} | {expected / peak:.2f} |"
    )
    if show:
        row = f"{row}\n{reached}\n{plan.nominal.parts}\n{plan.memory}"
    return row


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
        print(compared_row(name, ranks, overrides, kept[name], show=arguments.show), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
