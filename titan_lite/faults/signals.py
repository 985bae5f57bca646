"""Signals that ask a run to stop. It ends its step, saves, and exits with a code that says to start it again.

    listen()                  # first of all: from now on a signal leaves a note, and nothing else
    if received(): ...        # at the end of a step, where ranks tell each other

SIGTERM comes from schedulers and torchrun, SIGUSR1 from Slurm as a warning (`#SBATCH --signal=USR1@120`), SIGINT from Ctrl-C.
What comes again while the run stops changes nothing, so that no save is torn; but a second Ctrl-C ends the process at once.

Exit codes of a run and of `launch.py`:

    0    trained
    1    could not go on; another start may help
    2    something in the recipe, the command line or the data is wrong
    3    the same step failed again after a restart; another start would end there too
    75   stopped by a signal, and saved: start it again (EX_TEMPFAIL of sysexits.h)
"""

import os
import signal
import time
from contextlib import suppress
from types import FrameType

FAILED, WRONG_INPUT, REPEATED, STOPPED = 1, 2, 3, 75
STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

_received: list[signal.Signals] = []
_since = 0.0


def listen() -> None:
    """From now on a signal of STOPPING is noted for `received`. To be called in the main thread.

    One that came before may have waited: launch.py starts processes with these blocked.
    """
    for number in STOPPING:
        signal.signal(number, _note)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


def received() -> str:
    """Name of the first signal that came, or nothing."""
    return _received[0].name if _received else ""


def _note(number: int, frame: FrameType | None) -> None:
    global _since
    signum = signal.Signals(number)
    if signum == signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # needs no Python, which may be waiting for another rank
    if not _received:
        _since = time.monotonic()
    elif time.monotonic() - _since > 5:  # Slurm signals every process of a job, and launch.py passes its own on
        tell(f"[rank {os.environ.get('RANK', '0')}] {signum.name}: already stopping, after {_received[0].name}")
    _received.append(signum)


def tell(line: str) -> None:
    """A line on standard error. A signal may come in the middle of another line, where print and logging must not be called."""
    with suppress(OSError):  # of a terminal or a pipe that is gone
        os.write(2, f"{line}\n".encode())
