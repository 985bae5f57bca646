"""Tie the end of a process to that of its parent, and start one quickly.

signal_when_parent_dies(signal.SIGTERM, parent)     # in a process that `parent` has started
end_with_parent()                                   # in a worker of a multiprocessing pool
with large_imports():
    import torch
"""

import ctypes
import errno
import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

PR_SET_PDEATHSIG = 1  # an operation of Linux's prctl


def signal_when_parent_dies(number: signal.Signals, parent: int) -> None:
    """Have the kernel send this process `number` when its parent dies, even by SIGKILL.

    SIGKILL ends a process that is stopped by SIGSTOP, too, where no thread could notice anything.
    parent: its process id, as known before this process was started: one that has died meanwhile
    counts, too. Only Linux can do it; elsewhere nothing happens. The kernel means the thread that
    has started this process: one that ends before its process counts as dead.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def describe_limit(error: BaseException) -> str:
    """Return why no further thread or process could be started, or "" for another error.

    What a library raises while it tidies up after that has it as its context.
    """
    no_thread = isinstance(error, RuntimeError) and "can't start new thread" in str(error)
    no_process = isinstance(error, BlockingIOError) and error.errno == errno.EAGAIN
    if not (no_thread or no_process):
        return describe_limit(error.__context__) if error.__context__ else ""
    return (
        f"no further {'thread' if no_thread else 'process'} can be started: raise the limit"
        " (ulimit -u, or pids.max of the container or job), or use fewer: NGPU, OMP_NUM_THREADS,"
        " data.num_workers"
    )


def end_with_parent() -> None:
    """End this worker of a pool with the program, which handles Ctrl-C, SIGTERM and SIGHUP itself.

    A worker's parent to the kernel may be multiprocessing's fork server, which lives as long as its
    workers do. So a thread waits for the program.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    program = multiprocessing.parent_process()
    assert program is not None

    def wait() -> None:
        program.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


@contextmanager
def large_imports() -> Iterator[None]:
    """Return a context without garbage collections, which take a fifth of the time of importing
    torch and find nothing.

    What is imported is never looked at again: it lives as long as the process.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
