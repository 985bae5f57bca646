"""Run a function on several gloo ranks and collect what each returns.

    results = run_ranks(2, worker, argument)       # worker(argument) in two processes; results[rank]

The function lives in a test module (it is pickled by name). One thread a rank; a world is made once in a process.
"""

import datetime
import io
import os
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = 240  # seconds; a hang is a failure


def run_ranks(world_size: int, function: Callable, *args: Any, init: bool = True) -> list[Any]:
    """What function(*args) returned on each rank. Fails the test with the tracebacks of the ranks that failed.

    init: whether the process group is up when function is called, or that is left to it.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    processes = [
        context.Process(target=_rank_main, args=(rank, world_size, port, queue, function, args, init))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    results: dict[int, Any] = {}
    failures = []
    while len(results) + len(failures) < world_size:
        _wait_for_answer(queue, processes)
        rank, failure, result = queue.get()
        if failure:
            failures.append(f"rank {rank}: {failure}")
            break  # the others wait for it
        results[rank] = torch.load(io.BytesIO(result), weights_only=False)
    for process in processes:
        process.join(30 if not failures else 0.1)
        process.kill()
    if failures:
        pytest.fail("\n".join(failures), pytrace=False)
    return [results[rank] for rank in range(world_size)]


def _wait_for_answer(queue: Any, processes: list[Any]) -> None:
    waited = 0.0
    while queue.empty():
        dead = [(rank, p.exitcode) for rank, p in enumerate(processes) if p.exitcode not in (None, 0)]
        processes[0].join(0.1)
        waited += 0.1
        if (dead and queue.empty()) or waited > TIMEOUT:
            for process in processes:
                process.kill()
            pytest.fail(f"ranks that died (rank, exit code): {dead}; waited {waited:.0f} s", pytrace=False)


def _rank_main(rank: int, world_size: int, port: int, queue: Any, function: Callable, args: tuple, init: bool) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    try:
        if init:
            dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
        result = function(*args)
        dist.barrier()
        dist.destroy_process_group()
        buffer = io.BytesIO()  # and not tensors, which the queue would share with a process that ends
        torch.save(result, buffer)
        queue.put((rank, None, buffer.getvalue()))
    except BaseException:
        queue.put((rank, traceback.format_exc(), None))
        sys.stdout.flush()
        os._exit(1)
