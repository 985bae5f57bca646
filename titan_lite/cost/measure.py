"""Find the profile of a run's machine, or measure its CPU.

machine = find_machine("", device)                     # measures a CPU, in half a second
"""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_lite.cost.collectives import all_gather_single
from titan_lite.cost.machine import GB, GIB, Link, Machine
from titan_lite.cost.profiles import load_machine, profile_of
from titan_lite.environment import usable_cores

SMALL, LARGE = 2**12, 2**21  # bytes per rank in the measured collectives, for a linear fit


def peak_flops(
    configured: Machine | None, device: torch.device, dtype: torch.dtype
) -> float | None:
    """Return the peak FLOP/s of dense matrix products of one device, by its datasheet, else by the
    recipe's machine, or None.

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
        2 * source.nbytes / seconds_of(lambda: target.copy_(source), device, 0.05, min)
    )  # bytes per second, read and written
    link = {"latency": 1e-6, "bandwidth": GB}
    if dist.is_initialized() and dist.get_world_size() > 1:
        link = fit_link(times_of(all_gather_single, device, rounds=1, best_of=5))
    measured = [_cpu_flops(torch.float32) / 1e12, _cpu_flops(torch.bfloat16) / 1e12, copy / GB]
    figures = torch.tensor(
        [*measured, link["bandwidth"] / GB, 1e6 * link["latency"]], dtype=torch.float64
    )
    if dist.is_initialized():
        dist.broadcast(figures, src=0)
    # Rounded to one digit, so that another run on this machine gets the same schedule, and finds
    # its code in Inductor's cache.
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
        # FlashAttention for CPU on one core, at head dimensions of 16 to 64
        attention_efficiency=0.3,
        memory_efficiency=1.0,
        link_efficiency=1.0,
        ranks_per_core=max(1.0, int(os.environ.get("LOCAL_WORLD_SIZE", "1")) / usable_cores()),
    )


def _cpu_flops(dtype: torch.dtype) -> float:
    """Return the FLOP/s of the fastest of several matrix products, with the threads of this
    process.
    """
    a, b = torch.randn(2, 1024, 1024, dtype=dtype)
    return 2 * 1024**3 / seconds_of(lambda: torch.mm(a, b), torch.device("cpu"), 0.2, min)


def fit_link(gathers: Sequence[float]) -> dict[str, float]:
    """Fit latency and bandwidth to the all-gather's seconds at SMALL and LARGE.

    A launch counts as one more hop.
    """
    ranks, (small, large) = dist.get_world_size(), gathers
    return {
        "latency": small / ranks,
        "bandwidth": (ranks - 1) * (LARGE - SMALL) / max(large - small, 1e-7),
    }


def times_of(
    collective: Callable[[Tensor, Tensor], Any],
    device: torch.device,
    rounds: int = 15,
    best_of: int = 1,
) -> list[float]:
    """Return seconds at SMALL and at LARGE: the slowest rank's mean over `rounds`, and the best of
    `best_of` such means.
    """

    def mean_seconds(full: Tensor, shard: Tensor) -> float:
        collective(full, shard)
        synchronize(device)
        start = time.perf_counter()
        for _ in range(rounds):
            collective(full, shard)
        synchronize(device)
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


def seconds_of(
    work: Callable[[], Any],
    device: torch.device,
    seconds: float,
    reduce: Callable[[list[float]], float] = statistics.fmean,
) -> float:
    """Return the seconds of one call, by default the mean of all calls in `seconds`, which includes
    disturbances like a step.
    """
    work()
    synchronize(device)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return reduce(times)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
