"""Stop a run on a signal: it ends its step, saves, and exits with a code that says to start it
again (exit_code.py).

    listen()                  # at the start: a signal ends the process at once, since there is nothing to save
    started()                 # from now on a signal is only noted
    if received(): ...        # at the end of a step, where ranks exchange this

SIGTERM comes from schedulers and torchrun, SIGUSR1 from Slurm as a warning (`#SBATCH
--signal=USR1@120`), SIGINT from Ctrl-C, SIGHUP from a terminal that closes. All threads block them,
and one waits for the first. So no signal interrupts a save, and further ones stay pending for ever.
Processes that a rank starts inherit the mask: a signal of torchrun, which sends it to the rank's
process group, does not end a loader. The kernel sends SIGTERM when the launcher dies, since ranks
without a launcher would keep the folder's lock and never restart.
"""

import ctypes
import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType

from titan_lite.resilience.exit_code import STOPPED

ALWAYS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
HANGUP_IS_IGNORED = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # as under nohup
STOPPING = ALWAYS if HANGUP_IS_IGNORED else (*ALWAYS, signal.SIGHUP)
LAUNCHER = "TITAN_LITE_LAUNCHER"  # in the environment of ranks: the process of launch.py
LOST = "the death of its launcher"
PR_SET_PDEATHSIG = 1  # of Linux's prctl

_received = ""
_starting = False
_deciding = threading.RLock()  # after `started` has returned, a signal does not end the process
_launcher = 0  # the process that started this rank; 0: none that matters


def listen(*, starting: bool = True) -> None:
    """Wait for a signal in a thread.

    For the main thread, before others exist: a new thread inherits the mask.

    starting: a signal ends the process until `started` is called, even while it is in a library.
    """
    global _starting, _launcher
    _starting = starting
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    for (
        number
    ) in STOPPING:  # a library may unblock them, as multiprocessing's resource tracker does
        signal.signal(number, _note)
    _launcher = _watch_launcher()
    threading.Thread(target=_wait, name="signals", daemon=True).start()


def started() -> None:
    """Keep signals from ending the process from now on, since other ranks depend on it."""
    global _starting
    with _deciding:
        _starting = False


def received() -> str:
    """Return the name of the first signal, or LOST, or "".

    The launcher is the parent for a moment after the kernel's signal, until its last thread has
    ended.
    """
    lost = _launcher and os.getppid() != _launcher
    return LOST if _received and lost else _received


def _wait() -> None:
    _note(signal.sigwait(STOPPING))


def _note(number: int, frame: FrameType | None = None) -> None:
    """Note the first signal, or end a process that is starting."""
    global _received
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    with _deciding:
        _received = _received or signal.Signals(number).name
        if _starting:
            rank = os.environ.get("RANK", "0")
            tell(f"[rank {rank}] {received()}: stopped at the start, with nothing to save")
            os._exit(STOPPED)


def _watch_launcher() -> int:
    """Have the kernel send SIGTERM when the launcher dies, even by SIGKILL.

    Return its process id; 0 if there is none.

    Without torchrun the parent is a shell, whose end does not matter. Linux alone can do it.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or sys.platform != "linux":
        return 0
    launcher = int(os.environ.get(LAUNCHER) or os.getppid())
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != launcher:  # it has died before
        os.kill(os.getpid(), signal.SIGTERM)
    return launcher


def tell(line: str) -> None:
    """Write a line to standard error. Safe in a signal handler, where print and logging are not."""
    with suppress(OSError):  # the terminal or pipe is closed
        os.write(2, f"{line}\n".encode())
