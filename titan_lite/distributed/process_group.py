"""Make the process group, and gather and compare values over ranks.

    all_equal(text)                     # True if all ranks have the same string: 16 bytes a rank
    first_nonempty(error)               # "" or the error of the lowest rank that has one
    max_over_ranks(seconds, nbytes)     # the maximum of each integer
    gather_to_rank_0(files)             # objects of all ranks, on rank 0
    share_on_node(files, store)         # the object of a node's first rank, on all its ranks
    all_gather_objects(error)           # objects of all ranks on all: for the details of an error

What a rank sends and receives does not grow with the number of ranks, except on rank 0 in
`gather_to_rank_0`, and on all in `all_gather_objects`, which is therefore not for what happens in
every run. The functions are collectives; without a process group they return the values of this
rank alone.
"""

import datetime
import hashlib
import os
import pickle
import re
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from titan_lite.distributed.endpoint import check_port, check_store

T = TypeVar("T")

# torch 2.14 made it public
_set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout


def connect_store(seconds: float) -> dist.Store:
    """Return the store of all ranks, which is torchrun's or, without that, rank 0's.

    seconds: limit of a wait for a key. Raises EndpointError if nothing answers as a store, or if
    rank 0 cannot serve it.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    name = f"MASTER_ADDR={host} MASTER_PORT={port}"
    serves = os.environ["RANK"] == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if serves:
        check_port(name, port)
    else:
        check_store(name, host, port, seconds)
    timeout = datetime.timedelta(seconds=seconds)
    connected = next(dist.rendezvous("env://", timeout=timeout))
    store: dist.Store = connected[0]  # beside it, this rank and the number of ranks
    store.set_timeout(timeout)
    return store


def limit_collectives(seconds: float, *, but_for: str) -> None:
    """Have a collective fail after this time, in all process groups that there are, but for those
    that are described so.
    """
    if dist.is_initialized():
        for group in dist.distributed_c10d._world.pg_map:
            if group.group_desc != but_for:
                _set_timeout(datetime.timedelta(seconds=seconds), group)


def share_on_node(value: T, store: dist.Store) -> T:
    """Return the value of the first rank of this node, on all its ranks. Needs no process group.

    They read it from a temporary file, which is removed when all have. A rank that does not see the
    file, in a container of its own, keeps its own value.
    """
    others = int(os.environ["LOCAL_WORLD_SIZE"]) - 1
    if not others:
        return value
    first = int(os.environ["RANK"]) - int(os.environ["LOCAL_RANK"])
    # torchrun's store survives a restart of the ranks.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"node/{attempt}/{first}", store)
    if os.environ["LOCAL_RANK"] == "0":
        with tempfile.NamedTemporaryFile(prefix="titan_lite-") as file:
            pickle.dump(value, file)
            file.flush()
            store.set("file", file.name)
            store.wait(["all have read it"])
        return value
    with suppress(FileNotFoundError):
        value = pickle.loads(Path(store.get("file").decode()).read_bytes())
    if store.add("readers", 1) == others:
        store.set("all have read it", "")
    return value


def init_process_group(
    device: torch.device, store: dist.Store, seconds: float, *, connect: bool
) -> None:
    """Make the process group, with NCCL for GPUs, else gloo. seconds: limit of a collective.

    connect: connect NCCL at once.
    """
    uses_gpu = device.type == "cuda"
    dist.init_process_group(
        "nccl" if uses_gpu else "gloo",
        store=dist.PrefixStore("default_pg", store),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=datetime.timedelta(seconds=seconds),
        device_id=device if uses_gpu and connect else None,
    )


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


def max_over_ranks(*numbers: int, group: dist.ProcessGroup | None = None) -> list[int]:
    """Return the maximum over the ranks of each integer."""
    return _all_reduce(numbers, dist.ReduceOp.MAX, group)


def sum_over_ranks(*numbers: int, group: dist.ProcessGroup | None = None) -> list[int]:
    """Return the sum over the ranks of each integer."""
    return _all_reduce(numbers, dist.ReduceOp.SUM, group)


def _all_reduce(
    numbers: tuple[int, ...], op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None
) -> list[int]:
    if not dist.is_initialized():
        return list(numbers)
    reduced = torch.tensor(numbers, dtype=torch.int64, device=_device_of(group))
    dist.all_reduce(reduced, op, group)
    return reduced.tolist()


def all_equal(text: str, group: dist.ProcessGroup | None = None) -> bool:
    """Return True if the string is the same on all ranks, judged by 64 bits of its SHA-256."""
    digest = hash64(text.encode())
    # max(~x) is ~min(x), without overflow
    largest, inverted_smallest = max_over_ranks(digest, ~digest, group=group)
    return largest == ~inverted_smallest


def hash64(content: bytes) -> int:
    """Return 64 bits of a SHA-256 as a number that an int64 can hold."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big", signed=True)


def first_nonempty(text: str, group: dist.ProcessGroup | None = None) -> str:
    """Return the string of the lowest rank whose string is not empty, or "" if all are empty."""
    if not dist.is_initialized():
        return text
    size = dist.get_world_size(group)
    distance = size - dist.get_rank(group) if text else 0  # largest for the lowest rank
    (largest,) = max_over_ranks(distance, group=group)
    if not largest:
        return ""
    objects = [text]
    dist.broadcast_object_list(objects, group=group, group_src=size - largest)
    return objects[0]


def all_gather_ints(*numbers: int) -> list[list[int]]:
    """Return the integers of all ranks, by rank, on all of them: 8 bytes each."""
    own = torch.tensor(numbers, dtype=torch.int64, device=_device_of(None))
    of_ranks = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, own)
    return torch.stack(of_ranks).tolist()


def all_gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the values of all ranks of the group (None: all ranks), by rank, on all of them."""
    if not dist.is_initialized():
        return [value]
    of_ranks = [value] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, value, group)
    return of_ranks


def gather_to_rank_0(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the values of all ranks, by rank, on rank 0 of the group, and [] on the others, which
    send only their own.

    torch's `gather_object` would also send the sizes of all to every rank.
    """
    if not dist.is_initialized():
        return [value]
    pickled = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    (size,) = max_over_ranks(len(pickled), group=group)
    # a pickle ends with a mark, so nothing after it is read
    padded = torch.nn.functional.pad(pickled, (0, size - len(pickled))).to(_device_of(group))
    received = None
    if dist.get_rank(group) == 0:
        received = [torch.empty_like(padded) for _ in range(dist.get_world_size(group))]
    dist.gather(padded, received, group=group, group_dst=0)
    return [pickle.loads(content.cpu().numpy().tobytes()) for content in received or ()]


def is_communication_error(error: BaseException | None) -> bool:
    """Return True if the error or its cause is a failed communication with another rank."""
    if error is None:
        return False
    # gloo has no class of errors
    is_gloo_error = type(error) is RuntimeError and "gloo" in str(error)
    return (
        is_gloo_error
        or isinstance(error, dist.DistError)
        or is_communication_error(error.__cause__)
    )


def first_line(error: BaseException) -> str:
    """Return the first line of an error of communication, without the source location and the
    advice that gloo adds.
    """
    line = str(error).partition("\n")[0]
    return re.sub(r"^\[\S+:\d+\] |\. This is typically caused .*", "", line)


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device of the group's tensors."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
