"""Write torch.profiler traces and CUDA memory snapshots at an interval, and configure the flight
recorder.

with build_profiler(config.profiling, dump_folder, rank, range(1, 101)) as profiler:
    for step in ...:
        train_step()
        profiler.step()
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerAction

from titan_lite.config import Profiling
from titan_lite.logging import logger


class Profiler:
    """Write `trace-step-N/rank-R.json` (Chrome's format) and a memory snapshot at every
    profile_freq-th step, or else at the last step.
    """

    def __init__(self, config: Profiling, dump_folder: Path, rank: int, steps: range):
        self.config = config
        self.dump_folder = dump_folder
        self.rank = rank
        self.steps = steps
        self.done = steps.start - 1
        self.torch_profiler: Any = None

    def is_profiled(self, step: int) -> bool:
        """Return True if a step is written."""
        interval = self.config.profile_freq
        last = self.steps.stop - 1
        is_short = last // interval == (self.steps.start - 1) // interval  # none at the interval
        return step in self.steps and (step % interval == 0 or (is_short and step == last))

    def action(self, count: int) -> ProfilerAction:
        """Return what the profiler does in a step; 0 is the one before the first."""
        step = self.steps.start - 1 + count
        if self.is_profiled(step):
            return ProfilerAction.RECORD_AND_SAVE
        if self.is_profiled(step + 1):
            return ProfilerAction.WARMUP
        return ProfilerAction.NONE

    def step(self) -> None:
        self.done += 1
        if self.torch_profiler is not None:
            self.torch_profiler.step()
        if self.config.enable_memory_snapshot and self.is_profiled(self.done):
            self.save_memory_snapshot("memory")

    def save_trace(self, profiler: torch.profiler.profile) -> None:
        if not self.is_profiled(self.done):
            return  # the run was stopped within a period, and nothing was traced
        path = self._path("profile_traces", "trace", "json")
        profiler.export_chrome_trace(str(path))
        logger.info(f"profile of step {self.done} written to {path}")

    def save_memory_snapshot(self, kind: str) -> None:
        path = self._path("memory_snapshots", kind, "pickle")
        torch.cuda.memory._dump_snapshot(str(path))
        logger.info(f"memory snapshot written to {path} (view it at pytorch.org/memory_viz)")

    def _path(self, folder: str, kind: str, suffix: str) -> Path:
        path = self.dump_folder / folder / f"{kind}-step-{self.done}" / f"rank-{self.rank}.{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


@contextmanager
def build_profiler(
    config: Profiling, dump_folder: Path, rank: int, steps: range
) -> Iterator[Profiler]:
    """Return a context with a Profiler; call its `step` after every step.

    steps: of this start.
    """
    profiler = Profiler(config, dump_folder, rank, steps)
    if config.enable_memory_snapshot:
        torch.cuda.memory._record_memory_history(max_entries=100_000)
    try:
        if not config.enable_profiling:
            yield profiler
            return
        os.environ.setdefault(
            "KINETO_LOG_LEVEL", "6"
        )  # else torch 2.14 prints when each trace starts and stops
        warnings.filterwarnings(
            "ignore", "Warning: Profiler clears events"
        )  # each trace is of one step
        with torch.profiler.profile(
            schedule=profiler.action, on_trace_ready=profiler.save_trace
        ) as profiler.torch_profiler:
            profiler.torch_profiler.step()  # the first step may need a warm-up before it
            yield profiler
    except torch.OutOfMemoryError:
        if config.enable_memory_snapshot:
            profiler.save_memory_snapshot("out-of-memory")
        raise


def set_flight_recorder(trace_buf_size: int, dump_folder: Path) -> None:
    """Keep the last `trace_buf_size` collectives for the watchdog; 0 turns this off.

    Call before making the process group.

    NCCL also dumps them into `flight_recorder/rank-R` on its own timeout.
    """
    os.environ["TORCH_FR_BUFFER_SIZE"] = str(trace_buf_size)
    os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "1" if trace_buf_size else "0"
    if trace_buf_size:
        folder = dump_folder.resolve() / "flight_recorder"
        folder.mkdir(parents=True, exist_ok=True)
        for name in (
            "TORCH_FR_DUMP_TEMP_FILE",
            "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
        ):  # the second before torch 2.12
            os.environ[name] = f"{folder}/rank-"
