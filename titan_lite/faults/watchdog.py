"""Ends a run that hangs, on all ranks, with a verdict that names the rank that the others wait for.

    watchdog = Watchdog(config.comm, rank=0, world_size=4, notes=started)
    watchdog.enter("start", "init_timeout_seconds")          # of [comm]: so many seconds without progress are a hang
    watchdog.enter("step 1", "train_timeout_seconds")
    with watchdog.within("save", "init_timeout_seconds"): ...
    watchdog.beat()                                          # progress; so is a collective entered or left, or torch compiling
    watchdog.rest()                                          # nothing is waited for
    with watchdog.reporting(CheckpointError): ...            # an error that ends this rank is told to the others, which lose it

A rank that hangs calls all others through the store that the process group was made with. Each rank writes its place in the code
and its flight recorder's entries there. The first one collects the records that come within GRACE seconds and prints the verdict
(verdict.py); then all exit with code 1. Where a library holds the interpreter and no thread can run, faulthandler prints the
place and ends the process.
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
from titan_lite.faults import TrainingError
from titan_lite.faults.verdict import Note, Record, groups_of, place, standing, verdict
from titan_lite.logging import logger
from titan_lite.ranks import is_communication

GRACE = 10.0  # seconds for the records of other ranks, or the limit, where that is shorter
PATIENCE = 3 * GRACE  # seconds that a collective gets after the limit of its phase, so that the verdict comes first
GONE = 3.0  # seconds for those of ranks that have lost a connection, as all do when one dies
HOST = 1.0  # seconds that a rank goes on after it has seen the verdict: where it hosts the store, the others must see it too
RESTING = float("inf")

# torch 2.14 made it public
_set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout


class Watchdog:
    """One in each process; a rank that is alone has no others to wait for it, and no threads. Between enter and rest the process
    may end at any moment.

    notes: of collectives, kept up to date by the code that starts them; apart: description of a process group that has a limit of
    its own.
    """

    def __init__(self, comm: Comm, rank: int, world_size: int, *, notes: Iterable[Note] = (), apart: str = ""):
        self.comm, self.apart = comm, apart
        self.rank, self.world_size, self.notes = rank, world_size, notes
        self.phase, self.limit, self.key = "start", RESTING, ""
        self.last_progress = time.monotonic()
        self.seen: tuple[str, int | None] = "", None  # collectives, place in the compiler
        self.thread = threading.get_ident()  # the one whose place in the code is recorded
        self.failed_in: FrameType | None = None  # where a collective failed, if one did
        self.store: Any = None
        self.ending = threading.Lock()
        if world_size > 1:
            for target in (self._watch, self._listen):
                threading.Thread(target=target, name="watchdog", daemon=True).start()

    def enter(self, phase: str, key: str) -> None:
        """From now on comm.<key> seconds without progress are a hang, in this phase of the run.

        So they are in a collective, some seconds later, should nobody have said so by then.
        """
        self.phase, self.key, self.limit = phase, key, getattr(self.comm, key)
        for group in dist.distributed_c10d._world.pg_map if dist.is_initialized() else ():
            if group.group_desc != self.apart:
                _set_timeout(timedelta(seconds=self.limit + PATIENCE), group)
        self.beat()

    @contextlib.contextmanager
    def within(self, phase: str, key: str) -> Iterator[None]:
        before = self.phase, self.key
        self.enter(phase, key)
        yield
        self.enter(*before)

    def beat(self, phase: str = "") -> None:
        """Progress, perhaps to another phase within the same limit."""
        self.phase = phase or self.phase
        self.last_progress = time.monotonic()

    def rest(self) -> None:
        self.limit = RESTING

    def hangs(self) -> bool:
        return time.monotonic() - self.last_progress > self.limit

    @contextlib.contextmanager
    def reporting(self, *explained: type[Exception]) -> Iterator[None]:
        """Within: the other ranks learn of the error that ends this one, and this one of theirs. Afterwards it rests.

        explained: errors whose message is enough. These, and the failure of another rank, are raised as TrainingError.
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
        """Tell the other ranks why they will lose this one. For an error of communication, return the failure of another rank
        that is behind it; where none has told any, a verdict ends the process."""
        if self.store is None:
            return None
        if not is_communication(error):
            told = f"rank {self.rank} failed: {type(error).__name__}: {_first_line(error)}"
            _within(GONE, lambda: self.store.compare_set("cause", "", told))
            return None
        cause = _within(2 * GONE, lambda: self._wait_for("cause", GONE))
        if cause:
            return f"stopped, since {cause}"
        self.failed_in = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
        self._end(f"a collective of rank {self.rank} failed in {self.phase}: {_first_line(error)}", GONE)

    def _watch(self) -> NoReturn:
        while True:
            time.sleep(0.25)
            if self.limit == RESTING:
                faulthandler.cancel_dump_traceback_later()
                continue
            # Should this thread not run again. It does not count progress, which is only seen here.
            faulthandler.dump_traceback_later(self.limit + PATIENCE, exit=True, file=sys.__stderr__ or 2)
            seen = json.dumps(self._trace(entries=False)["pg_status"]), compiling_at(sys._current_frames().get(self.thread))
            if seen != self.seen:
                self.seen = seen
                self.beat()
            if self.hangs():
                limit = f"{self.limit:g} s in {self.phase} (comm.{self.key} = {self.limit:g})"
                self._end(f"hang: rank {self.rank} has made no progress for {limit}", min(GRACE, self.limit))

    def _listen(self) -> None:
        """Waits for the call of another rank. Apart from the clock, since a store that is gone may not answer for ever."""
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        try:
            store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(days=1), wait_for_workers=False)
            # The store of torchrun lives on when it starts the ranks again.
            self.store = dist.PrefixStore(f"watchdog/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
            while self.limit == RESTING or not self.store.check(["call"]):
                if self.limit != RESTING and self.store.check(["cause"]):
                    self._end_after(self.store.get("cause").decode())
                time.sleep(1)
        except dist.DistError:
            return  # the process that hosts the store has ended
        self._end("", GRACE)

    def _end_after(self, cause: str) -> None:
        """Exit where this rank does not notice the failure of another: NCCL, unlike gloo, leaves its peers waiting.

        Returns if the training thread notices within GRACE seconds and ends the run itself.
        """
        deadline = time.monotonic() + GRACE
        while time.monotonic() < deadline:
            if self.limit == RESTING:
                return
            time.sleep(0.25)
        self.rest()  # what follows has no time limit
        for thread in threading.enumerate():
            if not thread.daemon and thread is not threading.main_thread():
                thread.join()  # a save in the background, which the failed rank takes part in until it is whole
        logger.error(f"stopped, since {cause}")
        self._exit()

    def _end(self, why: str, grace: float) -> NoReturn:
        """Agree on the verdict, print it, exit. why: what made this rank call, empty where it was called."""
        self.ending.acquire()  # and never released: the second thread that comes here waits for the end
        faulthandler.dump_traceback_later(2 * PATIENCE, exit=True, file=sys.__stderr__ or 2)
        told = _within(grace + GRACE, lambda: self._exchange(why, grace))
        if told is None:
            store = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            logger.error(
                f"{why or 'another rank has called'}; the store at {store} does not answer, so the others are not known (it is "
                f"torchrun's or, without that, rank 0's)\n{standing(self.rank, self.record())}"
            )
        self._exit()

    def _exit(self) -> NoReturn:
        for handler in logger.handlers:
            handler.flush()
        os._exit(1)

    def _exchange(self, why: str, grace: float) -> str:
        """The verdict, printed by the rank that comes first."""
        self.store.set(f"record/{self.rank}", json.dumps(self.record()))
        first = self.store.add("arrived", 1) == 1
        why = self.store.compare_set("call", "", why or "called").decode()
        if not first:
            with contextlib.suppress(dist.DistError):  # the process that hosts the store has ended, after the verdict
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
        """The word of another rank under this key, or nothing after so long."""
        deadline = time.monotonic() + seconds
        while not self.store.check([key]):  # the store's own wait would print warnings when it is over
            if time.monotonic() > deadline:
                return ""
            time.sleep(0.1)
        return self.store.get(key).decode()

    def record(self) -> Record:
        groups = dist.distributed_c10d._world.pg_names if dist.is_initialized() else {}
        members = {str(name): sorted(dist.get_process_group_ranks(group)) for group, name in groups.items()}
        return {
            "phase": self.phase,
            "place": place(self.failed_in or sys._current_frames().get(self.thread)),
            "groups": groups_of(self._trace(entries=True), members, self.notes),
        }

    def _trace(self, entries: bool) -> dict[str, Any]:
        """This rank's flight recorders as one, of gloo's groups and, on a GPU, of NCCL's; empty where they are off.

        Saving and loading talk over gloo on GPUs, too.
        """
        names = ("_dump_fr_trace_json", "_dump_nccl_trace_json")  # the second is not in a build without CUDA
        traces = [json.loads(getattr(c10d, name)(entries, False) or "{}") for name in names if hasattr(c10d, name)]
        return {
            "pg_status": [trace.get("pg_status") for trace in traces],
            "entries": [entry for trace in traces for entry in trace.get("entries", [])],
        }


def compiling_at(frame: FrameType | None) -> int | None:
    """A number for the place at which torch compiles in a thread, which changes while it gets on; None where it does not compile.

    A graph of 80 blocks takes longer than a time limit should be.
    """
    places, compiles = [], False
    while frame is not None:
        places.append((frame.f_code, frame.f_lineno))
        compiles = compiles or frame.f_code.co_filename.endswith("torch/_dynamo/convert_frame.py")
        frame = frame.f_back
    return hash(tuple(places)) if compiles else None


def _first_line(error: Exception) -> str:
    """The message's first line; of gloo's without a place in its sources and advice."""
    return re.sub(r"^\[\S+:\d+\] |\. This is typically caused .*", "", str(error).partition("\n")[0])


def _within(seconds: float, function: Callable[[], Any]) -> Any:
    """Its result; None where it fails, or is not done in time."""
    results: list[Any] = []

    def run() -> None:
        with contextlib.suppress(dist.DistError):
            results.append(function())

    thread = threading.Thread(target=run, name="watchdog", daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None
