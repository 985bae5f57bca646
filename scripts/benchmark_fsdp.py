"""Compare SimpleFSDP with PyTorch's FSDP2: tokens a second and peak memory of a step in float32.

    python scripts/benchmark_fsdp.py                                # compiling takes minutes
    python scripts/benchmark_fsdp.py --models debug --no-compile    # the eager ones only
    python scripts/benchmark_fsdp.py --variants fsdp2-compiled simple-auto-reshard

A variant is a world of its own: --world-size fresh processes, on CPU over gloo with one thread
each, or on a GPU each over NCCL where there are enough. A step is forward, backward, fused AdamW
and zero_grad on random tokens, the same for all variants.

Speed: the worlds stay alive and run --steps steps in turn (A B C A B C ...) in --rounds rounds, so
that a noisy machine hits all alike; who waits blocks on a pipe. The table has the median over the
rounds, the range of the rounds as a percentage of it, and the ratio of medians to that of the first
variant.

Memory: the most bytes that tensors of a rank take at once during a step in a steady state,
parameters and optimizer state included, as the allocator counts them, in compiled code too. Not in
it are buffers inside of gloo and NCCL.

Losses are compared after every round; where variants differ by more than a relative 1e-4, there is
no table. Compiled variants compile the loss, too.

"""

import argparse
import ctypes
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from titan_lite.compile.compile import compile_model, trust_vector_instructions
from titan_lite.compile.graph_passes import GraphPasses, choose_passes
from titan_lite.compile.model_parts import TraceableModel
from titan_lite.compile.settings import PassSettings
from titan_lite.config import Compile, Config, Parallelism
from titan_lite.config.families import LLAMA3, ModelConfig
from titan_lite.cost.measure import find_machine
from titan_lite.distributed.layout import resolve_degrees
from titan_lite.distributed.mesh import build_mesh, parameter_mesh
from titan_lite.distributed.simple_fsdp import (
    FSDPOptions,
    apply_simple_fsdp,
    materialize,
)
from titan_lite.distributed.stage_ranks import stage_ranks
from titan_lite.dtensor import shard_of
from titan_lite.models.loss import Loss, VocabularyShard
from titan_lite.models.transformer import Transformer

SEQ_LEN = 512
MODELS = {  # name: (shape, sequences a rank)
    "debug": (LLAMA3.flavors["debug"], 4),
    "larger": (
        ModelConfig(
            dim=512, n_layers=8, n_heads=8, n_kv_heads=4, hidden_dim=1536, vocab_size=32_000
        ),
        1,
    ),
}
# in which code is compiled, optimizer state made, and the order of gathers learnt
WARM_UP_STEPS = 4
TOLERANCE = 1e-4  # relative, between the losses of variants
Step = Callable[[], torch.Tensor]  # trains one step
Run = Callable[..., torch.Tensor]  # the model, or its graphs
# how a model is sharded, and the settings of that
Variant = tuple[Callable[..., Run], dict[str, Any]]


def fsdp2(model: Transformer, mesh: DeviceMesh, device: torch.device, *, backend: str) -> Run:
    """As its documentation has it: fully_shard on every block and on the root, whose weights stay
    gathered; blocks and the loss compiled.
    """
    if backend:
        assert model.output is not None
        assert model.output.loss is not None
        trust_vector_instructions()
        loss = torch.compile(model.output.loss, backend=backend, fullgraph=True, dynamic=False)
        model.output.loss = loss
    for layer in model.layers.values():
        if backend:
            layer.compile(backend=backend)
        fully_shard(layer, mesh=mesh["dp_shard"])
    fully_shard(model, mesh=mesh["dp_shard"])
    model.to_empty(device=device)
    return model


def simple_fsdp(
    model: Transformer,
    mesh: DeviceMesh,
    device: torch.device,
    *,
    backend: str,
    reshard: bool,
    bucketing: str = "none",
) -> Run:
    """backend: "" is eager."""
    options = FSDPOptions(keep_gathered=Parallelism().fsdp_keep_gathered if reshard else None)
    sharding = apply_simple_fsdp(model, parameter_mesh(mesh), options)
    run: Run = model
    if backend:
        config = Compile(enable=True, backend=backend, bucketing=bucketing)
        machine = find_machine("", device)
        settings = PassSettings(
            config, machine, fused=backend == "inductor", ranks=stage_ranks(mesh)
        )
        graph_passes = GraphPasses(settings, choose_passes(Config(compile=config)))
        run = compile_model(TraceableModel(model, sharding, model.layers), graph_passes)
    materialize(model, device)
    return run


def _inductor(bucketing: str, *, reshard: bool) -> Variant:
    return simple_fsdp, dict(backend="inductor", reshard=reshard, bucketing=bucketing)


VARIANTS: dict[str, Variant] = {
    "fsdp2-eager": (fsdp2, dict(backend="")),
    "fsdp2-compiled": (fsdp2, dict(backend="inductor")),
    "simple-eager-reshard": (simple_fsdp, dict(backend="", reshard=True)),
    "simple-eager-keep": (simple_fsdp, dict(backend="", reshard=False)),
    "simple-none-reshard": _inductor("none", reshard=True),
    "simple-block-reshard": _inductor("block", reshard=True),
    "simple-block-keep": _inductor("block", reshard=False),
    "simple-auto-reshard": _inductor("auto", reshard=True),
    "simple-greedy-reshard": _inductor("greedy", reshard=True),
    "simple-greedy-keep": _inductor("greedy", reshard=False),
}


def build_step(
    variant: Variant, config: ModelConfig, batch_size: int, device: torch.device
) -> Step:
    """The model, sharded, and its batch; a step returns this rank's part of the loss."""
    world_size = dist.get_world_size()
    mesh = build_mesh(resolve_degrees(Parallelism(), world_size), device.type)
    with torch.device("meta"):
        model = Transformer(replace(config, max_seq_len=SEQ_LEN))
    shard, settings = variant
    assert model.output is not None
    model.output.loss = Loss(VocabularyShard(config.vocab_size))
    run = shard(model, mesh, device, **settings)
    model.init_weights(0, shard_of)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(config.vocab_size, (batch_size, SEQ_LEN + 1), generator=generator).to(
        device
    )
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    scale = (
        world_size if shard is fsdp2 else 1
    )  # SimpleFSDP sums gradients over ranks, FSDP2 averages them

    def step() -> torch.Tensor:
        loss = run(inputs, labels=labels).sum() / (labels.numel() * world_size)
        (loss * scale).backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def peak_memory(step: Step, device: torch.device) -> int:
    """Bytes that live tensors take at the peak of one step."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        step()
    events, peak = list(profiler.profiler.kineto_results.experimental_event_tree()), 0
    while events:
        event = events.pop()
        events += event.children
        peak = max(peak, getattr(event.extra_fields, "total_allocated", 0))
    return peak


def join_world(rank: int, world_size: int, store: str) -> torch.device:
    """This process is a rank of a new world now, on this device."""
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if torch.cuda.device_count() >= world_size:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=world_size
    )
    return device


def rank_main(
    pipe: Connection,
    rank: int,
    world_size: int,
    store: str,
    variant: Variant,
    shape: tuple[ModelConfig, int],
) -> None:
    """Sends its `peak_memory` after a warm-up; then for every number of steps it receives, (the
    seconds they took, the last loss).
    """
    # The allocator's own switch, before the first tensor: else the profiler misses what gloo's
    # threads release.
    count_all = ctypes.c_bool.in_dll(
        ctypes.CDLL(torch._C.__file__), "FLAGS_caffe2_report_cpu_memory_usage"
    )
    count_all.value = True
    device = join_world(rank, world_size, store)
    step = build_step(variant, *shape, device)
    for _ in range(WARM_UP_STEPS):
        step().item()
    gc.collect()
    pipe.send(peak_memory(step, device))
    count_all.value = False  # it costs a lock for every tensor
    while steps := pipe.recv():
        gc.collect()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            loss = step()
        dist.all_reduce(loss)
        value = loss.item()  # which waits for the device, and for the slowest rank
        pipe.send((time.perf_counter() - start, value))
    dist.destroy_process_group()


@dataclass(frozen=True)
class World:
    """Processes, and a pipe to each; if one of them dies, receiving is an EOFError."""

    processes: list[BaseProcess]
    pipes: list[Connection]

    def receive(self) -> list[Any]:
        """Return the next message of each rank."""
        return [pipe.recv() for pipe in self.pipes]

    def send(self, message: Any) -> None:
        for pipe in self.pipes:
            pipe.send(message)

    def end(self) -> None:
        self.send(0)
        for process in self.processes:
            process.join()


def start_world(main: Callable[..., None], world_size: int, store: Path, *arguments: Any) -> World:
    """Fresh processes that run `main(pipe, rank, world_size, store, *arguments)`."""
    context, world = mp.get_context("spawn"), World([], [])
    # the profiler announces itself on stderr
    with mock.patch.dict(os.environ, {"KINETO_LOG_LEVEL": "99", **os.environ}):
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=main, args=(theirs, rank, world_size, str(store), *arguments), daemon=True
            )
            process.start()
            theirs.close()
            world.processes.append(process)
            world.pipes.append(ours)
    return world


def run_in_turn(worlds: Mapping[str, World], rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds of a step, of each variant in each round; the worlds are ended.

    Ends the program where losses differ.
    """
    seconds: dict[str, list[float]] = {variant: [] for variant in worlds}
    for number in range(rounds):
        losses = {}
        for variant, world in worlds.items():
            world.send(steps)
            taken, losses[variant] = max(world.receive())
            seconds[variant].append(taken / steps)
        done = WARM_UP_STEPS + 1 + (number + 1) * steps
        print(
            f"loss after {done} steps: "
            + ", ".join(f"{v} {loss:.6f}" for v, loss in losses.items()),
            flush=True,
        )
        expected = next(iter(losses.values()), 0.0)
        if not all(abs(loss - expected) <= TOLERANCE * abs(expected) for loss in losses.values()):
            raise SystemExit(
                f"the losses differ by more than a relative {TOLERANCE}: the variants do not"
                " compute the same"
            )
    for world in worlds.values():
        world.end()
    return seconds


def spread(values: Sequence[float]) -> str:
    """The range as a percentage of the median."""
    return f"{(max(values) - min(values)) / statistics.median(values):.0%}"


def benchmark(
    variants: list[str], config: ModelConfig, batch_size: int, arguments: argparse.Namespace
) -> str:
    """The table, in Markdown."""
    with tempfile.TemporaryDirectory() as folder:
        worlds: dict[str, World] = {}
        peaks: dict[str, int] = {}
        for variant in variants:
            start = time.perf_counter()
            settings = VARIANTS[variant], (config, batch_size)
            worlds[variant] = start_world(
                rank_main, arguments.world_size, Path(folder) / variant, *settings
            )
            peaks[variant] = max(worlds[variant].receive())
            print(
                f"{variant}: built and warm after {time.perf_counter() - start:.0f} s", flush=True
            )
        seconds = run_in_turn(worlds, arguments.rounds, arguments.steps)

    lines = [
        "| variant | tokens/s | spread | relative | peak MiB per rank | relative |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    tokens = arguments.world_size * batch_size * SEQ_LEN
    rates = {variant: [tokens / each for each in seconds[variant]] for variant in variants}
    medians = {variant: statistics.median(rates[variant]) for variant in variants}
    for variant, rate in medians.items():
        speed = f"{rate:,.0f} | {spread(rates[variant])} | {rate / medians[variants[0]]:.2f}"
        memory = f"{peaks[variant] / 2**20:,.1f} | {peaks[variant] / peaks[variants[0]]:.2f}"
        lines.append(f"| {variant} | {speed} | {memory} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--batch-size", type=int, help="sequences a rank; default: 4 for debug, 1 for larger"
    )
    parser.add_argument("--steps", type=int, default=5, help="in one round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=VARIANTS,
        default=list(VARIANTS),
        help="the first is the base of ratios",
    )
    parser.add_argument(
        "--no-compile", action="store_true", help="leave out the variants that are compiled"
    )
    arguments = parser.parse_args()
    variants = [
        v for v in arguments.variants if not (arguments.no_compile and VARIANTS[v][1]["backend"])
    ]
    if not variants:
        parser.error("--no-compile leaves no variant to run")

    where = "CPU, gloo, one thread a rank"
    if torch.cuda.device_count() >= arguments.world_size:
        where = "CUDA, NCCL"
    for name in arguments.models:
        config, batch_size = MODELS[name]
        batch_size = arguments.batch_size or batch_size
        table = benchmark(variants, config, batch_size, arguments)
        print(
            f"\n{name}: {arguments.world_size} ranks ({where}), each {batch_size} x {SEQ_LEN}"
            f" tokens a step; torch {torch.__version__}, {arguments.rounds} rounds of"
            f" {arguments.steps} steps\n\n{table}\n",
            flush=True,
        )


if __name__ == "__main__":
    main()
