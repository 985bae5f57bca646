"""SimpleFSDP against PyTorch's FSDP2: tokens a second and peak memory of the same training step, in fp32.

    python scripts/benchmark_fsdp.py                                # all variants; compiling takes minutes
    python scripts/benchmark_fsdp.py --models debug --no-compile    # the eager ones only

A variant is a world of its own: --world-size fresh processes, on CPU over gloo with one thread each, or on a GPU each over NCCL
where there are enough. A step is forward, backward, fused AdamW and zero_grad on random tokens, the same for all variants.

Speed: the worlds stay alive and run --steps steps in turn (A B C A B C ...) in --rounds rounds, so that a noisy machine hits all
alike; who waits blocks on a pipe. The table has the median over the rounds, the range of the rounds as a percentage of it, and
the ratio of medians to that of the first variant.

Memory: the most bytes that tensors of a rank take at once during a step in a steady state, parameters and optimizer state
included, as the allocator counts them, in compiled code too. Not in it are buffers inside of gloo and NCCL.

Losses are compared after every round; where variants differ by more than a relative 1e-4, there is no table.
"""

import argparse
import ctypes
import gc
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from titan_lite.compiler.stage import compile_model
from titan_lite.config import Compile, Parallelism
from titan_lite.distributed.mesh import build_mesh, parameter_mesh, resolve_degrees
from titan_lite.distributed.simple_fsdp import apply_simple_fsdp, materialize, shard_of
from titan_lite.loss import cross_entropy_sum
from titan_lite.models.llama3 import FLAVORS, ModelConfig, Transformer

SEQ_LEN = 512
MODELS = {  # name: (shape, sequences a rank)
    "debug": (FLAVORS["debug"], 4),
    "larger": (ModelConfig(dim=512, n_layers=8, n_heads=8, n_kv_heads=4, hidden_dim=1536, vocab_size=32_000), 1),
}
WARM_UP_STEPS = 4  # in which code is compiled, optimizer state made, and the order of gathers learnt
TOLERANCE = 1e-4  # relative, between the losses of variants
Step = Callable[[], torch.Tensor]  # trains one step


def fsdp2(model: Transformer, mesh: DeviceMesh, device: torch.device, *, compiled: bool) -> None:
    """As its documentation has it: fully_shard on every block and on the root, whose weights stay gathered; blocks compiled."""
    for layer in model.layers.values():
        if compiled:
            layer.compile()
        fully_shard(layer, mesh=mesh["dp_shard"])
    fully_shard(model, mesh=mesh["dp_shard"])
    model.to_empty(device=device)


def simple_fsdp(
    model: Transformer, mesh: DeviceMesh, device: torch.device, *, compiled: bool, reshard: bool, bucketing: str = "none"
) -> None:
    kept = Parallelism().fsdp_keep_gathered
    apply_simple_fsdp(
        model,
        parameter_mesh(mesh),
        param_dtype=torch.float32,
        reduce_dtype=torch.float32,
        reshard_after_forward=reshard,
        keep_gathered=kept,
    )
    if compiled:
        stage = Compile(enable=True, backend="inductor", bucketing=bucketing, reordering=bucketing != "none")
        compile_model(model, stage, reshard_after_forward=reshard, keep_gathered=kept)
    materialize(model, device)


VARIANTS: dict[str, tuple[Callable[..., None], dict[str, Any]]] = {  # name: (how it is sharded, its settings)
    "fsdp2-eager": (fsdp2, dict(compiled=False)),
    "fsdp2-compiled": (fsdp2, dict(compiled=True)),
    "simple-eager-reshard": (simple_fsdp, dict(compiled=False, reshard=True)),
    "simple-eager-keep": (simple_fsdp, dict(compiled=False, reshard=False)),
    "simple-compiled": (simple_fsdp, dict(compiled=True, reshard=True)),
    "simple-block-reshard": (simple_fsdp, dict(compiled=True, reshard=True, bucketing="block")),
    "simple-block-keep": (simple_fsdp, dict(compiled=True, reshard=False, bucketing="block")),
}


def build_step(variant: str, config: ModelConfig, batch_size: int, device: torch.device) -> Step:
    """The model, sharded, and its batch; a step returns this rank's part of the loss."""
    world_size = dist.get_world_size()
    mesh = build_mesh(resolve_degrees(Parallelism(), world_size), device.type)
    with torch.device("meta"):
        model = Transformer(replace(config, max_seq_len=SEQ_LEN))
    shard, settings = VARIANTS[variant]
    shard(model, mesh, device, **settings)
    model.init_weights(0, shard_of)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(config.vocab_size, (batch_size, SEQ_LEN + 1), generator=generator).to(device)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    scale = world_size if shard is fsdp2 else 1  # SimpleFSDP sums gradients over ranks, FSDP2 averages them

    def step() -> torch.Tensor:
        loss = cross_entropy_sum(model(inputs), labels) / (labels.numel() * world_size)
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
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events, peak = list(profiler.profiler.kineto_results.experimental_event_tree()), 0
    while events:
        event = events.pop()
        events += event.children
        peak = max(peak, getattr(event.extra_fields, "total_allocated", 0))
    return peak


def rank_main(pipe: Connection, rank: int, world_size: int, store: str, variant: str, shape: tuple[ModelConfig, int]) -> None:
    """Sends its peak memory; then for every number of steps it receives, (the seconds they took, the last loss)."""
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if torch.cuda.device_count() >= world_size:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    # The allocator's own switch, before the first tensor: else the profiler misses what gloo's threads release.
    count_all = ctypes.c_bool.in_dll(ctypes.CDLL(torch._C.__file__), "FLAGS_caffe2_report_cpu_memory_usage")
    count_all.value = True
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world_size)
    step = build_step(variant, *shape, device)
    for _ in range(WARM_UP_STEPS):
        step()
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


def start_world(variant: str, shape: tuple[ModelConfig, int], world_size: int, folder: str) -> list[Connection]:
    """The pipes to the processes of one variant; if one of them dies, reading here is an EOFError."""
    context, pipes = mp.get_context("spawn"), []
    for rank in range(world_size):
        ours, theirs = context.Pipe()
        arguments = (theirs, rank, world_size, str(Path(folder) / variant), variant, shape)
        context.Process(target=rank_main, args=arguments, daemon=True).start()
        theirs.close()
        pipes.append(ours)
    return pipes


def benchmark(variants: list[str], config: ModelConfig, batch_size: int, arguments: argparse.Namespace) -> str:
    """The table, in Markdown."""
    with tempfile.TemporaryDirectory() as folder:
        worlds: dict[str, list[Connection]] = {}
        peaks: dict[str, int] = {}
        for variant in variants:
            start = time.perf_counter()
            worlds[variant] = start_world(variant, (config, batch_size), arguments.world_size, folder)
            peaks[variant] = max(pipe.recv() for pipe in worlds[variant])
            print(f"{variant}: built and warm after {time.perf_counter() - start:.0f} s", flush=True)
        rates: dict[str, list[float]] = {variant: [] for variant in variants}
        for number in range(arguments.rounds):
            losses = {}
            for variant, pipes in worlds.items():
                for pipe in pipes:
                    pipe.send(arguments.steps)
                seconds, losses[variant] = max(pipe.recv() for pipe in pipes)
                rates[variant].append(arguments.steps * arguments.world_size * batch_size * SEQ_LEN / seconds)
            done = WARM_UP_STEPS + 1 + (number + 1) * arguments.steps
            print(f"loss after {done} steps: " + ", ".join(f"{v} {loss:.6f}" for v, loss in losses.items()), flush=True)
            expected = losses[variants[0]]
            agree = all(abs(loss - expected) <= TOLERANCE * abs(expected) for loss in losses.values())
            if not agree:
                break
        for pipe in itertools.chain(*worlds.values()):
            pipe.send(0)
        for process in mp.active_children():
            process.join()
    if not agree:
        raise SystemExit(f"the losses differ by more than a relative {TOLERANCE}: the variants do not compute the same")

    lines = ["| variant | tokens/s | spread | relative | peak MiB per rank | relative |", "|---|--:|--:|--:|--:|--:|"]
    medians = {variant: statistics.median(rates[variant]) for variant in variants}
    for variant, rate in medians.items():
        speed = f"{rate:,.0f} | {(max(rates[variant]) - min(rates[variant])) / rate:.0%} | {rate / medians[variants[0]]:.2f}"
        memory = f"{peaks[variant] / 2**20:,.1f} | {peaks[variant] / peaks[variants[0]]:.2f}"
        lines.append(f"| {variant} | {speed} | {memory} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="the first is the base of ratios")
    parser.add_argument("--no-compile", action="store_true", help="leave out the variants that are compiled")
    parser.add_argument("--batch-size", type=int, help="sequences a rank; default: 4 for debug, 1 for larger")
    parser.add_argument("--steps", type=int, default=5, help="in one round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--world-size", type=int, default=2)
    arguments = parser.parse_args()
    variants = [v for v in arguments.variants if not (arguments.no_compile and VARIANTS[v][1]["compiled"])]
    if not variants:
        parser.error("--no-compile leaves no variant to run")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces itself on stderr

    for name in arguments.models:
        config, batch_size = MODELS[name]
        batch_size = arguments.batch_size or batch_size
        table = benchmark(variants, config, batch_size, arguments)
        where = "CUDA, NCCL" if torch.cuda.device_count() >= arguments.world_size else "CPU, gloo, one thread a rank"
        print(f"\n{name}: {arguments.world_size} ranks ({where}), each {batch_size} x {SEQ_LEN} tokens a step; ", end="")
        print(f"torch {torch.__version__}, {arguments.rounds} rounds of {arguments.steps} steps\n\n{table}\n", flush=True)


if __name__ == "__main__":
    main()
