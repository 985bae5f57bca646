"""End a run that hangs or is too slow, on all ranks, with a verdict that names the rank that the
others wait for.

    progress.report_to(Watchdog(config.comm, rank=0, world_size=4))    # progress.py

Collectives and compiling are progress, too. A rank that hangs calls all others through the store of
the process group. Each rank writes a record there: where its Python code is, and its flight
recorder's entries. The first one collects the records that arrive within GRACE seconds, and prints
the verdict (hang_report.py); then all exit with code 1. If a library holds the interpreter lock, so
that no thread can run, faulthandler prints where the code is and ends the process.
"""

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from types import FrameType
from typing import Any, NoReturn

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from titan_lite import progress
from titan_lite.checkpoint.manager import GROUP
from titan_lite.config import Comm
from titan_lite.distributed.param_collectives import started_last
from titan_lite.distributed.process_group import first_line, limit_collectives
from titan_lite.features.watchdog.hang_report import (
    RankRecord,
    collectives_by_group,
    describe_frame,
    describe_rank,
    verdict,
)
from titan_lite.hooks import Hook
from titan_lite.logging import logger
from titan_lite.progress import COMPILING, PATIENCE, Listener, Phase
from titan_lite.resilience.shared_errors import (
    CAUSE,
    GRACE,
    GRACE_AFTER_LOST_CONNECTION,
    call_within,
    connect,
    wait_for,
)

# Seconds to live after the verdict: if this rank hosts the store, the others must read it, too
STORE_LIFETIME = 1.0
CHECK_INTERVAL = 0.25  # seconds between looks for progress
CALL_INTERVAL = 1.0  # seconds between looks for a call of another rank
NO_LIMIT = float("inf")
A_DAY = 86400.0  # seconds


class WatchForHangs(Hook):
    """Have a watchdog hear of all phases of the run."""

    def __init__(self, comm: Comm):
        self.comm = comm

    def on_start(self) -> None:
        world_size = int(os.environ["WORLD_SIZE"])
        if world_size > 1:  # a rank alone has nobody to wait for
            watchdog = Watchdog(self.comm, int(os.environ["RANK"]), world_size)
            progress.report_to(watchdog)
            watchdog.start()


class Watchdog(Listener):
    """The watchdog of one process. While a phase has a limit, the process may end at any moment."""

    def __init__(self, comm: Comm, rank: int, world_size: int):
        self.comm = comm
        self.rank = rank
        self.world_size = world_size

        self.limit = NO_LIMIT  # seconds without progress
        self.last_progress = time.monotonic()
        self.training_thread = threading.get_ident()  # its code's position is recorded
        # Collectives, and where the compiler is, at the last look: a change is progress.
        self.last_look: tuple[str, int | None] = ("", None)

        self.failed_frame: FrameType | None = None  # in which a collective failed
        self.store: dist.Store | None = None  # shared by all ranks
        self.ending = threading.Lock()  # held by the thread that ends the process

    def start(self) -> None:
        """Watch in threads."""
        for target in (self._watch, self._listen):
            threading.Thread(target=target, name="watchdog", daemon=True).start()

    # Progress

    def on_phase(self, phase: Phase) -> None:
        """Set the limit of the phase. That of collectives is PATIENCE seconds longer, but for the
        group of saves, which has a limit of its own.
        """
        self.last_progress = time.monotonic()
        if not phase.limit_key:
            self.limit = NO_LIMIT
            return
        self.limit = getattr(self.comm, phase.limit_key)
        limit_collectives(self.limit + PATIENCE, but_for=GROUP)
        # at once: the thread that renews it may not run again
        self._end_if_interpreter_is_held()

    def on_beat(self) -> None:
        self.last_progress = time.monotonic()

    @property
    def is_enabled(self) -> bool:
        return self.limit != NO_LIMIT

    def is_hanging(self) -> bool:
        return time.monotonic() - self.last_progress > self.limit

    def on_lost_rank(self, error: Exception) -> NoReturn:
        """End the process with a verdict, since no rank has told why a collective failed."""
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        self.failed_frame = frames[-1]
        self._end(
            f"a collective of rank {self.rank} failed in {progress.current.name}:"
            f" {first_line(error)}",
            GRACE_AFTER_LOST_CONNECTION,
        )

    # Threads

    def _watch(self) -> None:
        """Look for progress, and end the run if there is none within the limit. Returns when
        another phase of the run has a watchdog of its own.
        """
        while progress.reports_to(self):
            time.sleep(CHECK_INTERVAL)
            if not self.is_enabled:
                faulthandler.cancel_dump_traceback_later()
                continue
            self._end_if_interpreter_is_held()
            statuses = [
                recorder.get("pg_status") for recorder in read_flight_recorders(entries=False)
            ]
            look = (json.dumps(statuses), self._compiler_position())
            if look != self.last_look:
                self.last_look = look
                self.on_beat()
            if self.is_hanging():
                phase = progress.current
                self._end(
                    f"hang: rank {self.rank} has made no progress for {self.limit:g} s in"
                    f" {phase.name} (comm.{phase.limit_key} = {self.limit:g})",
                    min(GRACE, self.limit),
                )

    def _compiler_position(self) -> int | None:
        """Return a number for the position of the training thread while it compiles, which changes
        with progress; None if it does not compile.

        A first compilation may take longer than a reasonable time limit.
        """
        if progress.current.name != COMPILING:
            return None
        positions = []
        frame = sys._current_frames().get(self.training_thread)
        while frame is not None:
            positions.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back
        return hash(tuple(positions))

    def _end_if_interpreter_is_held(self) -> None:
        """Have faulthandler end the process if its interpreter runs no thread until the limit, and
        PATIENCE, are over.
        """
        seconds = self.limit + PATIENCE
        faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or 2)

    def _listen(self) -> None:
        """Wait for the call of another rank, in a thread of its own, since a lost store may never
        answer.
        """
        try:
            store = self.store = connect(A_DAY)
            while not (self.is_enabled and store.check(["call"])):
                if not progress.reports_to(self):
                    return
                if self.is_enabled and store.check([CAUSE]):
                    self._end_after(store.get(CAUSE).decode())
                time.sleep(CALL_INTERVAL)
        except dist.DistError:
            return  # the process that hosts the store has ended
        self._end("", GRACE)

    # The end

    def _end_after(self, cause: str) -> None:
        """Exit if this rank does not detect the failure of another: with NCCL, unlike gloo, its
        peers keep waiting.

        Returns if the training thread detects it within GRACE seconds and ends the run itself.
        """
        deadline = time.monotonic() + GRACE
        while time.monotonic() < deadline:
            if not self.is_enabled:
                return
            time.sleep(CHECK_INTERVAL)
        self.limit = NO_LIMIT
        for thread in threading.enumerate():
            if not thread.daemon and thread is not threading.main_thread():
                thread.join()  # a background save, in which the failed rank still takes part
        logger.error(f"stopped, since {cause}")
        self._exit()

    def _end(self, reason: str, grace: float) -> NoReturn:
        """Agree on the verdict, print it and exit.

        reason: of this rank's call, or "" if another rank called. grace: seconds to wait for the
        records of other ranks.
        """
        self.ending.acquire()  # never released: a second thread waits here for the end
        faulthandler.dump_traceback_later(2 * PATIENCE, exit=True, file=sys.__stderr__ or 2)
        text = None
        if self.store is not None:  # else it was not even reached
            text = call_within(grace + GRACE, lambda: self._exchange_records(reason, grace))
        if text is None:
            store = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            logger.error(
                f"{reason or 'another rank has called'}; the store at {store} does not answer, so"
                " the others are not known (it is torchrun's or, without that, rank"
                f" 0's)\n{describe_rank(self.rank, self.record())}"
            )
        self._exit()

    def _exit(self) -> NoReturn:
        for handler in logger.handlers:
            handler.flush()
        os._exit(1)

    def _exchange_records(self, reason: str, grace: float) -> str:
        """Write this rank's record.

        The first rank that arrives makes, prints and returns the verdict; the others return "".
        """
        store = self.store
        assert store is not None
        store.set(f"record/{self.rank}", json.dumps(self.record()))
        is_first = store.add("arrived", 1) == 1
        reason = store.compare_set("call", "", reason or "called").decode()
        if not is_first:
            # The process that hosts the store may end after the verdict.
            with contextlib.suppress(dist.DistError):
                wait_for(store, "verdict", grace + GRACE / 2)
                time.sleep(STORE_LIFETIME)
            return ""

        deadline = time.monotonic() + grace
        while store.add("arrived", 0) < self.world_size and time.monotonic() < deadline:
            time.sleep(0.1)
        records: dict[int, RankRecord] = {}
        for rank in range(self.world_size):
            if store.check([f"record/{rank}"]):
                records[rank] = json.loads(store.get(f"record/{rank}"))
        text = f"{reason}\n{verdict(records, self.world_size)}"
        logger.error(text)
        store.set("verdict", text)
        time.sleep(STORE_LIFETIME)
        return text

    def record(self) -> RankRecord:
        """Return where this rank is, in JSON types."""
        members = {}
        if dist.is_initialized():
            for group, name in dist.distributed_c10d._world.pg_names.items():
                members[str(name)] = sorted(dist.get_process_group_ranks(group))
        entries = [
            entry
            for recorder in read_flight_recorders(entries=True)
            for entry in recorder.get("entries", [])
        ]
        frame = self.failed_frame or sys._current_frames().get(self.training_thread)
        return {
            "phase": progress.current.name,
            "code": describe_frame(frame),
            "groups": collectives_by_group(entries, members, started_last),
        }


def read_flight_recorders(*, entries: bool) -> list[dict[str, Any]]:
    """Return what gloo's flight recorder and, on a GPU, NCCL's have; empty where they are off.

    On GPUs, saving and loading use gloo, too. entries: also the list of collectives.
    """
    recorders = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        if hasattr(c10d, name):  # a build without CUDA lacks the second
            recorders.append(json.loads(getattr(c10d, name)(entries, False) or "{}"))
    return recorders
