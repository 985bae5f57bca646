"""The run's log: plain lines on the ranks named in LOG_RANK (default 0), on standard output; and `events.jsonl`.

    init_logging(rank=0, world_size=2)
    logger.info("step 1")
    events.keep(dump_folder, rank=0)                       # from now on
    logger.info("saved", extra={"event": "checkpoint"})    # {"time": ..., "event": "checkpoint", "step": 50, ...}

`events.jsonl` has an object a line: time, event, step, text. It holds what has `extra={"event": ...}`, and warnings and errors.
"""

import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TextIO

logger = logging.getLogger("titan_lite")


def log_ranks(world_size: int) -> set[int]:
    """The ranks that print. Raises ValueError where LOG_RANK is not a list of ranks that there are."""
    text = os.environ.get("LOG_RANK", "0")
    ranks = text.replace(" ", "").split(",")
    if not all(re.fullmatch("[0-9]{1,9}", rank) and int(rank) < world_size for rank in ranks):
        raise ValueError(f"LOG_RANK={text}: expected ranks below {world_size}, separated by commas, such as LOG_RANK=0")
    return {int(rank) for rank in ranks}


def init_logging(rank: int = 0, world_size: int = 0, stream: TextIO | None = None, *, all_warnings: bool = True) -> None:
    """Warnings and errors are shown on every rank, the rest on the ranks of LOG_RANK. Raises ValueError.

    world_size: 0 of a program that is no run, and shows everything. stream: None is standard output. all_warnings: otherwise
    those of libraries are shown once, as a line of these ranks, and the HARMLESS ones not at all.
    """
    ranks = log_ranks(world_size) if world_size else {rank}
    console.to = stream
    console.setLevel(logging.INFO if rank in ranks else logging.WARNING)
    name = "" if ranks == {0} and rank == 0 else f"[rank {rank}] "
    console.setFormatter(logging.Formatter(f"%(asctime)s {name}%(message)s", datefmt="%H:%M:%S"))
    logger.handlers[:] = [console, events]
    logger.propagate = False
    logger.setLevel(logging.INFO)
    if not all_warnings:
        hush(rank in ranks)


class Console(logging.StreamHandler):
    """to: None is standard output; around: makes a context for each line, where something else is drawn on the terminal too."""

    to: TextIO | None = None
    around: Callable[[], AbstractContextManager] = staticmethod(nullcontext)

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = self.to or sys.stdout  # of now: tests and notebooks change it
        with self.around():
            super().emit(record)


class Events(logging.Handler):
    """Writes events.jsonl once `keep` was called. step: the loop's, for events that do not say theirs.

    owned: False where the folder has become another run's.
    """

    path: Path | None = None
    step = 0
    owned: Callable[[], bool] = staticmethod(lambda: True)

    def keep(self, folder: Path, rank: int) -> None:
        """The first rank writes every event; the others write errors alone, such as a verdict, which one of them has for all."""
        self.path, self.owned = folder / "events.jsonl", Events.owned
        self.setLevel(logging.INFO if rank == 0 else logging.ERROR)

    def emit(self, record: logging.LogRecord) -> None:
        event = getattr(record, "event", None if record.levelno < logging.WARNING else record.levelname.lower())
        if not event or self.path is None or not self.owned():
            return
        time = datetime.now(timezone.utc).isoformat(timespec="seconds")
        entry = {"time": time, "event": event, "step": getattr(record, "step", self.step), "text": record.getMessage()}
        with suppress(OSError), self.path.open("ab", buffering=0) as file:  # with no folder, or a full disk, the run can go on
            file.write(json.dumps(entry).encode() + b"\n")  # at once, since ranks share the file

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Within: an exception is an event, of the rank that keeps everything."""
        try:
            yield
        except Exception as error:
            if self.level == logging.INFO:
                text = f"{type(error).__name__}: {error}"
                self.emit(logging.makeLogRecord({"msg": text, "event": "failed", "levelno": logging.ERROR}))
            raise


console, events = Console(sys.stdout), Events()

HARMLESS = (  # warnings of libraries that a run need not care about, word for word
    # each trace has a file of its own
    "UserWarning: Warning: Profiler clears events at the end of each cycle. Only events from the current cycle will be reported. "
    "To keep events across cycles, set acc_events=True.",
    # which is this rank's own, as the trainer sets it
    "UserWarning: barrier(): using the device under current context. You can specify `device_id` in `init_process_group` to mute "
    "this warning.",
)


def hush(shown: bool) -> None:
    """Python's warnings become lines of the log, each once, where shown; elsewhere torch's loggers have errors alone."""
    told = set(HARMLESS)
    if not shown:
        os.environ.setdefault("TORCH_LOGS", "-all")  # read when torch is imported

    def show_once(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any, **__: Any) -> None:
        text = f"{category.__name__}: {message}"
        if shown and text not in told:
            logger.warning(f"{text} ({filename}:{lineno})", extra={"event": ""})  # of a library, and not of the run
        told.add(text)

    warnings.showwarning = show_once
