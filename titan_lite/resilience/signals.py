"""Listen for the signals that stop a run: it ends its step, saves, and exits with a code that says
to start it again (exit_code.py).

    listen()                  # at the start, with nothing to save, a signal ends the process
    end_start(describe)       # from now on a signal is only recorded
    if received(): ...        # which ranks exchange at the end of a step (stop_signal.py)

SIGTERM comes from schedulers and torchrun, SIGUSR1 from Slurm as a warning (`#SBATCH
--signal=USR1@120`), SIGINT from Ctrl-C, SIGHUP from a terminal that closes.

All threads block them, and one waits for them. So no signal interrupts a save. After the first one,
SIGINT ends this process at once, and so does the death of the launcher: somebody does not want to
wait. Others change nothing. SIGQUIT always ends a process. Processes that a rank starts inherit the
mask: a signal of torchrun, which sends it to the rank's process group, does not end a loader. The
kernel sends SIGTERM when the launcher dies, since ranks without a launcher would keep the folder's
lock and never restart.

From a signal to the end of a run:

1. `_record` notes it; before `end_start`, with nothing to save, it ends the process (code 75).
2. The step that runs sums the requests of all ranks with its loss (`Trainer.train_step`).
3. `StopSignal.update` reads the sum, on a GPU a step later; start, validation and saves poll.
4. `Trainer.run_steps` saves the step and leaves its loop; background saves and hooks end.
5. train.py closes the process group and returns 75; exit_code.py records it for the launcher.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

from titan_lite.logging import write_line
from titan_lite.processes import signal_when_parent_dies
from titan_lite.resilience.exit_code import STOPPED, record

ALWAYS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
HANGUP_IS_IGNORED = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # as under nohup
STOPPING = ALWAYS if HANGUP_IS_IGNORED else (*ALWAYS, signal.SIGHUP)
LAUNCHER = "TITAN_LITE_LAUNCHER"  # in the environment of ranks: the process of launch.py
LAUNCHER_DEATH = "the death of its launcher"
AT_ONCE = "SIGINT (Ctrl-C) from now on, or SIGQUIT, ends the run at once, without a save"
FLAGS = 6  # index of a process's flags in /proc/PID/stat, counted from its state
EXITING = 4  # Linux's PF_EXITING, among these

_first_signal = ""  # name of the first signal received, or LAUNCHER_DEATH
_is_starting = False  # a signal ends the process
_describe: Callable[[], str] = str  # what the run does before it stops
# Held while a signal is recorded: after `end_start` has returned, none ends the process.
_recording = threading.RLock()
_launcher = 0  # process id of the launcher; 0: none whose death matters


def listen(*, starting: bool = True) -> None:
    """Wait for a signal in a thread.

    For the main thread, before others exist: a new thread inherits the mask.

    starting: a signal ends the process until `end_start` is called, even while it is in a library.
    """
    global _is_starting, _launcher
    _is_starting = starting
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGQUIT})  # the launcher blocks it
    # A library may unblock them, as multiprocessing's resource tracker does.
    for number in STOPPING:
        signal.signal(number, _record)
    _launcher = _watch_launcher()
    threading.Thread(target=_wait, name="signals", daemon=True).start()


def end_start(describe: Callable[[], str] = str) -> None:
    """Keep signals from ending the process from now on, since other ranks depend on it.

    describe: returns what the run does before it stops, for the first rank's log; "": nothing.
    """
    global _is_starting, _describe
    with _recording:
        _is_starting = False
        _describe = describe


def received() -> str:
    """Return the name of the first signal, LAUNCHER_DEATH, or ""."""
    return _first_signal


def _wait() -> None:
    _record(signal.sigwait(STOPPING))
    while True:
        number = signal.sigwait(STOPPING)
        # The kernel tells of one death for each thread of the launcher that inherits this process.
        died = _first_signal != LAUNCHER_DEATH and _launcher_has_died()
        if died or number == signal.SIGINT:
            why = LAUNCHER_DEATH if died else "SIGINT again"
            record(STOPPED)
            _end_at_once(f"{why}: ended at once, without a save")


def _end_at_once(why: str) -> NoReturn:
    write_line(f"[rank {os.environ.get('RANK', '0')}] {why}")
    os._exit(STOPPED)


def _record(number: int, frame: FrameType | None = None) -> None:
    """Record the first signal, or end a process that is starting."""
    global _first_signal
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    with _recording:
        if _first_signal:
            return
        _first_signal = LAUNCHER_DEATH if _launcher_has_died() else signal.Signals(number).name
        if _is_starting:
            _end_at_once(f"{received()}: stopped at the start, with nothing to save")
        doing = _describe() if os.environ.get("RANK", "0") == "0" else ""
        if doing:
            how = "" if LAUNCHER in os.environ else f"; {AT_ONCE}"
            write_line(f"[rank 0] {received()}: stopping after {doing}{how}")


def _launcher_has_died() -> bool:
    """Return True if there is a launcher, and its main thread ends or has ended.

    The kernel sends its signal a moment before the state tells the end. The launcher stays the
    parent until its last thread has ended, and of some threads here a moment longer.
    """
    if _launcher == 0:
        return False
    try:
        fields = Path(f"/proc/{_launcher}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended, or is not shown
        return os.getppid() != _launcher
    is_ending = fields[0] in ("Z", "X") or int(fields[FLAGS]) & EXITING != 0
    return is_ending or os.getppid() != _launcher


def _watch_launcher() -> int:
    """Have the kernel send SIGTERM when the launcher dies, even by SIGKILL.

    Returns its process id; 0 if there is none. Without torchrun the parent is a shell, whose end
    does not matter. Linux alone can do it.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or sys.platform != "linux":
        return 0
    launcher = int(os.environ.get(LAUNCHER) or os.getppid())
    signal_when_parent_dies(signal.SIGTERM, launcher)
    return launcher
