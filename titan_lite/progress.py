"""The phase of a run that this process is in, and signs that it makes progress.

    progress.start_phase("start", "init_timeout_seconds")    # a key of [comm]: the limit of a wait
    progress.beat()                                          # something is done
    progress.beat("step 7")                                  # the next phase, with the same limit
    with progress.phase("save", "init_timeout_seconds"): ...     # then the one before goes on
    with progress.phase(progress.COMPILING): ...             # with the limit of the one before
    progress.end_phases()                                    # no limit, until the next phase
    progress.report_to(Watchdog(...))

By default nobody listens. features/watchdog/ ends a run that makes no progress. Imports no torch.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

COMPILING = "compiling"  # a phase in which no step is done for a long time
# Seconds by which torch's limit of a collective exceeds that of a phase: who listens speaks first
PATIENCE = 30.0


class Phase(NamedTuple):
    name: str  # in messages: "step 7"
    limit_key: str  # of [comm]; "": there is no limit
    began: float  # by time.monotonic


class Listener:
    """Hears where this process is; does nothing."""

    def on_phase(self, phase: Phase) -> None:
        """A phase begins, or goes on after another one."""

    def on_beat(self) -> None:
        """Something is done. May come from any thread."""

    def on_lost_rank(self, error: Exception) -> None:
        """A collective has failed, and no other rank has told why. Need not return."""


current = Phase("start", "", time.monotonic())
_listener = Listener()


def report_to(listener: Listener) -> None:
    """Have a listener in place of the one before hear of the current phase, and of all that
    follows.
    """
    global _listener
    _listener = listener
    listener.on_phase(current)


def reports_to(listener: Listener) -> bool:
    """Return False if another listener has taken its place."""
    return listener is _listener


def start_phase(name: str, limit_key: str) -> None:
    """Begin a phase in which comm.<limit_key> seconds without a beat or a collective are a hang."""
    _begin(Phase(name, limit_key, time.monotonic()))


def beat(name: str = "") -> None:
    """Tell that something is done, perhaps that another phase with the same limit begins."""
    global current
    if name not in ("", current.name):
        current = Phase(name, current.limit_key, time.monotonic())
    _listener.on_beat()


@contextmanager
def phase(name: str, limit_key: str = "") -> Iterator[None]:
    """Return a context for a phase; then the one before goes on. After an error it does not, so
    that reports name the phase of the error. limit_key: "": that of the phase before.
    """
    before = current
    start_phase(name, limit_key or before.limit_key)
    yield
    _begin(before)


def end_phases() -> None:
    """Have no limit until the next phase begins."""
    start_phase(current.name, "")


def lost_rank(error: Exception) -> None:
    """Tell that a collective has failed, and that no other rank has told why. Need not return."""
    _listener.on_lost_rank(error)


def _begin(phase: Phase) -> None:
    global current
    current = phase
    _listener.on_phase(phase)
