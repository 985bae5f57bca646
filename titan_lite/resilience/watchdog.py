"""End a hanging run on all ranks, with a verdict that names the rank that the others wait for.

    watchdog = Watchdog(config.comm, rank=0, world_size=4, notes=started)
    watchdog.enter("start", "init_timeout_seconds")          # a key of [comm]: seconds without progress that are a hang
    watchdog.enter("step 1", "train_timeout_seconds")
    with watchdog.within("save", "init_timeout_seconds"): ...
    watchdog.beat()                                          # progress; collectives and compiling are progress, too
    watchdog.rest()                                          # no limit
    with watchdog.reporting(CheckpointError): ...            # an error that ends this rank is sent to the others

A rank that hangs calls all others through the store of the process group. Each rank writes its
place in the code and its flight recorder's entries there. The first one collects the records that
arrive within GRACE seconds, and prints the verdict (verdict.py); then all exit with code 1. If a
library holds the interpreter lock, so that no thread can run, faulthandler prints the place and
ends the process.
"""

import contextlib
import faulthandler
import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from types import FrameType
from typing import Any, NoReturn

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from titan_lite.config import Comm
from titan_lite.distributed.process_group import is_communication
from titan_lite.logging import logger
from titan_lite.resilience import TrainingError
from titan_lite.resilience.hang_report import Note, Record, groups_of, place, standing, verdict

GRACE = 10.0  # seconds to wait for the records of other ranks, or the limit if that is shorter
PATIENCE = (
    3 * GRACE
    # seconds by which a collective's time limit exceeds that of its phase, so that the verdict comes
    # first
)
GONE = (
    3.0  # seconds to wait for records after a lost connection, which all ranks have when one dies
)
# seconds to live after the verdict: if this rank hosts the store, the others must read it, too
HOST = 1.0
RESTING = float("inf")

# torch 2.14 made it public
_set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout


class Watchdog:
    """The watchdog of one process. Between `enter` and `rest` the process may end at any moment.

    A single rank has no threads.

    notes: notes on collectives, appended by the code that starts them. apart: description of a
    process group with its own limit.
    """

    def __init__(
        self, comm: Comm, rank: int, world_size: int, *, notes: Iterable[Note] = (), apart: str = ""
    ):
        self.comm, self.apart = comm, apart
        self.rank, self.world_size, self.notes = rank, world_size, notes
        self.phase, self.limit, self.key = "start", RESTING, ""
        self.last_progress = time.monotonic()
        self.seen: tuple[str, int | None] = (
            "",
            None,
        )  # (collectives, place in the compiler) at the last check
        self.thread = threading.get_ident()  # the thread whose place in the code is recorded
        self.failed_in: FrameType | None = None  # frame in which a collective failed
        self.store: Any = None
        self.ending = threading.Lock()
        if world_size > 1:
            for target in (self._watch, self._listen):
                threading.Thread(target=target, name="watchdog", daemon=True).start()

    def enter(self, phase: str, key: str) -> None:
        """Start a phase of the run, in which comm.<key> seconds without progress are a hang.

        The process groups' own limit is PATIENCE seconds longer.
        """
        self.phase, self.key, self.limit = phase, key, getattr(self.comm, key)
        for group in dist.distributed_c10d._world.pg_map if dist.is_initialized() else ():
            if group.group_desc != self.apart:
                _set_timeout(timedelta(seconds=self.limit + PATIENCE), group)
        self.beat()
        if self.world_size > 1:  # at once: the thread that renews it may not run again
            self._end_if_held()

    @contextlib.contextmanager
    def within(self, phase: str, key: str) -> Iterator[None]:
        before = self.phase, self.key
        self.enter(phase, key)
        yield
        self.enter(*before)

    def beat(self, phase: str = "") -> None:
        """Record progress, perhaps to another phase with the same limit."""
        self.phase = phase or self.phase
        self.last_progress = time.monotonic()

    def rest(self) -> None:
        self.limit = RESTING

    def hangs(self) -> bool:
        return time.monotonic() - self.last_progress > self.limit

    @contextlib.contextmanager
    def reporting(self, *explained: type[Exception]) -> Iterator[None]:
        """Return a context that sends an error of this rank to the others, or receives theirs.

        The watchdog rests afterwards.

        explained: errors whose message is sufficient. These, and the failure of another rank, are
        raised as TrainingError.
        """
        try:
            yield
        except Exception as error:
            cause = self._failed(error)
            if cause or isinstance(error, explained):
                alike = not cause and getattr(error, "everywhere", False)
                raise TrainingError(cause or str(error), everywhere=alike) from error
            raise
        finally:
            self.rest()

    def _failed(self, error: Exception) -> str | None:
        """Send the error to the other ranks.

        For an error of communication, return the failure of the rank that caused it; if no rank has
        sent one, end the process with a verdict.
        """
        if self.store is None:
            return None
        if not is_communication(error):
            failure = f"rank {self.rank} failed: {type(error).__name__}: {_first_line(error)}"
            _within(GONE, lambda: self.store.compare_set("cause", "", failure))
            return None
        cause = _within(2 * GONE, lambda: self._wait_for("cause", GONE))
        if cause:
            return f"stopped, since {cause}"
        self.failed_in = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
        self._end(
            f"a collective of rank {self.rank} failed in {self.phase}: {_first_line(error)}", GONE
        )

    def _end_if_held(self) -> None:
        """Have faulthandler end the process if its interpreter runs no thread until the limit, and
        PATIENCE, are over.
        """
        faulthandler.dump_traceback_later(
            self.limit + PATIENCE, exit=True, file=sys.__stderr__ or 2
        )

    def _watch(self) -> NoReturn:
        while True:
            time.sleep(0.25)
            if self.limit == RESTING:
                faulthandler.cancel_dump_traceback_later()
                continue
            self._end_if_held()
            seen = (
                json.dumps(self._trace(entries=False)["pg_status"]),
                compiling_at(sys._current_frames().get(self.thread)),
            )
            if seen != self.seen:
                self.seen = seen
                self.beat()
            if self.hangs():
                limit = f"{self.limit:g} s in {self.phase} (comm.{self.key} = {self.limit:g})"
                self._end(
                    f"hang: rank {self.rank} has made no progress for {limit}",
                    min(GRACE, self.limit),
                )

    def _listen(self) -> None:
        """Wait for the call of another rank, in a thread of its own, since a lost store may never
        answer.
        """
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        try:
            store = dist.TCPStore(
                host, port, is_master=False, timeout=timedelta(days=1), wait_for_workers=False
            )
            # torchrun's store survives a restart of the ranks.
            self.store = dist.PrefixStore(
                f"watchdog/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store
            )
            while self.limit == RESTING or not self.store.check(["call"]):
                if self.limit != RESTING and self.store.check(["cause"]):
                    self._end_after(self.store.get("cause").decode())
                time.sleep(1)
        except dist.DistError:
            return  # the process that hosts the store has ended
        self._end("", GRACE)

    def _end_after(self, cause: str) -> None:
        """Exit if this rank does not detect the failure of another: with NCCL, unlike gloo, its
        peers keep waiting.

        Returns if the training thread detects it within GRACE seconds and ends the run itself.
        """
        deadline = time.monotonic() + GRACE
        while time.monotonic() < deadline:
            if self.limit == RESTING:
                return
            time.sleep(0.25)
        self.rest()  # no time limit from here on
        for thread in threading.enumerate():
            if not thread.daemon and thread is not threading.main_thread():
                thread.join()  # a background save, in which the failed rank still takes part
        logger.error(f"stopped, since {cause}")
        self._exit()

    def _end(self, why: str, grace: float) -> NoReturn:
        """Agree on the verdict, print it and exit.

        why: the reason of this rank's call, or "" if another rank called.
        """
        self.ending.acquire()  # never released: a second thread waits here for the end
        faulthandler.dump_traceback_later(2 * PATIENCE, exit=True, file=sys.__stderr__ or 2)
        text = _within(grace + GRACE, lambda: self._exchange(why, grace))
        if text is None:
            store = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            logger.error(
                f"{why or 'another rank has called'}; the store at {store} does not answer, so the"
                " others are not known (it is torchrun's or, without that, rank"
                f" 0's)\n{standing(self.rank, self.record())}"
            )
        self._exit()

    def _exit(self) -> NoReturn:
        for handler in logger.handlers:
            handler.flush()
        os._exit(1)

    def _exchange(self, why: str, grace: float) -> str:
        """Write this rank's record.

        The first rank makes, prints and returns the verdict; the others return "".
        """
        self.store.set(f"record/{self.rank}", json.dumps(self.record()))
        first = self.store.add("arrived", 1) == 1
        why = self.store.compare_set("call", "", why or "called").decode()
        if not first:
            with contextlib.suppress(
                dist.DistError
            ):  # the process that hosts the store has ended, after the verdict
                self._wait_for("verdict", grace + GRACE / 2)
                time.sleep(HOST)
            return ""
        deadline = time.monotonic() + grace
        while self.store.add("arrived", 0) < self.world_size and time.monotonic() < deadline:
            time.sleep(0.1)
        answers = [rank for rank in range(self.world_size) if self.store.check([f"record/{rank}"])]
        records = {rank: json.loads(self.store.get(f"record/{rank}")) for rank in answers}
        text = f"{why}\n{verdict(records, self.world_size)}"
        logger.error(text)
        self.store.set("verdict", text)
        time.sleep(HOST)
        return text

    def _wait_for(self, key: str, seconds: float) -> str:
        """Return the text that another rank writes under this key, or "" after this time."""
        deadline = time.monotonic() + seconds
        while not self.store.check(
            [key]
        ):  # the store's own wait would print warnings at its time limit
            if time.monotonic() > deadline:
                return ""
            time.sleep(0.1)
        return self.store.get(key).decode()

    def record(self) -> Record:
        groups = dist.distributed_c10d._world.pg_names if dist.is_initialized() else {}
        members = {
            str(name): sorted(dist.get_process_group_ranks(group)) for group, name in groups.items()
        }
        return {
            "phase": self.phase,
            "place": place(self.failed_in or sys._current_frames().get(self.thread)),
            "groups": groups_of(self._trace(entries=True), members, self.notes),
        }

    def _trace(self, entries: bool) -> dict[str, Any]:
        """Return the flight recorders of gloo and, on a GPU, of NCCL as one; empty if they are off.

        On GPUs, saving and loading use gloo, too.
        """
        names = (
            "_dump_fr_trace_json",
            "_dump_nccl_trace_json",
        )  # a build without CUDA lacks the second
        traces = [
            json.loads(getattr(c10d, name)(entries, False) or "{}")
            for name in names
            if hasattr(c10d, name)
        ]
        return {
            "pg_status": [trace.get("pg_status") for trace in traces],
            "entries": [entry for trace in traces for entry in trace.get("entries", [])],
        }


def compiling_at(frame: FrameType | None) -> int | None:
    """Return a number for the place at which a thread compiles, which changes with progress; None
    if it does not compile.

    Compiling a graph of 80 blocks takes longer than a reasonable time limit.
    """
    places, compiles = [], False
    while frame is not None:
        places.append((frame.f_code, frame.f_lineno))
        compiles = compiles or frame.f_code.co_filename.endswith("torch/_dynamo/convert_frame.py")
        frame = frame.f_back
    return hash(tuple(places)) if compiles else None


def _first_line(error: Exception) -> str:
    """Return the first line of a message, without the source location and the advice that gloo
    adds.
    """
    return re.sub(
        r"^\[\S+:\d+\] |\. This is typically caused .*", "", str(error).partition("\n")[0]
    )


def _within(seconds: float, function: Callable[[], Any]) -> Any:
    """Return the result of a function, or None if it fails or takes longer."""
    results: list[Any] = []

    def run() -> None:
        with contextlib.suppress(dist.DistError):
            results.append(function())

    thread = threading.Thread(target=run, name="watchdog", daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None
