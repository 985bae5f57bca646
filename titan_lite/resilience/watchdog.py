"""End a run that hangs or is too slow, on all ranks, with a verdict that names the rank that the
others wait for.

    watchdog = Watchdog(config.comm, rank=0, world_size=4)
    watchdog.start_phase("start", "init_timeout_seconds")    # a key of [comm]
    watchdog.start_phase("step 1", "train_timeout_seconds")
    with watchdog.phase("save", "init_timeout_seconds"): ...
    watchdog.progress()                                  # so are collectives and compiling
    watchdog.disable()                                   # no limit
    with watchdog.share_errors(CheckpointError): ...     # what ends this rank is sent to others

A rank that hangs calls all others through the store of the process group. Each rank writes a record
there: where its Python code is, and its flight recorder's entries. The first one collects the
records that arrive within GRACE seconds, and prints the verdict (hang_report.py); then all exit
with code 1. If a library holds the interpreter lock, so that no thread can run, faulthandler prints
where the code is and ends the process.
"""

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from types import CodeType, FrameType
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from titan_lite.config import Comm
from titan_lite.distributed.process_group import first_line, is_communication_error
from titan_lite.logging import logger
from titan_lite.resilience import TrainingError
from titan_lite.resilience.hang_report import (
    RankRecord,
    StartedCollective,
    collectives_by_group,
    describe_frame,
    describe_rank,
    verdict,
)

# Seconds to wait for the records of other ranks, or the phase's limit if that is shorter
GRACE = 10.0
# Seconds by which a collective's time limit exceeds that of its phase: the verdict comes first
PATIENCE = 3 * GRACE
# Seconds to wait for records after a lost connection, which all ranks have when one dies
GRACE_AFTER_LOST_CONNECTION = 3.0
# Seconds to live after the verdict: if this rank hosts the store, the others must read it, too
STORE_LIFETIME = 1.0
CHECK_INTERVAL = 0.25  # seconds between looks for progress
CALL_INTERVAL = 1.0  # seconds between looks for a call of another rank
NO_LIMIT = float("inf")
T = TypeVar("T")

# torch 2.14 made it public
_set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout


class Watchdog:
    """The watchdog of one process. From `start_phase` to `disable` the process may end at any
    moment.

    A single rank has no threads.

    started_collectives: appended by the code that starts them (distributed/param_collectives.py).
    excluded_group: description of a process group with a limit of its own.
    """

    def __init__(
        self,
        comm: Comm,
        rank: int,
        world_size: int,
        *,
        started_collectives: Iterable[StartedCollective] = (),
        excluded_group: str = "",
    ):
        self.comm = comm
        self.rank = rank
        self.world_size = world_size
        self.started_collectives = started_collectives
        self.excluded_group = excluded_group

        self.phase_name = "start"
        self.phase_start = time.monotonic()
        self.limit_key = ""  # of [comm]
        self.limit = NO_LIMIT  # seconds without progress
        self.last_progress = time.monotonic()
        self.training_thread = threading.get_ident()  # its code's position is recorded
        # Collectives, and where the compiler is, at the last look: a change is progress.
        self.last_look: tuple[str, int | None] = ("", None)

        self.failed_frame: FrameType | None = None  # in which a collective failed
        self.store: dist.Store | None = None  # shared by all ranks
        self.connected = threading.Event()  # to it
        self.ending = threading.Lock()  # held by the thread that ends the process
        if world_size > 1:
            for target in (self._watch, self._listen):
                threading.Thread(target=target, name="watchdog", daemon=True).start()

    # Phases and progress

    def start_phase(self, name: str, limit_key: str) -> None:
        """Start a phase of the run, in which comm.<limit_key> seconds without progress are a hang.

        The process groups' own limit is PATIENCE seconds longer.
        """
        self.limit_key = limit_key
        self.limit = getattr(self.comm, limit_key)
        if dist.is_initialized():
            for group in dist.distributed_c10d._world.pg_map:
                if group.group_desc != self.excluded_group:
                    _set_timeout(timedelta(seconds=self.limit + PATIENCE), group)
        self.progress(name)
        if self.world_size > 1:  # at once: the thread that renews it may not run again
            self._end_if_interpreter_is_held()

    @contextlib.contextmanager
    def phase(self, name: str, limit_key: str) -> Iterator[None]:
        """Return a context for a phase; afterwards the previous one continues."""
        name_before = self.phase_name
        key_before = self.limit_key
        self.start_phase(name, limit_key)
        yield
        self.start_phase(name_before, key_before)

    def progress(self, phase: str = "") -> None:
        """Record progress, perhaps to another phase with the same limit."""
        self.last_progress = time.monotonic()
        if phase not in ("", self.phase_name):
            self.phase_name = phase
            self.phase_start = self.last_progress

    def disable(self) -> None:
        """Remove the limit."""
        self.limit = NO_LIMIT

    @property
    def is_enabled(self) -> bool:
        return self.limit != NO_LIMIT

    def is_hanging(self) -> bool:
        return time.monotonic() - self.last_progress > self.limit

    # Errors

    @contextlib.contextmanager
    def share_errors(self, *explained: type[Exception]) -> Iterator[None]:
        """Return a context that sends an error of this rank to the others, or receives theirs.

        The watchdog is disabled afterwards.

        explained: errors whose message is sufficient. These, and the failure of another rank, are
        raised as TrainingError.
        """
        try:
            yield
        except Exception as error:
            cause = self._share(error)
            if cause:
                raise TrainingError(cause) from error
            if isinstance(error, explained):
                everywhere = getattr(error, "everywhere", False)
                raise TrainingError(str(error), everywhere=everywhere) from error
            raise
        finally:
            self.disable()

    def _share(self, error: Exception) -> str | None:
        """Send the error to the other ranks, unless they have it, too.

        For an error of communication, return the failure of the rank that caused it; if no rank has
        sent one, end the process with a verdict.
        """
        if getattr(error, "everywhere", False):
            return None
        # There is a store, which a thread that came before it tries to reach now and then.
        if self.store is None and self.world_size > 1 and dist.is_initialized():
            self.connected.wait(GRACE)
        store = self.store
        if store is None:
            return None
        if not is_communication_error(error):
            failure = f"rank {self.rank} failed: {type(error).__name__}: {first_line(error)}"
            _call_within(
                GRACE_AFTER_LOST_CONNECTION, lambda: store.compare_set("cause", "", failure)
            )
            return None
        cause = _call_within(
            2 * GRACE, lambda: _wait_for(store, "cause", GRACE_AFTER_LOST_CONNECTION)
        )
        if cause:
            return f"stopped, since {cause}"
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        self.failed_frame = frames[-1]
        self._end(
            f"a collective of rank {self.rank} failed in {self.phase_name}: {first_line(error)}",
            GRACE_AFTER_LOST_CONNECTION,
        )

    # Threads

    def _watch(self) -> NoReturn:
        """Look for progress, and end the run if there is none within the limit."""
        while True:
            time.sleep(CHECK_INTERVAL)
            if not self.is_enabled:
                faulthandler.cancel_dump_traceback_later()
                continue
            self._end_if_interpreter_is_held()
            statuses = [
                recorder.get("pg_status") for recorder in read_flight_recorders(entries=False)
            ]
            frame = sys._current_frames().get(self.training_thread)
            look = (json.dumps(statuses), compiler_position(frame))
            if look != self.last_look:
                self.last_look = look
                self.progress()
            if self.is_hanging():
                self._end(
                    f"hang: rank {self.rank} has made no progress for {self.limit:g} s in"
                    f" {self.phase_name} (comm.{self.limit_key} = {self.limit:g})",
                    min(GRACE, self.limit),
                )

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
            # torchrun's store survives a restart of the ranks.
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            store = dist.PrefixStore(f"watchdog/{attempt}", _connect())
            self.store = store
            self.connected.set()
            while not (self.is_enabled and store.check(["call"])):
                if self.is_enabled and store.check(["cause"]):
                    self._end_after(store.get("cause").decode())
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
        self.disable()
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
            text = _call_within(grace + GRACE, lambda: self._exchange_records(reason, grace))
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
                _wait_for(store, "verdict", grace + GRACE / 2)
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
            "phase": self.phase_name,
            "code": describe_frame(frame),
            "groups": collectives_by_group(entries, members, self.started_collectives),
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


def compiler_position(frame: FrameType | None) -> int | None:
    """Return a number for the position at which a thread compiles, which changes with progress;
    None if it does not compile.

    A first compilation may take longer than a reasonable time limit.
    """
    positions = []
    compiles = False
    while frame is not None:
        positions.append((frame.f_code, frame.f_lineno))
        compiles |= is_compiler(frame.f_code)
        frame = frame.f_back
    return hash(tuple(positions)) if compiles else None


def is_compiler(code: CodeType) -> bool:
    """Return True for a function that is on the stack while a function or a model is compiled."""
    if code.co_filename.endswith("titan_lite/compile/compiled_model.py"):
        return code.co_name == "make_graphs"
    return code.co_filename.endswith("torch/_dynamo/convert_frame.py")


def _connect() -> dist.TCPStore:
    """Return a connection to the store of the process group."""
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(days=1),
        wait_for_workers=False,
    )


def _wait_for(store: dist.Store, key: str, seconds: float) -> str:
    """Return the text that another rank writes under this key, or "" after this time.

    The store's own wait would print warnings at its time limit.
    """
    deadline = time.monotonic() + seconds
    while not store.check([key]):
        if time.monotonic() > deadline:
            return ""
        time.sleep(0.1)
    return store.get(key).decode()


def _call_within(seconds: float, function: Callable[[], T]) -> T | None:
    """Return the result of a function, or None if it fails or takes longer."""
    results: list[T] = []

    def run() -> None:
        with contextlib.suppress(dist.DistError):
            results.append(function())

    thread = threading.Thread(target=run, name="watchdog", daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None
