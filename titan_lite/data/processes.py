"""Run the packing of windows in processes that read ahead of training.

    processes = PackingProcesses(packer, num_workers=2, prefetch=4)    # may raise LoaderError
    next(processes).windows                                            # so may this

The processes are those of torchdata's StatefulDataLoader, without its state: only the same number
of processes could load it, and it counts windows received, not those in batches. They run torch on
one thread, and end with the iterator or with the training process.
"""

import errno
import functools
import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.stateful_dataloader import _StatefulMultiProcessingDataLoaderIter

from titan_lite.data.packing import Packed, WindowPacker
from titan_lite.processes import signal_when_parent_dies

STOP_SIGNALS = {signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP}
HAS_SIGTIMEDWAIT = hasattr(signal, "sigtimedwait")  # not on macOS


class LoaderError(RuntimeError):
    """Loader processes cannot be started, or have ended; the message says why and what to use."""


class PackingProcesses(Iterator[Packed]):
    """Windows that `num_workers` processes pack, in turn; 0: that are packed in this process."""

    def __init__(self, packer: WindowPacker, num_workers: int, prefetch: int):
        """prefetch: items that each process packs ahead. Raises LoaderError."""
        try:
            self._packed = _start(packer, num_workers, prefetch)
        except OSError as error:
            # the destructor of the incomplete iterator would print a traceback (torchdata 0.11)
            _StatefulMultiProcessingDataLoaderIter._shutdown = True
            raise LoaderError(_why_not_started(num_workers, error)) from error

    def __next__(self) -> Packed:
        try:
            return next(self._packed)
        except (RuntimeError, OSError) as error:
            for process in getattr(self._packed, "_workers", ()):
                if process.exitcode:
                    raise LoaderError(_why_ended(process.pid, process.exitcode)) from error
            raise


def _start(packer: WindowPacker, num_workers: int, prefetch: int) -> Iterator[Packed]:
    # torch's handler would raise anywhere in the training process; `next` detects the end of a
    # worker, too
    on_child = signal.getsignal(signal.SIGCHLD)
    is_main_thread = threading.current_thread() is threading.main_thread()
    with _stop_signals_blocked(), warnings.catch_warnings():
        # torchdata 0.11 with torch 2.13
        warnings.filterwarnings("ignore", "'set_vital' is deprecated")
        loader = StatefulDataLoader(
            packer,
            batch_size=None,
            num_workers=num_workers,
            prefetch_factor=prefetch if num_workers else None,
            # the default would draw from the generator of the training process
            generator=torch.Generator(),
            worker_init_fn=functools.partial(_start_worker, ends_with_program=is_main_thread),
            snapshot_every_n_steps=None,  # never; a snapshot takes 0.1 ms
        )
        packed = iter(loader)
    if is_main_thread:
        signal.signal(signal.SIGCHLD, on_child)
    return packed


@contextmanager
def _stop_signals_blocked() -> Iterator[None]:
    """Return a context in which new processes, and the first threads of their libraries, block
    the signals to stop.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS if HAS_SIGTIMEDWAIT else ())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(worker: int, *, ends_with_program: bool) -> None:
    """Ignore stop signals that all processes get, since training still needs batches.

    Runs in a loader process. A thread waits for SIGTERM from the training process, since Python's
    handlers do not know the sender. It also waits for the end of the training process, after which
    this process would otherwise block for ever. On Linux the kernel ends it then, even while it is
    stopped (SIGSTOP), unless its parent is multiprocessing's fork server.

    ends_with_program: the main thread has started this process, so that its end is the program's.
    """
    program = multiprocessing.parent_process()
    assert program is not None
    assert program.pid is not None
    if ends_with_program and multiprocessing.get_start_method() != "forkserver":
        signal_when_parent_dies(signal.SIGKILL, program.pid)

    def wait() -> None:
        while program.is_alive():
            if not HAS_SIGTIMEDWAIT:
                time.sleep(1)
                continue
            received = signal.sigtimedwait(STOP_SIGNALS, 1)
            if received and received.si_pid == program.pid:
                break
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


def _why_not_started(num_workers: int, error: OSError) -> str:
    """Return the message if the operating system refuses processes."""
    fix = ""
    if error.errno == errno.ENOSPC:
        fix = "free space in /dev/shm, where their semaphores are (in a container, use a larger"
        fix += " --shm-size), or "
    return (
        f"data.num_workers = {num_workers}: loader processes cannot be started: {error}; {fix}use"
        " data.num_workers = 0"
    )


def _why_ended(pid: int, exit_code: int) -> str:
    """Return the message about a loader process that has ended.

    exit_code: negative for a signal.
    """
    how = f"ended with exit code {exit_code}"
    if exit_code < 0:
        how = f"was killed by {signal.Signals(-exit_code).name}"
    if exit_code == -signal.SIGKILL:
        how += ", as the kernel does where memory is short"
    return (
        f"loader process {pid} {how}; start again to resume; for less memory, use smaller"
        " data.num_workers and data.prefetch, or data.num_workers = 0"
    )
