"""Set up this rank's device and process group, gather objects over ranks, and recognize errors of communication."""

import datetime
import math
import os
from typing import TypeVar

import torch
import torch.distributed as dist

from titan_lite.config import Debug

T = TypeVar("T")


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the values of all ranks of the group (None: all ranks), by rank; without a process group only this rank's."""
    if not dist.is_initialized():
        return [value]
    everyone = [value] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group)
    return everyone


def is_communication(error: BaseException | None) -> bool:
    """Return True if the error or its cause is a failed communication with another rank."""
    if error is None:
        return False
    gloo = type(error) is RuntimeError and "gloo" in str(error)  # gloo has no class of errors
    return gloo or isinstance(error, dist.DistError) or is_communication(error.__cause__)


def init_device(debug: Debug, float32_matmul_precision: str = "highest") -> torch.device:
    """Return this rank's GPU, or the CPU with a fair share of its cores, after setting seed, determinism and precision."""
    torch.set_float32_matmul_precision(float32_matmul_precision)
    torch.manual_seed(debug.seed)
    if debug.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # True would write every new tensor twice.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        return device
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // int(os.environ["LOCAL_WORLD_SIZE"])))
    return torch.device("cpu")


def device_memory() -> float:
    """Return the bytes of this rank's GPU; infinite on a CPU, see `host_memory`."""
    if not torch.cuda.is_available():
        return math.inf
    return torch.cuda.get_device_properties(int(os.environ.get("LOCAL_RANK", "0"))).total_memory


def host_memory() -> float:
    """Return the bytes of this machine's memory per rank on it."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def init_process_group(device: torch.device, seconds: float, *, connect: bool) -> None:
    """Make the process group, with NCCL for GPUs, else gloo. seconds: limit of a collective. connect: connect NCCL at once."""
    cuda = device.type == "cuda"
    timeout = datetime.timedelta(seconds=seconds)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timeout, device_id=device if cuda and connect else None)
