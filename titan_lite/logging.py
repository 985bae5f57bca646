"""Write the run's log: lines on standard output of the ranks in LOG_RANK, and events.jsonl.

    init_logging(rank=0, world_size=2)
    logger.info("step 1")                                  # by default rank 0 prints
    events.keep(dump_folder, all_events=True)              # events.jsonl from now on
    logger.info("saved", extra={"event": "checkpoint"})    # a line there

`events.jsonl` has an object per line: time, event, step, text, and of a start what it ran on
(`extra={"facts": ...}`) and the seconds of its parts ("seconds"). It has records with
`extra={"event": ...}`, warnings and errors.
"""

import itertools
import json
import logging
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import TextIO

from titan_lite.text import without_secrets

logger = logging.getLogger("titan_lite")
# `extra` of a warning about this replica group alone; of others, which all groups have, the
# first one prints them
OF_GROUP = {"of_group": True}


def _mask_secrets(record: logging.LogRecord) -> bool:
    record.msg = without_secrets(record.getMessage())
    record.args = ()
    return True


logger.addFilter(_mask_secrets)


def write_line(line: str) -> None:
    """Write a line to standard error, if that is open. Safe in a signal handler, where print and
    logging are not.
    """
    with suppress(OSError):  # the terminal or pipe is closed
        os.write(2, f"{line}\n".encode(errors="backslashreplace"))


def print_line(line: str, to: TextIO | None = None) -> None:
    """Print a line to a stream, if that can be written. to: None is standard error."""
    with suppress(OSError):
        print(line, file=to or sys.stderr, flush=True)


def drop_pending(stream: TextIO) -> None:
    """Send what a standard stream has not written to the null device: Python would try again at
    its end, and end with exit code 120.
    """
    with suppress(OSError), open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), stream.fileno())


@contextmanager
def telling_if_slow(what: str, seconds: Sequence[float] = (10, 30, 60)) -> Iterator[None]:
    """Return a context that tells on standard error what takes so many seconds, and from then on
    each time that the last of them have passed again. On the first rank alone.

    what: such as "reading data.path".
    """
    ended = threading.Event()

    def tell() -> None:
        before = 0.0
        for after in itertools.chain(seconds, itertools.count(2 * seconds[-1], seconds[-1])):
            if ended.wait(after - before):
                return
            before = after
            write_line(without_secrets(f"titan_lite: {what} has taken {after:g} s so far"))

    if os.environ.get("RANK", "0") == "0":
        threading.Thread(target=tell, name="slow", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def log_ranks(world_size: int) -> set[int]:
    """Return the ranks that print.

    Raises ValueError if LOG_RANK is not a list of existing ranks.
    """
    text = os.environ.get("LOG_RANK", "0")
    ranks = text.replace(" ", "").split(",")
    if not all(re.fullmatch("[0-9]{1,9}", rank) and int(rank) < world_size for rank in ranks):
        raise ValueError(
            f"LOG_RANK={text}: use ranks below {world_size}, separated by commas, such as"
            " LOG_RANK=0"
        )
    return {int(rank) for rank in ranks}


def init_logging(
    rank: int = 0,
    world_size: int = 0,
    stream: TextIO | None = None,
    *,
    group: int | None = None,
    all_warnings: bool = True,
) -> None:
    """Show warnings and errors on every rank, and the rest on the ranks of LOG_RANK.

    Raises ValueError.

    world_size: 0 for a program that is not a run, and shows everything. stream: None is standard
    output. group: number of this replica group, which each line names. all_warnings: False shows
    warnings of libraries once, as a line of these ranks, and the HARMLESS ones not at all.
    """
    ranks = log_ranks(world_size) if world_size else {rank}
    console.to = stream
    console.is_of_shown_rank = rank in ranks
    console.begin(waits=bool(group))
    name = "" if ranks == {0} and rank == 0 else f"[rank {rank}] "
    if group is not None:
        name = f"[group {group}] {name}"
    console.setFormatter(logging.Formatter(f"%(asctime)s {name}%(message)s", datefmt="%H:%M:%S"))
    logger.handlers[:] = [console, events]
    logger.propagate = False
    logger.setLevel(logging.INFO)
    if not all_warnings:
        hush(rank in ranks)


class Console(logging.StreamHandler):
    """The handler that prints lines.

    A stream that cannot be written, such as a pipe whose reader has ended, is reported once.
    """

    to: TextIO | None = None  # None: standard output
    is_of_shown_rank = True
    is_lost = False  # the stream could not be written
    is_of_first = True  # of the replica groups this is the one that prints
    # Warnings of a group that does not know yet whether it is that one; None: it knows.
    held: list[logging.LogRecord] | None = None
    # a context for each line, such as of a progress bar
    around: Callable[[], AbstractContextManager] = staticmethod(nullcontext)

    def begin(self, *, waits: bool) -> None:
        """Begin to print. waits: this replica group does not know yet whether it is the first,
        and keeps warnings that all groups have.
        """
        self.show(not waits)
        self.held = [] if waits else None

    def show(self, shown: bool) -> None:
        """Print all lines, if this rank is shown at all, in the first replica group. Another
        one prints errors, and warnings about itself.
        """
        self.is_of_first = shown
        self.setLevel(logging.INFO if shown and self.is_of_shown_rank else logging.WARNING)
        held, self.held = self.held, None
        if shown and held:
            for record in held:
                self.handle(record)

    def emit(self, record: logging.LogRecord) -> None:
        is_own = record.levelno >= logging.ERROR or hasattr(record, "of_group")
        if not (self.is_of_first or is_own):
            if self.held is not None:
                self.held.append(record)
            return
        self.stream = self.to or sys.stdout  # read each time: tests and notebooks change it
        with self.around():
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        if not self.is_lost:
            super().handleError(record)
        self.is_lost = True


class Events(logging.Handler):
    """The handler that writes events.jsonl, once `keep` was called."""

    path: Path | None = None
    step = 0  # of the loop, for events without a step

    def keep(self, folder: Path, *, all_events: bool) -> None:
        """Start to write to `folder`: every event, on the first rank, or errors."""
        self.path = folder / "events.jsonl"
        self.setLevel(logging.INFO if all_events else logging.ERROR)

    def stop(self) -> None:
        """Write nothing more, since the folder is another run's."""
        self.path = None

    def emit(self, record: logging.LogRecord) -> None:
        of_level = record.levelname.lower() if record.levelno >= logging.WARNING else None
        event = getattr(record, "event", of_level)
        if not event or self.path is None:
            return
        time = datetime.now(timezone.utc).isoformat(timespec="seconds")
        entry = {
            "time": time,
            "event": event,
            "step": getattr(record, "step", self.step),
            "text": record.getMessage(),
        }
        for name in ("facts", "seconds"):
            if hasattr(record, name):
                entry[name] = getattr(record, name)
        line = json.dumps(entry).encode() + b"\n"
        # The run goes on without a folder or on a full disk. One write, since ranks share the file.
        with suppress(OSError), self.path.open("ab", buffering=0) as file:
            file.write(line)

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Return a context that writes an exception as an event, on the first rank."""
        try:
            yield
        except Exception as error:
            if self.level == logging.INFO:
                text = without_secrets(f"{type(error).__name__}: {error}")
                fields = {"msg": text, "event": "failed", "levelno": logging.ERROR}
                self.emit(logging.makeLogRecord(fields))
            raise


console = Console(sys.stdout)
events = Events()

HARMLESS = (  # exact texts of warnings of libraries that do not matter here
    # the trainer has set this rank's device
    (
        "UserWarning: barrier(): using the device under current context. You can specify"
        " `device_id` in `init_process_group` to mute this warning."
    ),
)


def hush(shown: bool) -> None:
    """Log each of Python's warnings once if `shown`; else drop them and torch's log."""
    seen = set(HARMLESS)
    if not shown:
        os.environ.setdefault("TORCH_LOGS", "-all")  # read when torch is imported

    def show_once(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        *_: object,
        **__: object,
    ) -> None:
        text = f"{category.__name__}: {message}"
        if shown and text not in seen:
            no_event = {"event": ""}  # of the run
            logger.warning(f"{text} ({filename}:{lineno})", extra=no_event)
        seen.add(text)

    warnings.showwarning = show_once
