"""Measure the control plane: meeting, process groups, agreement over ranks, and the files that have a line for each rank.

    python scripts/measure_scale.py                         # 2, 64 and 256 processes, half a minute
    python scripts/measure_scale.py --processes 2 4

The processes are forked from one that has imported torch; they run the code of a run's start and of a save without a model. More
processes than cores wait for each other's turn, so 64 and 256 show the law of growth, and 2 show what one message costs. One
process writes and reads the files. titan_lite/plan/scale.py has the figures of the printed table, and extends them to more ranks.
"""

import argparse
import multiprocessing
import os
import pickle
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from titan_lite import manifest
from titan_lite.checkpoint import tensor_files
from titan_lite.checkpoint.saving import LIMIT
from titan_lite.checkpoint.state import merge_loaders
from titan_lite.ranks import gather_on_first, new_gloo_group, reduce_numbers

MESSAGE = 10_000  # bytes that a rank sends to the first one
REDUCTIONS = 5
SOCKETS = "sockets of the last rank"
CONNECTING = "connecting to the store, median x ranks"  # one look-up of a name that times out would decide the sum
ENTRIES, FILES, ROWS = (
    20_000,
    4096,
    4096,
)  # parts of tensors in .metadata, files in manifest.json, rows in state.json


def sockets() -> int:
    files = Path("/proc/self/fd")
    return sum(
        os.readlink(files / name).startswith("socket")
        for name in os.listdir(files)
        if (files / name).is_symlink()
    )


def run_rank(rank: int, ranks: int, port: int, together: Any, turn: Any, told: Any) -> None:
    """Time each part on this rank, from the moment at which all are ready."""
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    torch.set_num_threads(1)
    found = {}

    def timed(name: str, part: Callable[[], Any], times: int = 1) -> None:
        together.wait()
        began = time.perf_counter()
        for _ in range(times):
            part()
        found[name] = (time.perf_counter() - began) / times

    stores: list[dist.Store] = []

    def connect() -> None:
        with turn:
            began = time.perf_counter()
            stores.append(
                dist.TCPStore(
                    "127.0.0.1", port, ranks, is_master=False, timeout=LIMIT, wait_for_workers=False
                )
            )
            found[CONNECTING] = time.perf_counter() - began

    def meet() -> None:
        if stores[-1].add("arrived", 1) == ranks:
            stores[-1].set("verdict", "go")
        stores[-1].wait(["verdict"])

    if rank == 0:
        stores.append(
            dist.TCPStore(
                "127.0.0.1", port, ranks, is_master=True, timeout=LIMIT, wait_for_workers=False
            )
        )
    connect()
    timed("meeting", meet)
    timed(
        "first group",
        lambda: dist.init_process_group("gloo", store=stores[-1], rank=rank, world_size=ranks),
    )
    timed("group of saves", lambda: new_gloo_group(LIMIT, "saves"))
    timed("first all-reduce, which connects", lambda: reduce_numbers(0))
    timed("all-reduce", lambda: reduce_numbers(0), REDUCTIONS)
    timed("first gather, which connects", lambda: gather_on_first(b"x" * MESSAGE))
    timed("gather on the first rank", lambda: gather_on_first(b"x" * MESSAGE))
    found[SOCKETS] = sockets()
    told.put((rank, found))
    together.wait()
    os._exit(0)  # a group's end would wait for others


def measure_ranks(ranks: int) -> dict[str, float]:
    """Return the longest time of any rank by part, and the sockets of the last one."""
    context = multiprocessing.get_context("fork")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = context.Barrier(ranks, timeout=120), context.Lock(), context.SimpleQueue()
    processes = [
        context.Process(target=run_rank, args=(rank, ranks, port, *shared)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    by_rank = dict(shared[-1].get() for _ in processes)
    for process in processes:
        process.join()
    longest = {name: max(found[name] for found in by_rank.values()) for name in by_rank[0]}
    connecting = ranks * statistics.median(found[CONNECTING] for found in by_rank.values())
    return longest | {CONNECTING: connecting, SOCKETS: by_rank[ranks - 1][SOCKETS]}


def measure_files(folder: Path) -> dict[str, float]:
    """Return bytes and seconds of the files that grow with ranks, by entry, file or row."""
    metadata = Metadata({}, planner_data={})
    results = []
    for number in range(ENTRIES):
        name = f"optimizer.state.layers.{number % 8}.feed_forward.w1.weight.exp_avg"
        size = torch.Size((ENTRIES // 8, 16384))
        if name not in metadata.state_dict_metadata:
            properties = TensorProperties(torch.float32)
            metadata.state_dict_metadata[name] = TensorStorageMetadata(properties, size, [])
            metadata.planner_data[name] = (name,)
        chunks = metadata.state_dict_metadata[name].chunks
        offset = torch.Size((number // 8, 0))
        place = _StorageInfo(f"__{number // 100}_0.distcp", 67108864 + number * 512, 67108864)
        results.append(WriteResult(MetadataIndex(name, offset, len(chunks)), 67108864, place))
        chunks.append(ChunkStorageMetadata(offset, torch.Size((1, 16384))))
    found: dict[str, float] = {}

    def timed(name: str, part: Callable[[], Any], count: int) -> None:
        began = time.perf_counter()
        part()
        found[name] = (time.perf_counter() - began) / count

    found["sent to the first rank, bytes an entry"] = len(pickle.dumps(results)) / ENTRIES
    writer = FileSystemWriter(folder)
    timed("write .metadata, s an entry", lambda: writer.finish(metadata, [results]), ENTRIES)
    found[".metadata, bytes an entry"] = (folder / tensor_files.NAME).stat().st_size / ENTRIES
    timed("read .metadata, s an entry", lambda: tensor_files.read_metadata(folder), ENTRIES)
    (folder / tensor_files.NAME).unlink()
    for number in range(FILES):
        (folder / f"__{number}_0.distcp").write_bytes(b"")
    listed = {path.name: manifest.digest(path) for path in folder.iterdir()}
    manifest.write(folder, 1, listed)
    found["manifest.json, bytes a file"] = (folder / manifest.NAME).stat().st_size / FILES
    timed("check names and sizes, s a file", lambda: manifest.check_step(folder, 1), FILES)
    states = [
        {"windows": 10**9, "rows": {str(row): [10**6, [10**10 + row, 4000]]}, "of": ROWS}
        for row in range(ROWS)
    ]
    merged = manifest.json.dumps({"loader": merge_loaders(states)}, indent=1)
    found["state.json, bytes a row of one source"] = len(merged) / ROWS
    large = folder / "large"
    large.write_bytes(bytes(1 << 28))
    timed("SHA-256, s a byte", lambda: manifest.digest(large), 1 << 28)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--processes",
        type=int,
        nargs="+",
        default=[2, 64, 256],
        help="numbers of ranks (default: 2 64 256)",
    )
    worlds = parser.parse_args().processes
    found = {ranks: measure_ranks(ranks) for ranks in worlds}
    print(
        f"{'seconds, the slowest rank; on ' + str(os.cpu_count()) + ' cores':<44}"
        + "".join(f"{ranks:>8} ranks" for ranks in worlds)
    )
    for name in found[worlds[0]]:
        print(f"{name:<44}" + "".join(f"{found[ranks][name]:>14.4g}" for ranks in worlds))
    print("\none process")
    with tempfile.TemporaryDirectory() as folder:
        for name, value in measure_files(Path(folder)).items():
            print(f"{name:<44}{value:>14.3g}")


if __name__ == "__main__":
    main()
