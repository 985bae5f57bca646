"""Tie the end of a process to that of its parent.

signal_when_parent_dies(signal.SIGTERM)    # in a process that its parent has forked
end_with_parent()                          # in a worker of a multiprocessing pool
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading

PR_SET_PDEATHSIG = 1  # an operation of Linux's prctl


def signal_when_parent_dies(number: signal.Signals) -> None:
    """Have the kernel send this process `number` when its parent dies, even by SIGKILL.

    Only Linux can do it; elsewhere nothing happens. A parent that has died before is not noticed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def end_with_parent() -> None:
    """End this worker of a pool with the program, which handles Ctrl-C and SIGTERM itself.

    A worker's parent to the kernel may be multiprocessing's fork server, which lives as long as its
    workers do. So a thread waits for the program.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    program = multiprocessing.parent_process()
    assert program is not None

    def wait() -> None:
        program.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
