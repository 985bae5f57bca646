"""Find the profile of a run's machine, or measure its CPU.

machine = find_machine("", device)      # measures a CPU, in half a second
"""

import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titan_lite.collectives import all_gather_single
from titan_lite.cost.machine import GB, GIB, MICROSECOND, Link, Machine
from titan_lite.cost.profiles import load_machine, profile_of
from titan_lite.environment import usable_cores

# Bytes per rank in the measured collectives, for a linear fit.
SMALL = 2**12
LARGE = 2**21
COPIED = 2**24  # bytes, more than the caches of a core
MATMUL_SIZE = 1024  # rows and columns of the measured matmul


class CollectiveTimes(NamedTuple):
    """Seconds of a collective, at SMALL and at LARGE bytes per rank."""

    small: float
    large: float


class RingSpeed(NamedTuple):
    latency: float  # seconds of a hop
    bandwidth: float  # bytes per second of a rank


def peak_flops(
    configured: Machine | None, device: torch.device, dtype: torch.dtype
) -> float | None:
    """Return the peak FLOP/s of dense matmuls of one device, by its datasheet, else by the
    recipe's machine, or None.

    A CPU's peak is not measured, since other work on it would change the result.
    """
    known = profile_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    machine = known or configured
    return None if machine is None else machine.flops(dtype)


def find_machine(name: str, device: torch.device) -> Machine | None:
    """Return the machine that a recipe names, else that of this rank; None for an unknown GPU.

    A CPU is measured in half a second. This is a collective, and all ranks get the same machine.
    """
    if name:
        return load_machine(name)
    if device.type == "cuda":
        return profile_of(torch.cuda.get_device_name(device))
    return measure_cpu(device)


def measure_cpu(device: torch.device) -> Machine:
    """Return the machine of this process's CPU, as the first rank measures it. A collective."""
    copy = _copy_bandwidth(device)
    ring = RingSpeed(latency=1e-6, bandwidth=GB)
    if dist.is_initialized() and dist.get_world_size() > 1:
        ring = fit_ring(times_of(all_gather_single, device, rounds=1, best_of=5))
    measured = torch.tensor(
        [
            _cpu_flops(torch.float32) / 1e12,
            _cpu_flops(torch.bfloat16) / 1e12,
            copy / GB,
            ring.bandwidth / GB,
            ring.latency / MICROSECOND,
        ],
        dtype=torch.float64,
    )
    if dist.is_initialized():
        dist.broadcast(measured, src=0)
    # Rounded to one digit, so that another run on this machine gets the same schedule, and finds
    # its code in Inductor's cache.
    float32, bfloat16, memory_bandwidth, bandwidth, latency = (
        float(f"{value:.0e}") for value in measured.tolist()
    )
    return Machine(
        name="CPU, measured",
        tflops={"float32": float32, "bfloat16": bfloat16},
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB,
        memory_bandwidth=memory_bandwidth,
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


def _copy_bandwidth(device: torch.device) -> float:
    """Return the bytes per second that the fastest of several copies reads and writes."""
    source = torch.empty(COPIED, dtype=torch.uint8)
    target = torch.empty(COPIED, dtype=torch.uint8)
    seconds = seconds_of(lambda: target.copy_(source), device, for_seconds=0.05, reduce=min)
    return 2 * source.nbytes / seconds


def _cpu_flops(dtype: torch.dtype) -> float:
    """Return the FLOP/s of the fastest of several matmuls, with this process's threads."""
    a, b = torch.randn(2, MATMUL_SIZE, MATMUL_SIZE, dtype=dtype)
    cpu = torch.device("cpu")
    return 2 * MATMUL_SIZE**3 / seconds_of(lambda: a @ b, cpu, for_seconds=0.2, reduce=min)


def fit_ring(gather: CollectiveTimes) -> RingSpeed:
    """Fit latency and bandwidth to all-gathers. A launch counts as one more hop."""
    ranks = dist.get_world_size()
    longer = max(gather.large - gather.small, 1e-7)
    return RingSpeed(latency=gather.small / ranks, bandwidth=(ranks - 1) * (LARGE - SMALL) / longer)


def times_of(
    collective: Callable[[Tensor, Tensor], Any],
    device: torch.device,
    rounds: int = 15,
    best_of: int = 1,
) -> CollectiveTimes:
    """Return the seconds of a collective: the slowest rank's mean over `rounds`, and the best of
    `best_of` such means.

    collective: takes (unsharded tensor, shard).
    """

    def mean_seconds(full: Tensor, shard: Tensor) -> float:
        collective(full, shard)
        synchronize(device)
        start = time.perf_counter()
        for _ in range(rounds):
            collective(full, shard)
        synchronize(device)
        seconds = (time.perf_counter() - start) / rounds
        mean = torch.tensor(seconds, dtype=torch.float64, device=device)
        dist.all_reduce(mean, dist.ReduceOp.MAX)
        return float(mean)

    def best_mean(nbytes: int) -> float:
        shard = torch.zeros(nbytes // 4, device=device)
        full = torch.zeros(dist.get_world_size() * nbytes // 4, device=device)
        return min(mean_seconds(full, shard) for _ in range(best_of))

    return CollectiveTimes(best_mean(SMALL), best_mean(LARGE))


def seconds_of(
    work: Callable[[], Any],
    device: torch.device,
    for_seconds: float,
    reduce: Callable[[list[float]], float] = statistics.fmean,
) -> float:
    """Return the seconds of one call, by default the mean of all calls in `for_seconds`, which
    includes disturbances like a step.
    """
    work()
    synchronize(device)
    times: list[float] = []
    end = time.perf_counter() + for_seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return reduce(times)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
