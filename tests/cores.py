"""Share this machine's cores among the workers of pytest-xdist, so that ranks count, too.

There are places for twice as many processes as there are cores, since ranks often wait, for each
other or for a disk. A test has one place, or as many as its mark says (conftest.py):
@pytest.mark.ranks(2). What starts ranks and waits for them gives them one place each instead of its
own:

    with cores.given_to(2):
        ...                     # two ranks run

A place is a lock on a file that all workers know. A worker that waits for several takes each that
becomes free, and no other worker may overtake it, so a test of eight ranks gets its places, too.
Where there are fewer places than a test has ranks, it takes all of them. Without workers there is
nothing to share, and nothing happens.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
PLACES = 2 * CORES

_folder: Path | None = None  # of the files
_held: list[IO] = []


def share(folder: Path) -> None:
    """Share the places with the other workers that name the same folder."""
    global _folder
    _folder = folder


@contextmanager
def taken(count: int = 1) -> Iterator[None]:
    """Have `count` places, or all that there are, in addition to those that are held."""
    before = len(_held)
    _take(min(count, PLACES))
    try:
        yield
    finally:
        _give_back(len(_held) - before)


@contextmanager
def given_to(ranks: int) -> Iterator[None]:
    """Have one place for each rank instead of those that are held."""
    own = len(_held)
    _give_back(own)
    _take(min(ranks, PLACES))
    try:
        yield
    finally:
        _give_back(len(_held))
        _take(own)


def _take(count: int) -> None:
    if _folder is None or count == 0:
        return
    with open(_folder / "turn", "w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)  # until all are taken
        wanted = len(_held) + count
        while not _take_free(wanted):
            time.sleep(0.01)


def _take_free(wanted: int) -> bool:
    """Take places that are free until `wanted` are held. Return True if they are."""
    for place in range(PLACES):
        if len(_held) == wanted:
            break
        file = open(_folder / str(place), "w")  # noqa: SIM115 open as long as the place is held
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
        else:
            _held.append(file)
    return len(_held) == wanted


def _give_back(count: int) -> None:
    for _ in range(min(count, len(_held))):
        file = _held.pop()
        # A process that was forked meanwhile has the file, too: closing it alone would not do.
        fcntl.flock(file, fcntl.LOCK_UN)
        file.close()
