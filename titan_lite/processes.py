"""Tie the end of a process to that of its parent, and start one quickly.

signal_when_parent_dies(signal.SIGTERM, parent)     # in a process that `parent` has started
context = fork_server(["titan_lite.trainer"])       # whose processes need not import it
end_with_program()                                  # in one of these
for process in descendants(): ...                   # of this process
with large_imports():
    import torch
"""

import ctypes
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path

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


def descendants() -> list[int]:
    """Return the ids of the processes that this one has started, and of those that they have,
    parents first.
    """
    children = defaultdict(list)
    for process, parent in _parents():
        children[parent].append(process)
    found = [os.getpid()]
    for process in found:  # which grows
        found += children[process]
    return found[1:]


def _parents() -> Iterator[tuple[int, int]]:
    """Yield the id of each process of this machine, and that of its parent."""
    if sys.platform != "linux":
        command = ["ps", "-A", "-o", "pid=,ppid="]
        listed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        for line in listed.splitlines():
            process, parent = map(int, line.split())
            yield process, parent
        return
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it has ended meanwhile
            _, parent = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[:2]
            yield int(name), int(parent)


def fork_server(modules: Sequence[str]) -> ForkServerContext:
    """Return a multiprocessing context whose processes are forked from a server.

    modules: imported once, by the server; importing torch and the package takes seconds. A program
    has one server: one that runs already is used, with the modules that it has.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(modules))
    # Inherited by the server: Ctrl-C in its imports prints no traceback.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, handler)
    return context


def end_with_program() -> None:
    """End this process of `fork_server` when the program ends, even by SIGKILL.

    To the kernel its parent is the server, which lives as long as its processes do. So a thread
    waits for the program.
    """
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
