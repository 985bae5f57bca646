"""Stop a run on a signal: it ends its step, saves, and exits with a code that says to start it again.

    listen(starting=True)     # at the start: a signal ends the process at once, since there is nothing to save
    started()                 # from now on a signal is only recorded
    if received(): ...        # at the end of a step, where ranks exchange this
    settle()                  # the exit code is fixed, and signals are ignored
    end_with(main)            # the exit code of main() is that of the process

SIGTERM comes from schedulers and torchrun, SIGUSR1 from Slurm as a warning (`#SBATCH --signal=USR1@120`), SIGINT from Ctrl-C. The
death of the launcher counts as a signal, since ranks without a launcher would keep the folder's lock and never restart.
Further signals while the run stops are ignored, so that a save is not interrupted; but a second Ctrl-C ends the process at once.

Exit codes of a run and of `launch.py`:

    0    trained
    1    failed; another start may help
    2    the recipe, the command line or the data is wrong
    3    the same step failed again after a restart; another start would fail there, too
    75   stopped by a signal, and saved: start it again (EX_TEMPFAIL of sysexits.h)
"""

import atexit
import operator
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from types import FrameType
from typing import Any, NoReturn

FAILED, WRONG_INPUT, REPEATED, STOPPED = 1, 2, 3, 75
STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
LAUNCHER = "TITAN_LITE_LAUNCHER"  # in the environment of ranks: the name of the launcher's socket
LOST = "the death of its launcher"

_received: list[str] = []
_starting = False
_deciding = (
    threading.Lock()
)  # protects _starting: after `started` has returned, a signal does not end the process


def listen(*, starting: bool = False) -> None:
    """Record the signals of STOPPING for `received`; if `starting`, end the process instead. For the main thread.

    An earlier signal may be pending, since launch.py starts processes with these blocked.
    """
    global _starting
    _starting = starting
    wake, wakeup = (
        os.pipe()
    )  # written by Python's C handler, even while the main thread is in a library
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    # with torchrun the parent is a launcher, without it a shell, whose end does not matter
    parent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else 0
    threading.Thread(target=_watch, args=(wake, parent), name="signals", daemon=True).start()
    for number in STOPPING:
        signal.signal(number, _note)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


def started() -> None:
    """Keep signals from ending the process from now on, since other ranks depend on it."""
    global _starting
    with _deciding:
        _starting = False


def settle() -> None:
    """Ignore signals from now on, since the exit code is fixed. For the main thread."""
    started()
    for number in STOPPING:
        signal.signal(number, NOTHING)


def end_with(main: Callable[[], int]) -> NoReturn:
    """Run `main`, and end the process with the code that it returns or exits with.

    This skips the end of the interpreter, in which signals kill again, a closed pipe changes the exit code, and threads of a
    process group without peers may end the process by SIGABRT. Call it before torch is imported, so that torch's exit handlers
    run first.
    """
    ended: list[Any] = []
    atexit.register(_leave, ended)
    try:
        ended.append(main())
    except SystemExit as error:
        ended.append(error.code)
    settle()
    sys.exit(ended[0])


def _leave(ended: list[int]) -> None:
    for stream in (sys.stdout, sys.stderr) if ended else ():
        with suppress(OSError):
            stream.flush()
    if ended:
        os._exit(ended[0])


def received() -> str:
    """Return the name of the first signal, or LOST, or ""."""
    return _received[0] if _received else ""


def announce() -> AbstractContextManager[Any]:
    """Return a context for a launcher, in which its processes can detect the launcher's death."""
    if sys.platform != "linux":
        return nullcontext()  # they check their parent instead
    name = f"titan_lite-{os.getpid()}-{os.urandom(8).hex()}"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0{name}")  # in the abstract namespace, so that no file is left behind
    listener.listen(
        4096
    )  # never accepted: when the listener is closed, the processes read an end of file
    os.environ[LAUNCHER] = name
    return listener


# A handler that ignores a signal, in C: many signals would interrupt a Python handler recursively. With SIG_IGN Python prints a
# traceback if a signal arrived a moment before.
NOTHING = operator.is_


def _note(number: int, frame: FrameType | None) -> None:
    for other in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(other, NOTHING)
    if number == signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # works while Python waits for another rank
    _received.append(signal.Signals(number).name)


def _watch(wake: int, parent: int) -> None:
    """Run in a thread: end a process that is starting, even if it is in a library; record the death of the launcher.

    wake: pipe to which Python writes the number of each signal. parent: process to watch, 0: none.
    """
    launcher, lost = _connect()
    while True:
        watched: list[Any] = [wake, *([launcher] if launcher else [])]
        ready = select.select(watched, [], [], 0 if lost else 1 if parent else None)[0]
        names = (
            [signal.Signals(number).name for number in os.read(wake, 4096) if number in STOPPING]
            if wake in ready
            else []
        )
        if lost or launcher in ready or (parent and os.getppid() != parent):
            launcher, lost, parent = None, False, 0
            names.append(LOST)
        with _deciding:
            if names and _starting:
                tell(
                    f"[rank {os.environ.get('RANK', '0')}] {names[0]}: stopped at the start, with nothing to save"
                )
                os._exit(STOPPED)
        if LOST in names:
            _received.append(LOST)


def _connect() -> tuple[socket.socket | None, bool]:
    """Return (connection to the launcher, which closes when that ends; True if the launcher has ended)."""
    name = os.environ.get(LAUNCHER)
    connection = socket.socket(socket.AF_UNIX) if name else None
    try:
        if connection is not None:
            connection.setblocking(False)
            connection.connect(f"\0{name}")
    except BlockingIOError:
        return None, False  # after very many restarts: the parent is watched instead
    except OSError:
        return None, True
    return connection, False


def tell(line: str) -> None:
    """Write a line to standard error. Safe in a signal handler, where print and logging are not."""
    with suppress(OSError):  # the terminal or pipe is closed
        os.write(2, f"{line}\n".encode())
