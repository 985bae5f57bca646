"""Run a function on several gloo ranks and collect what each returns.

    results = run_ranks(2, worker, argument)       # worker(argument) in two processes; results[rank]

A rank is a new process, and so is every world: a process that has been in one keeps caches of its
meshes. It is forked from a server that lives as long as the tests do and has imported torch and the
package, five seconds of work that no rank repeats. The function lives in a test module (it is
pickled by name). One thread a rank.
"""

import datetime
import functools
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import cores
import pytest
import torch
import torch.distributed as dist

from titan_lite.distributed import device
from titan_lite.processes import fork_server, signal_when_parent_dies
from titan_lite.tools.verify import observe

TIMEOUT = 240  # seconds; a hang is a failure
# Imported by the server, beside what `verify` and `plan` have imported by theirs. Not what starts
# threads when it is imported (pyarrow): a fork has the locks of a library's threads, and not the
# threads.
PRELOADED = [
    *observe.PRELOADED,
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.profiler",
    "titan_lite.train",
    "titan_lite.tools.plan.trace",
    "titan_lite.tools.verify.command",
    "pytest",
    "ranks",
]
# The last ones: a test has far fewer servers at a time.
_reserved: deque[socket.socket] = deque(maxlen=64)


def run_ranks(
    world_size: int, function: Callable, *args: Any, init: bool = True, seconds: float = TIMEOUT
) -> list[Any]:
    """Return what function(*args) returned on each rank.

    Fails the test with the traceback of the rank that failed.

    init: have the process group up when function is called; else function, such as a Trainer, makes
    it. seconds: until it hangs.
    """
    with tempfile.TemporaryDirectory() as folder:
        with cores.given_to(world_size):
            processes = start_ranks(world_size, _rank_main, Path(folder), function, args, init)
            codes = end_ranks(processes, seconds)
        if any(code != 0 for code in codes):
            told = [file.read_text() for file in sorted(Path(folder).glob("*.txt"))]
            pytest.fail(
                "\n".join([*told, f"exit codes of the ranks, None where one was ended: {codes}"]),
                pytrace=False,
            )
        return [
            torch.load(Path(folder) / f"{rank}.pt", weights_only=False)
            for rank in range(world_size)
        ]


def start_ranks(
    world_size: int, function: Callable, *args: Any, **environment: str
) -> list[BaseProcess]:
    """function(*args) in new processes, which have the environment of a launcher's."""
    server = start_server()
    context = multiprocessing.get_context("forkserver")
    world = {
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": reserved_port(),
    }
    processes: list[BaseProcess] = []
    for rank in range(world_size):
        own = {
            key: str(value) for key, value in {**world, "RANK": rank, "LOCAL_RANK": rank}.items()
        }
        variables = {**os.environ, **own, **environment}
        processes.append(context.Process(target=_enter, args=(server, variables, function, args)))
        processes[-1].start()
    return processes


def end_ranks(
    processes: Sequence[BaseProcess], seconds: float, patience: float = 0
) -> list[int | None]:
    """Wait for all ranks; return their exit codes.

    Where one fails, the others have `patience` seconds, then they are killed.

    None: a rank that was killed, since another failed or the time was over.
    """
    until, failed = time.monotonic() + seconds, False
    while running := [process for process in processes if process.exitcode is None]:
        wait([process.sentinel for process in running], max(0, until - time.monotonic()))
        if not failed and any(process.exitcode for process in processes):
            failed, until = True, time.monotonic() + patience
        if time.monotonic() >= until:
            break
    codes: list[int | None] = []
    for process in processes:
        had_ended = process.exitcode is not None
        process.kill()  # does nothing to one that is just ending, of which nobody has heard yet
        process.join()
        was_killed = not had_ended and process.exitcode == -signal.SIGKILL
        codes.append(None if was_killed else process.exitcode)
    return codes


def reserved_port() -> int:
    """Return a port of 127.0.0.1 for a server that reuses addresses, as torch's store does.

    It stays bound here, though not listened on, so that the kernel gives it to nobody else.
    """
    if len(_reserved) == _reserved.maxlen:
        _reserved.popleft().close()
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    _reserved.append(held)
    return held.getsockname()[1]


@functools.cache
def start_server() -> int:
    """Start the server of ranks, and of the processes of `verify` and `plan` in this process.

    With one thread a library, which each reads from the environment when it is imported. Returns
    its process id.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv(
            "PYTHONPATH", os.pathsep.join(sys.path)
        )  # where it finds the package and this module
        fork_server(PRELOADED)
    return forkserver._forkserver._forkserver_pid


def _enter(server: int, environment: Mapping[str, str], function: Callable, args: tuple) -> None:
    os.environ.clear()
    os.environ.update(environment)
    multiprocessing.set_start_method(
        None, force=True
    )  # of the rank's own processes: the default again, and not this server
    signal_when_parent_dies(signal.SIGKILL, server)  # which ends with the tests, however they end
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which the server ignores
    torch.set_num_threads(1)
    device.usable_cores = lambda: 1  # so that a rank has one thread, too, where it is the only one
    function(*args)


def _rank_main(folder: Path, function: Callable, args: tuple, init: bool) -> None:
    rank = os.environ["RANK"]
    try:
        if init:
            dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
        result = function(*args)
        dist.barrier()
        dist.destroy_process_group()
        torch.save(result, folder / f"{rank}.pt")
    except BaseException:
        (folder / f"{rank}.txt").write_text(f"rank {rank}: {traceback.format_exc()}")
        os._exit(1)  # without waiting for threads that wait for other ranks
