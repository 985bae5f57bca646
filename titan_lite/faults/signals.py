"""Signals that ask a run to stop. It ends its step, saves, and exits with a code that says to start it again.

    listen(starting=True)     # first of all: a signal ends the process at once, since there is nothing to save
    started()                 # from now on a signal leaves a note, and nothing else
    if received(): ...        # at the end of a step, where ranks tell each other
    settle()                  # the exit code is decided, and no signal changes it
    end_with(main)            # the exit code of main() is that of the process

SIGTERM comes from schedulers and torchrun, SIGUSR1 from Slurm as a warning (`#SBATCH --signal=USR1@120`), SIGINT from Ctrl-C. The
death of the launcher counts as one: ranks that nobody watches would hold the folder's lock and restart nothing.
What comes again while the run stops changes nothing, so that no save is torn; but a second Ctrl-C ends the process at once.

Exit codes of a run and of `launch.py`:

    0    trained
    1    could not go on; another start may help
    2    something in the recipe, the command line or the data is wrong
    3    the same step failed again after a restart; another start would end there too
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
_deciding = threading.Lock()  # of _starting: once `started` has returned, the process does not end by itself


def listen(*, starting: bool = False) -> None:
    """From now on a signal of STOPPING is noted for `received`, or ends the process where it is starting. For the main thread.

    One that came before may have waited: launch.py starts processes with these blocked.
    """
    global _starting
    _starting = starting
    wake, wakeup = os.pipe()  # by which C code tells the thread, while the main one is in a library
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    # of any torchrun's; without one a parent that ends is a shell
    parent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else 0
    threading.Thread(target=_watch, args=(wake, parent), name="signals", daemon=True).start()
    for number in STOPPING:
        signal.signal(number, _note)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


def started() -> None:
    """From now on the process does not end at a signal: other ranks count on it."""
    global _starting
    with _deciding:
        _starting = False


def settle() -> None:
    """The exit code is decided: signals change nothing. For the main thread."""
    started()
    for number in STOPPING:
        signal.signal(number, NOTHING)


def end_with(main: Callable[[], int]) -> NoReturn:
    """Run `main` and end the process with the code that it returns or exits with.

    Without the interpreter's own end, in which signals kill again, a pipe that is gone makes another exit code, and threads of a
    process group whose ranks are gone may end the process by SIGABRT. Called before torch is imported, it waits for what that
    wants to do at the end.
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
    """Name of the first signal that came, or LOST, or nothing."""
    return _received[0] if _received else ""


def announce() -> AbstractContextManager[Any]:
    """For a launcher: within, and until its process ends in whatever way, the processes that it starts know that it lives."""
    if sys.platform != "linux":
        return nullcontext()  # they look who their parent is
    name = f"titan_lite-{os.getpid()}-{os.urandom(8).hex()}"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0{name}")  # in no folder, so that nothing is left behind
    listener.listen(4096)  # and never accepted: when the listener is closed, they read an end of file
    os.environ[LAUNCHER] = name
    return listener


# A handler, and written in C: a storm would interrupt a Python function in itself, again and again. With SIG_IGN Python prints a
# traceback where a signal has come a moment before.
NOTHING = operator.is_


def _note(number: int, frame: FrameType | None) -> None:
    for other in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(other, NOTHING)
    if number == signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # needs no Python, which may be waiting for another rank
    _received.append(signal.Signals(number).name)


def _watch(wake: int, parent: int) -> None:
    """A thread: ends a process that is starting, also from within a library; notes the death of the launcher.

    wake: where Python writes the number of each signal; parent: of this process, 0 where none is watched.
    """
    launcher, lost = _connect()
    while True:
        watched: list[Any] = [wake, *([launcher] if launcher else [])]
        ready = select.select(watched, [], [], 0 if lost else 1 if parent else None)[0]
        names = [signal.Signals(number).name for number in os.read(wake, 4096) if number in STOPPING] if wake in ready else []
        if lost or launcher in ready or (parent and os.getppid() != parent):
            launcher, lost, parent = None, False, 0
            names.append(LOST)
            _received.append(LOST)
        with _deciding:
            if names and _starting:
                tell(f"[rank {os.environ.get('RANK', '0')}] {names[0]}: stopped at the start, with nothing to save")
                os._exit(STOPPED)


def _connect() -> tuple[socket.socket | None, bool]:
    """(the connection to the launcher, which ends when it does; True where it has)."""
    name = os.environ.get(LAUNCHER)
    connection = socket.socket(socket.AF_UNIX) if name else None
    try:
        if connection is not None:
            connection.setblocking(False)
            connection.connect(f"\0{name}")
    except BlockingIOError:
        return None, False  # after very many restarts: the parent is looked at
    except OSError:
        return None, True
    return connection, False


def tell(line: str) -> None:
    """A line on standard error. A signal may come in the middle of another line, where print and logging must not be called."""
    with suppress(OSError):  # of a terminal or a pipe that is gone
        os.write(2, f"{line}\n".encode())
