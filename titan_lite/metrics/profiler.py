"""Write torch.profiler traces and CUDA memory snapshots at an interval, and configure the flight
recorder.

with build_profiler(config.profiling, dump_folder, rank) as profiler:
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

from titan_lite.config import Profiling
from titan_lite.logging import logger


class Profiler:
    """Write `trace-step-N/rank-R.json` (Chrome's format) and a memory snapshot at every
    profile_freq-th step.
    """

    def __init__(self, config: Profiling, dump_folder: Path, rank: int, steps_done: int):
        self.config = config
        self.dump_folder = dump_folder
        self.rank = rank
        self.done = steps_done
        self.torch_profiler: Any = None

    def step(self) -> None:
        self.done += 1
        if self.torch_profiler is not None:
            self.torch_profiler.step()
        if self.config.enable_memory_snapshot and self.done % self.config.profile_freq == 0:
            self.save_memory_snapshot("memory")

    def save_trace(self, profiler: torch.profiler.profile) -> None:
        if self.done % self.config.profile_freq:
            return  # the run ended within a period, and nothing was traced
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
    config: Profiling, dump_folder: Path, rank: int, steps_done: int = 0
) -> Iterator[Profiler]:
    """Return a context with a Profiler; call its `step` after every step.

    steps_done: before this start.
    """
    profiler = Profiler(config, dump_folder, rank, steps_done)
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
        period = torch.profiler.schedule(wait=config.profile_freq - 2, warmup=1, active=1)
        with torch.profiler.profile(
            schedule=lambda done: period(steps_done + done), on_trace_ready=profiler.save_trace
        ) as profiler.torch_profiler:
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
