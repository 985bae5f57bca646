"""The machine that a run is on: the profile of its GPU, or its CPU measured; and, by all ranks together, what it reaches of it.

    machine = find_machine("", device)                     # a CPU is measured, in half a second
    reached = measure(shapes, device)                      # {"matmul": 4.1e10, ...}
    machine = calibrated(machine, reached, dtype)          # what was measured, in the profile
    Path("mine.toml").write_text(machine_to_toml(machine))         # for --hardware and compile.machine

A profile's peaks are a datasheet's and stay; what moves is how much of them is reached.
"""

import dataclasses
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from titan_lite.compiler.collectives import all_gather_single
from titan_lite.compiler.hardware import GB, GIB, Link, Machine, load_machine, profile_of
from titan_lite.config.toml import in_toml
from titan_lite.models.llama3 import ModelConfig

RECORD = "measured.json"  # in a run's folder: what the trainer writes of it
SMALL, LARGE = 2**12, 2**21  # bytes a rank in a collective; what is between lies on a line
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Shapes:
    """The work of a rank at once: sequences of `tokens` tokens, tp-th parts of a model's matrices and heads, in `dtype`."""

    model: ModelConfig
    sequences: int
    tokens: int
    tp: int
    dtype: torch.dtype


def peak_flops(stated: Machine | None, device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOP/s of dense matrix products of one device, by its datasheet, else of the machine that the recipe states; None: neither.

    That of a CPU would have to be measured, beside whatever else it does at that moment.
    """
    known = profile_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    machine = known or stated
    return None if machine is None else machine.flops(dtype)


def find_machine(name: str, device: torch.device) -> Machine | None:
    """The one that a recipe names, else this rank's own: None for a GPU that is not known.

    A CPU is measured (half a second), by all ranks together, who then have the same figures.
    """
    if name:
        return load_machine(name)
    if device.type == "cuda":
        return profile_of(torch.cuda.get_device_name(device))
    source, target = (torch.empty(2**24, dtype=torch.uint8) for _ in range(2))
    copy = 2 * source.nbytes / _time(lambda: target.copy_(source), device, 0.05, min)  # bytes a second, read and written
    link = {"latency": 1e-6, "bandwidth": GB}
    if dist.is_initialized() and dist.get_world_size() > 1:
        link = _line(_times_of(all_gather_single, device, rounds=1, best_of=5))
    measured = [_cpu_flops(torch.float32) / 1e12, _cpu_flops(torch.bfloat16) / 1e12, copy / GB]
    figures = torch.tensor([*measured, link["bandwidth"] / GB, 1e6 * link["latency"]], dtype=torch.float64)
    if dist.is_initialized():
        dist.broadcast(figures, src=0)
    # Of one digit: another run on this machine finds the same schedule, and its code in Inductor's cache.
    float32, bfloat16, copy, bandwidth, latency = (float(f"{figure:.0e}") for figure in figures.tolist())
    return Machine(
        name="CPU, measured",
        tflops={"float32": float32, "bfloat16": bfloat16},
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB,
        memory_bandwidth=copy,
        intra_node=Link(bandwidth, latency),
        inter_node=Link(bandwidth, latency),
        launch=5.0,
        collective_launch=latency,
        coalesced_latency=1.0,  # distributed/gloo.py
        matmul_efficiency=1.0,  # measured, and not promised
        attention_efficiency=0.3,  # FlashAttention for CPU on one core, at head dimensions of 16 to 64
        memory_efficiency=1.0,
        link_efficiency=1.0,
    )


def _cpu_flops(dtype: torch.dtype) -> float:
    """The best of several matrix products with the threads that this process has."""
    a, b = torch.randn(2, 1024, 1024, dtype=dtype)
    return 2 * 1024**3 / _time(lambda: torch.mm(a, b), torch.device("cpu"), 0.2, min)


def measure(shapes: Shapes, device: torch.device, seconds: float = 0.15) -> dict[str, float]:
    """All ranks together, in about ten times as many seconds; the slowest rank counts.

    matmul, attention        FLOP/s, forward and backward
    memory                   bytes a second, read and written by a pointwise operator
    launch                   seconds of an operator with nothing to do
    latency, bandwidth       of an all-gather over all ranks, as of a ring: seconds a hop, bytes a second and rank
    reduction                how many times as long a reduce-scatter takes
    """
    model, tp, dtype = shapes.model, shapes.tp, shapes.dtype
    rows, hidden, head = shapes.sequences * shapes.tokens, model.hidden_dim // tp, model.head_dim

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device=device)

    x, w, gradient = random(rows, model.dim), random(hidden, model.dim), random(rows, hidden)
    products = _time(lambda: (x @ w.T, gradient @ w, gradient.T @ x), device, seconds)
    q = random(shapes.sequences, max(1, model.n_heads // tp), shapes.tokens, head).requires_grad_()
    k, v = (random(shapes.sequences, max(1, model.n_kv_heads // tp), shapes.tokens, head).requires_grad_() for _ in range(2))
    upstream = torch.ones_like(q)

    def attend() -> None:
        torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), (q, k, v), upstream)

    attention = _time(attend, device, seconds)
    pointwise = _time(lambda: F.silu(gradient) * gradient, device, seconds)
    one = torch.ones(1, dtype=dtype, device=device)
    found = {
        "matmul": 3 * 2 * rows * model.dim * hidden / products,
        "attention": 7 * 2 * q.numel() * shapes.tokens / 2 / attention,  # two products forward and five backward, half of each
        "memory": 5 * gradient.nbytes / pointwise,
        "launch": -_time(lambda: [one + one for _ in range(100)], device, seconds / 5) / 100,  # of which the largest counts
    }
    figures = torch.tensor(list(found.values()), dtype=torch.float64, device=device)
    if dist.get_world_size() > 1:
        dist.all_reduce(figures, dist.ReduceOp.MIN)
    found = dict(zip(found, figures.tolist(), strict=True))
    found["launch"] *= -1
    if dist.get_world_size() == 1:
        return found
    gathers = _times_of(all_gather_single, device)
    reduces = _times_of(lambda whole, part: reduce_scatter_single(part, whole), device)
    return found | _line(gathers) | {"reduction": sum(reduces) / sum(gathers)}


def _line(gathers: Sequence[float]) -> dict[str, float]:
    """A launch, which takes as long as a hop, and as many hops as there are other ranks; and bytes a second."""
    ranks, (small, large) = dist.get_world_size(), gathers
    return {"latency": small / ranks, "bandwidth": (ranks - 1) * (LARGE - SMALL) / max(large - small, 1e-7)}


def _times_of(
    collective: Callable[[Tensor, Tensor], Any], device: torch.device, rounds: int = 15, best_of: int = 1
) -> list[float]:
    """Seconds at SMALL and at LARGE: the slowest rank's mean over `rounds`, and the best of so many of these."""

    def together(whole: Tensor, part: Tensor) -> float:
        collective(whole, part)
        _synchronize(device)
        start = time.perf_counter()
        for _ in range(rounds):
            collective(whole, part)
        _synchronize(device)
        mean = torch.tensor((time.perf_counter() - start) / rounds, dtype=torch.float64, device=device)
        dist.all_reduce(mean, dist.ReduceOp.MAX)
        return float(mean)

    counts = (dist.get_world_size(), 1)
    pairs = [[torch.zeros(count * size // 4, device=device) for count in counts] for size in (SMALL, LARGE)]
    return [min(together(*pair) for _ in range(best_of)) for pair in pairs]


def _time(
    work: Callable[[], Any], device: torch.device, seconds: float, of: Callable[[list[float]], float] = statistics.fmean
) -> float:
    """Seconds of one call, of as many as fit: the mean is what a step sees, others beside it included."""
    work()
    _synchronize(device)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        _synchronize(device)
        times.append(time.perf_counter() - start)
    return of(times)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def calibrated(machine: Machine, reached: Mapping[str, float], dtype: torch.dtype, nodes: int = 1) -> Machine:
    """The machine that reaches what was measured in `dtype`. nodes: over which the ranks were.

    A CPU has no datasheet: its peaks are what was measured, too.
    """
    if machine.name.startswith("CPU"):
        machine = dataclasses.replace(
            machine,
            tflops={**machine.tflops, str(dtype).removeprefix("torch."): reached["matmul"] / 1e12},
            memory_bandwidth=reached["memory"] / GB,
        )
    peaks = {"matmul": machine.flops(dtype), "attention": machine.flops(dtype), "memory": machine.memory_bandwidth * GB}
    found: dict[str, Any] = {f"{name}_efficiency": min(1.0, reached[name] / peak) for name, peak in peaks.items()}
    found["launch"] = 1e6 * reached["launch"]
    if "bandwidth" in reached:
        bandwidth, latency = reached["bandwidth"] / GB, 1e6 * reached["latency"]
        found["reduction"] = reached["reduction"]
        if machine.name.startswith("CPU"):
            found["intra_node"] = found["inter_node"] = Link(bandwidth / machine.link_efficiency, latency)
            found["collective_launch"] = latency
        else:  # of a ring across nodes, which has every card of a node
            cards = machine.ranks_per_node * machine.inter_node.bandwidth if nodes > 1 else math.inf
            found["link_efficiency"] = min(1.0, bandwidth / min(cards, machine.intra_node.bandwidth))
    return dataclasses.replace(machine, **found)


def machine_to_toml(machine: Machine) -> str:
    """A file that load_machine reads."""
    return (
        "\n".join([f"name = {in_toml(machine.name)}", *(f"{key} = {value!r}" for key, value in numbers_of(machine).items())])
        + "\n"
    )


def numbers_of(machine: Machine) -> dict[str, float]:
    """Each number by the name of its field: {"memory": 80, "tflops.bfloat16": 989.4, "intra_node.latency": 1.9, ...}."""
    found: dict[str, float] = {}
    for name, value in dataclasses.asdict(machine).items():
        if isinstance(value, dict):
            found |= {f"{name}.{key}": number for key, number in value.items()}
        elif name != "name":
            found[name] = value
    return found


def against(planned: float, measured: float) -> str:
    """Both, in GiB."""
    return f"planned {planned / GIB:.2f} GiB, measured {measured / GIB:.2f}"
