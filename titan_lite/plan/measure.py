"""Find the profile of a run's machine, or measure its CPU, and measure what the ranks reach of the profile.

    machine = find_machine("", device)                     # measures a CPU, in half a second
    reached = measure(shapes, device)                      # {"matmul": 4.1e10, ...}
    machine = calibrated(machine, reached, dtype)          # the profile with the measurements
    Path("mine.toml").write_text(machine_to_toml(machine))         # for --hardware and compile.machine

A profile's peaks come from a datasheet and do not change; only the efficiencies do.
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
from titan_lite.compiler.hardware import GB, GIB, Link, Machine
from titan_lite.compiler.profiles import load_machine, profile_of
from titan_lite.config.toml import in_toml
from titan_lite.models.llama3 import ModelConfig
from titan_lite.ranks import usable_cores

RECORD = "measured.json"  # in a run's folder, written by the trainer
SMALL, LARGE = 2**12, 2**21  # bytes per rank in the measured collectives, for a linear fit
CACHES = 2**26  # bytes: more than the caches of a core
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Shapes:
    """The shapes of a rank's work in one forward."""

    model: ModelConfig
    sequences: int
    tokens: int  # per sequence
    tp: int  # ranks that share the model's matrices and heads
    dtype: torch.dtype


def peak_flops(
    configured: Machine | None, device: torch.device, dtype: torch.dtype
) -> float | None:
    """Return the peak FLOP/s of dense matrix products of one device, by its datasheet, else by the recipe's machine, or None.

    A CPU's peak is not measured, since other work on it would change the result.
    """
    known = profile_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    machine = known or configured
    return None if machine is None else machine.flops(dtype)


def find_machine(name: str, device: torch.device) -> Machine | None:
    """Return the machine that a recipe names, else that of this rank; None for an unknown GPU.

    A CPU is measured in half a second. This is a collective, and all ranks get the same figures.
    """
    if name:
        return load_machine(name)
    if device.type == "cuda":
        return profile_of(torch.cuda.get_device_name(device))
    source, target = (torch.empty(2**24, dtype=torch.uint8) for _ in range(2))
    copy = (
        2 * source.nbytes / _time(lambda: target.copy_(source), device, 0.05, min)
    )  # bytes per second, read and written
    link = {"latency": 1e-6, "bandwidth": GB}
    if dist.is_initialized() and dist.get_world_size() > 1:
        link = _fit_link(_times_of(all_gather_single, device, rounds=1, best_of=5))
    measured = [_cpu_flops(torch.float32) / 1e12, _cpu_flops(torch.bfloat16) / 1e12, copy / GB]
    figures = torch.tensor(
        [*measured, link["bandwidth"] / GB, 1e6 * link["latency"]], dtype=torch.float64
    )
    if dist.is_initialized():
        dist.broadcast(figures, src=0)
    # Rounded to one digit, so that another run on this machine gets the same schedule, and finds its code in Inductor's cache.
    float32, bfloat16, copy, bandwidth, latency = (
        float(f"{figure:.0e}") for figure in figures.tolist()
    )
    return Machine(
        name="CPU, measured",
        tflops={"float32": float32, "bfloat16": bfloat16},
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB,
        memory_bandwidth=copy,
        intra_node=Link(bandwidth, latency),
        inter_node=Link(bandwidth, latency),
        launch=5.0,
        collective_launch=latency,
        matmul_efficiency=1.0,  # measured
        attention_efficiency=0.3,  # FlashAttention for CPU on one core, at head dimensions of 16 to 64
        memory_efficiency=1.0,
        link_efficiency=1.0,
        ranks_per_core=max(1.0, int(os.environ.get("LOCAL_WORLD_SIZE", "1")) / usable_cores()),
    )


def _cpu_flops(dtype: torch.dtype) -> float:
    """Return the FLOP/s of the fastest of several matrix products, with the threads of this process."""
    a, b = torch.randn(2, 1024, 1024, dtype=dtype)
    return 2 * 1024**3 / _time(lambda: torch.mm(a, b), torch.device("cpu"), 0.2, min)


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
    products = _time(lambda: (x @ w.T, gradient @ w, gradient.T @ x), device, seconds)
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

    attention = _time(attend, device, seconds)
    gradients = [gradient, *(random(rows, hidden) for _ in range(CACHES // gradient.nbytes))]
    # Results are kept, as in a step's heap. glibc returns others to the system, whose new pages would be measured instead.
    results = [[torch.empty_like(each) for each in gradients] for _ in range(2)]

    def gate() -> None:
        for each, gated, product in zip(gradients, *results, strict=True):
            torch.mul(torch.sigmoid(each, out=gated), each, out=product)

    pointwise = _time(gate, device, seconds) / len(gradients)
    one = torch.ones(1, dtype=dtype, device=device)
    found = {
        "matmul": 3 * 2 * rows * model.dim * hidden / products,
        "attention": 7
        * 2
        * q.numel()
        * shapes.tokens
        / 2
        / attention,  # two products forward, five backward, each half (causal)
        "memory": 5 * gradient.nbytes / pointwise,
        # negative: the largest counts
        "launch": -_time(
            lambda: [(one.view(1, 1) + one).view(1) for _ in range(100)], device, seconds / 5
        )
        / 100,
    }
    figures = torch.tensor(list(found.values()), dtype=torch.float64, device=device)
    if dist.get_world_size() > 1:
        dist.all_reduce(figures, dist.ReduceOp.MIN)
    found = dict(zip(found, figures.tolist(), strict=True))
    found["launch"] *= -1
    if dist.get_world_size() == 1:
        return found
    gathers = _times_of(all_gather_single, device)
    reduces = _times_of(lambda full, shard: reduce_scatter_single(shard, full), device)
    return found | _fit_link(gathers) | {"reduction": sum(reduces) / sum(gathers)}


def _fit_link(gathers: Sequence[float]) -> dict[str, float]:
    """Fit latency and bandwidth to the all-gather's seconds at SMALL and LARGE. A launch counts as one more hop."""
    ranks, (small, large) = dist.get_world_size(), gathers
    return {
        "latency": small / ranks,
        "bandwidth": (ranks - 1) * (LARGE - SMALL) / max(large - small, 1e-7),
    }


def _times_of(
    collective: Callable[[Tensor, Tensor], Any],
    device: torch.device,
    rounds: int = 15,
    best_of: int = 1,
) -> list[float]:
    """Return seconds at SMALL and at LARGE: the slowest rank's mean over `rounds`, and the best of `best_of` such means."""

    def mean_seconds(full: Tensor, shard: Tensor) -> float:
        collective(full, shard)
        _synchronize(device)
        start = time.perf_counter()
        for _ in range(rounds):
            collective(full, shard)
        _synchronize(device)
        mean = torch.tensor(
            (time.perf_counter() - start) / rounds, dtype=torch.float64, device=device
        )
        dist.all_reduce(mean, dist.ReduceOp.MAX)
        return float(mean)

    counts = (dist.get_world_size(), 1)
    pairs = [
        [torch.zeros(count * size // 4, device=device) for count in counts]
        for size in (SMALL, LARGE)
    ]
    return [min(mean_seconds(*pair) for _ in range(best_of)) for pair in pairs]


def _time(
    work: Callable[[], Any],
    device: torch.device,
    seconds: float,
    reduce: Callable[[list[float]], float] = statistics.fmean,
) -> float:
    """Return the seconds of one call, by default the mean of all calls in `seconds`, which includes disturbances like a step."""
    work()
    _synchronize(device)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        _synchronize(device)
        times.append(time.perf_counter() - start)
    return reduce(times)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def calibrated(
    machine: Machine, reached: Mapping[str, float], dtype: torch.dtype, nodes: int = 1
) -> Machine:
    """Return the machine with the measured efficiencies in `dtype`. nodes: number of nodes of the run.

    A CPU has no datasheet: its peaks are measured, too.
    """
    if machine.is_cpu:
        machine = dataclasses.replace(
            machine,
            tflops={**machine.tflops, str(dtype).removeprefix("torch."): reached["matmul"] / 1e12},
            memory_bandwidth=reached["memory"] / GB,
        )
    peaks = {
        "matmul": machine.flops(dtype),
        "attention": machine.flops(dtype),
        "memory": machine.memory_bandwidth * GB,
    }
    found: dict[str, Any] = {
        f"{name}_efficiency": min(1.0, reached[name] / peak) for name, peak in peaks.items()
    }
    found |= {
        "launch": 1e6 * reached["launch"],
        "multiprocessors": 0,
        "like": "",
    }  # products were measured in their shapes
    if "bandwidth" in reached:
        bandwidth, latency = reached["bandwidth"] / GB, 1e6 * reached["latency"]
        found["reduction"] = reached["reduction"]
        if machine.is_cpu:
            found["intra_node"] = found["inter_node"] = Link(
                bandwidth / machine.link_efficiency, latency
            )
            found["collective_launch"] = latency
        else:  # a ring across nodes uses all network cards of a node
            cards = machine.ranks_per_node * machine.inter_node.bandwidth if nodes > 1 else math.inf
            found["link_efficiency"] = min(
                1.0, bandwidth / min(cards, machine.intra_node.bandwidth)
            )
    return dataclasses.replace(machine, **found)


def machine_to_toml(machine: Machine) -> str:
    """Return a TOML file that load_machine reads."""
    lines = [
        f"name = {in_toml(machine.name)}",
        *(f"{key} = {value!r}" for key, value in numbers_of(machine).items()),
    ]
    return "\n".join(lines) + "\n"


def numbers_of(machine: Machine) -> dict[str, float]:
    """Return the numbers by field, without zeros: {"memory": 80, "tflops.bfloat16": 989.4, "intra_node.latency": 1.9, ...}."""
    found: dict[str, float] = {}
    for name, value in dataclasses.asdict(machine).items():
        if isinstance(value, dict):
            found |= {f"{name}.{key}": number for key, number in value.items()}
        elif value and name not in ("name", "like"):
            found[name] = value
    return found


def against(planned: float, measured: float) -> str:
    """Return planned and measured bytes in words, in GiB."""
    return f"planned {planned / GIB:.2f} GiB, measured {measured / GIB:.2f}"
