"""Set up this rank's device and process group, compare values over ranks, and recognize errors of
communication.

    alike(word)                        # True if all ranks have the same string: 16 bytes a rank
    first_word(error)                  # "" or the error of the lowest rank that has one
    gather_on_first(files)             # objects of all ranks, on the first one
    gather_objects(error)              # objects of all ranks on all: for the details of an error

What a rank sends and receives does not grow with the number of ranks, except on the first rank in
`gather_on_first`, and on all in `gather_objects`, which is therefore not for what happens in every
run. The functions are collectives; without a process group they return the values of this rank
alone.
"""

import datetime
import hashlib
import math
import os
import pickle
from typing import TypeVar

import torch
import torch.distributed as dist

from titan_lite.config import Debug
from titan_lite.environment import usable_cores

T = TypeVar("T")


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the values of all ranks of the group (None: all ranks), by rank, on all of them."""
    if not dist.is_initialized():
        return [value]
    everyone = [value] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group)
    return everyone


def gather_numbers(*numbers: int) -> list[list[int]]:
    """Return the whole numbers of all ranks, by rank, on all of them: 8 bytes each."""
    own = torch.tensor(numbers, dtype=torch.int64, device=_device(None))
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    return torch.stack(everyone).tolist()


def reduce_numbers(
    *numbers: int, group: dist.ProcessGroup | None = None, total: bool = False
) -> list[int]:
    """Return the maximum over the ranks of each whole number, or with `total` the sum."""
    if not dist.is_initialized():
        return list(numbers)
    reduced = torch.tensor(numbers, dtype=torch.int64, device=_device(group))
    dist.all_reduce(reduced, dist.ReduceOp.SUM if total else dist.ReduceOp.MAX, group)
    return reduced.tolist()


def alike(word: str, group: dist.ProcessGroup | None = None) -> bool:
    """Return True if the string is the same on all ranks, judged by 64 bits of its SHA-256."""
    own = hash_of(word.encode())
    most, least = reduce_numbers(own, ~own, group=group)  # max(~x) is ~min(x), without overflow
    return most == ~least


def hash_of(content: bytes) -> int:
    """Return 64 bits of a SHA-256 as a number that an int64 can hold."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big", signed=True)


def first_word(word: str, group: dist.ProcessGroup | None = None) -> str:
    """Return the string of the lowest rank whose string is not empty, or "" if all are empty."""
    if not dist.is_initialized():
        return word
    size = dist.get_world_size(group)
    (found,) = reduce_numbers(size - dist.get_rank(group) if word else 0, group=group)
    if not found:
        return ""
    words = [word]
    dist.broadcast_object_list(words, group=group, group_src=size - found)
    return words[0]


def gather_on_first(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the values of all ranks, by rank, on the first rank, and [] on the others, which send
    only their own.

    torch's `gather_object` would also tell every rank the sizes of all.
    """
    if not dist.is_initialized():
        return [value]
    content = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(_device(group))
    (size,) = reduce_numbers(len(content), group=group)
    sent = torch.nn.functional.pad(
        content, (0, size - len(content))
    )  # a pickle ends with a mark, so nothing after it is read
    is_first = dist.get_rank(group) == 0
    received = (
        [torch.empty_like(sent) for _ in range(dist.get_world_size(group))] if is_first else None
    )
    dist.gather(sent, received, group=group, group_dst=0)
    return [pickle.loads(each.cpu().numpy().tobytes()) for each in received or ()]


def new_gloo_group(timeout: datetime.timedelta, name: str) -> dist.ProcessGroup:
    """Return a gloo group of all ranks in which two ranks connect when they first exchange
    something.

    By default every rank connects to all others at once: 16,383 sockets on each of 16,384 ranks.
    torch has only an environment variable for it, which would change the group of the training
    steps, too.
    """
    before = os.environ.get("TORCH_GLOO_LAZY_INIT")
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    try:
        return dist.new_group(backend="gloo", timeout=timeout, group_desc=name)
    finally:
        if before is None:
            del os.environ["TORCH_GLOO_LAZY_INIT"]
        else:
            os.environ["TORCH_GLOO_LAZY_INIT"] = before


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device of the group's tensors."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if dist.get_backend(group) == "nccl"
        else torch.device("cpu")
    )


def is_communication(error: BaseException | None) -> bool:
    """Return True if the error or its cause is a failed communication with another rank."""
    if error is None:
        return False
    gloo = type(error) is RuntimeError and "gloo" in str(error)  # gloo has no class of errors
    return gloo or isinstance(error, dist.DistError) or is_communication(error.__cause__)


def init_device(debug: Debug, float32_matmul_precision: str = "highest") -> torch.device:
    """Return this rank's GPU, or the CPU with a fair share of its cores, after setting seed,
    determinism and precision.
    """
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
    if (
        "TITAN_LITE_COMMAND" not in os.environ
    ):  # else launch.py has set OMP_NUM_THREADS, unless the user has
        torch.set_num_threads(max(1, usable_cores() // int(os.environ["LOCAL_WORLD_SIZE"])))
    return torch.device("cpu")


def device_memory() -> float:
    """Return the bytes of this rank's GPU; infinite on a CPU, see `host_memory`."""
    if not torch.cuda.is_available():
        return math.inf
    return torch.cuda.get_device_properties(int(os.environ.get("LOCAL_RANK", "0"))).total_memory


def host_memory() -> float:
    """Return the bytes of this machine's memory per rank on it."""
    return (
        os.sysconf("SC_PHYS_PAGES")
        * os.sysconf("SC_PAGE_SIZE")
        / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    )


def init_process_group(device: torch.device, seconds: float, *, connect: bool) -> None:
    """Make the process group, with NCCL for GPUs, else gloo. seconds: limit of a collective.

    connect: connect NCCL at once.
    """
    cuda = device.type == "cuda"
    timeout = datetime.timedelta(seconds=seconds)
    dist.init_process_group(
        "nccl" if cuda else "gloo", timeout=timeout, device_id=device if cuda and connect else None
    )
