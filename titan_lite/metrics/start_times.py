"""Measure the seconds of each part of a start, from the launcher to the end of the first step.

times = StartTimes.of_process()         # what came before this line is known to the system
times.begin("imports")
times.begin("first step")
times.end()
times.seconds                           # {"launcher": 1.4, "recipe": 0.3, "imports": 2.9, ...}
"""

import os
import time
from contextlib import suppress
from pathlib import Path

STARTED = 19  # index of a process's start in /proc/PID/stat, counted from its state; in ticks
FIRST_ATTEMPT = "0"  # of torchrun, which starts the ranks again after a failure
CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # that of /proc; macOS has none


class StartTimes:
    """The parts of a start, in order; a part ends where the next one begins."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}  # of the parts that have ended
        self._part = ""
        self._began = _now()

    @classmethod
    def of_process(cls) -> "StartTimes":
        """Return times that begin with the launcher, and are in the part "recipe" of this process.

        The launcher is the process that has started this one, and ./run_train.sh before it: a
        program that a shell executes in its place keeps the shell's start. It does not count where
        it has started ranks before. Outside of Linux nothing before this call is known.
        """
        times = cls()
        times._part = "recipe"
        with suppress(OSError, IndexError, ValueError):
            times._began = _start_of(os.getpid())
            if os.environ.get("TORCHELASTIC_RESTART_COUNT") == FIRST_ATTEMPT:
                times.seconds["launcher"] = times._began - _start_of(os.getppid())
        return times

    def begin(self, part: str) -> None:
        """End the present part, and begin another one. Parts of one name are added up."""
        self.end()
        self._part = part

    def end(self) -> None:
        """End the present part."""
        now = _now()
        if self._part:
            self.seconds[self._part] = self.seconds.get(self._part, 0.0) + now - self._began
        self._part = ""
        self._began = now

    def describe(self) -> str:
        """Return "3.5 s: imports 2.1, first step 1.4"."""
        parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in self.seconds.items())
        return f"{sum(self.seconds.values()):.1f} s: {parts}"


def _now() -> float:
    """Return seconds since the system's boot, as /proc counts them."""
    return time.clock_gettime(CLOCK)


def _start_of(pid: int) -> float:
    """Return the start of a process, in seconds since the system's boot. Raises OSError."""
    # the name of the program may have spaces and brackets
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[STARTED]) / os.sysconf("SC_CLK_TCK")
