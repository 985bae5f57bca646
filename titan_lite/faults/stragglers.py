"""Find a slow rank by the time that the others wait for it.

    stragglers = Stragglers(rank, stages=[[0, 1, 2, 3]], device)
    stragglers.warn(step)                    # a collective, at intervals

A step takes the same time on all ranks, since they wait for each other; the slow rank is the one that waits least. On CPUs a
thread checks 20 times a second whether the training thread waits for a collective. Everything else counts as work. On GPUs the
waiting time is that of NCCL's kernels in the flight recorder.
"""

import json
import statistics
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import FrameType

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from titan_lite.logging import logger

PERIOD = 0.05  # seconds between two checks
LEAST = 2.0  # seconds of checks that a comparison needs
LEAST_ON_GPU = 30.0  # seconds between two comparisons, since reading the flight recorder takes 0.1 s
SLOWER = 1.25  # times the work of the others
IN_A_ROW = 3  # consecutive comparisons before a slow rank is named (again)


class Stragglers:
    """Compare ranks that do the same work. stages: the ranks of each pipeline stage; a stage of one rank is ignored."""

    def __init__(self, rank: int, stages: Sequence[Sequence[int]], device: torch.device):
        self.rank, self.stages, self.device = rank, [stage for stage in stages if len(stage) > 1], device
        self.looks = self.waits = 0
        self.since = time.perf_counter()
        self.suspects: dict[int, int] = {}  # rank: consecutive comparisons
        if self.stages and device.type == "cpu":
            threading.Thread(target=self._look, args=(threading.get_ident(),), name="stragglers", daemon=True).start()

    def warn(self, step: int) -> None:
        """Compare, and log a slow rank on the first rank. A collective."""
        slow = self.compare()
        if slow and self.rank == 0:
            logger.warning(f"step {step}: {slow}", extra={"event": "slow"})

    def compare(self) -> str:
        """Return a line about ranks that are slower than others of their stage, or ""; the same on all ranks. A collective."""
        if not self.stages:
            return ""
        table = torch.zeros(2, dist.get_world_size(), device=self.device)
        seconds, waited = (self.looks * PERIOD, self.waits * PERIOD) if self.device.type == "cpu" else self._time_of_nccl()
        table[0, self.rank], table[1, self.rank] = seconds, waited
        dist.all_reduce(table)
        seconds_of, waited_of = table.tolist()
        compared = [seconds_of[rank] for stage in self.stages for rank in stage]
        if min(compared) < (LEAST if self.device.type == "cpu" else PERIOD):
            return ""
        self.looks = self.waits = 0
        self.since = time.perf_counter()
        work = [1 - min(waited / max(seconds, PERIOD), 1) for seconds, waited in zip(seconds_of, waited_of, strict=True)]
        slower: dict[int, float] = {}
        for stage in self.stages:
            slower |= find_slower({rank: work[rank] for rank in stage})
        self.suspects = {rank: self.suspects.get(rank, 0) + 1 for rank in slower}
        return "; ".join(
            f"rank {rank} is slower than the others, which wait for it: its steps take {slower[rank]:.1f} times theirs"
            for rank, times in self.suspects.items()
            if times % IN_A_ROW == 0
        )

    def _look(self, thread: int) -> None:
        while True:
            time.sleep(PERIOD)
            self.looks += 1
            self.waits += is_waiting(sys._current_frames().get(thread))

    def _time_of_nccl(self) -> tuple[float, float]:
        """Return (seconds that the flight recorder covers, seconds of NCCL's kernels in them); zeros if it is off."""
        if time.perf_counter() - self.since < LEAST_ON_GPU:
            return 0.0, 0.0
        trace = json.loads(c10d._dump_nccl_trace_json(True, False) or "{}")  # type: ignore[attr-defined]
        done = [entry for entry in trace.get("entries", []) if "duration_ms" in entry]
        if len(done) < 2:
            return 0.0, 0.0
        started = [entry["time_created_ns"] for entry in done]
        return (max(started) - min(started)) / 1e9, sum(entry["duration_ms"] for entry in done) / 1000


def find_slower(work: Mapping[int, float]) -> dict[int, float]:
    """Return {slow rank: its work relative to the others}. work: share of the time in which a rank does not wait."""
    slower = {}
    for rank, share in work.items():
        others = statistics.median(work[other] for other in work if other != rank)
        if share > SLOWER * others:
            slower[rank] = share / max(others, 0.01)
    return slower


def is_waiting(frame: FrameType | None) -> bool:
    """Return True if a thread waits for other ranks, judged by its innermost Python function."""
    if frame is None:
        return False
    name, path = frame.f_code.co_name, frame.f_code.co_filename
    if path.endswith("torch/_ops.py"):  # an operator in a graph
        return "wait_tensor" in str(frame.f_locals.get("self"))
    # A loader's queue has a function named wait, too.
    named = name in ("wait", "wait_tensor", "trigger_wait") and "/distributed/" in path
    return named or path.endswith("torch/distributed/distributed_c10d.py")
