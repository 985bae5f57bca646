"""Find a slow rank by the time that the others wait for it.

    stragglers = Stragglers(rank, stages=[[0, 1, 2, 3]], device)
    stragglers.warn(step)                    # a collective, at intervals

A step takes the same time on all ranks, since they wait for each other; the slow rank is the one that waits least. On CPUs a
thread checks 20 times a second whether the training thread waits for a collective. Everything else counts as work. On GPUs the
waiting time is that of NCCL's kernels in the flight recorder.

Each rank learns how many ranks of its stage work for which share of the time, in BINS steps, and compares itself with the median
of the others. So it receives a table of one row for a stage, however many ranks there are.
"""

import json
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from titan_lite.logging import logger
from titan_lite.ranks import reduce_numbers

PERIOD = 0.05  # seconds between two checks
LEAST = 2.0  # seconds of checks that a comparison needs
LEAST_ON_GPU = (
    30.0  # seconds between two comparisons, since reading the flight recorder takes 0.1 s
)
SLOWER = 1.25  # times the work of the others
BINS = 200  # of the share of time that a rank works
IN_A_ROW = 3  # consecutive comparisons before a slow rank is named (again)


class Stragglers:
    """Compare ranks that do the same work. stages: the ranks of each pipeline stage; a stage of one rank is ignored."""

    def __init__(self, rank: int, stages: Sequence[Sequence[int]], device: torch.device):
        self.rank, self.stages, self.device = (
            rank,
            [stage for stage in stages if len(stage) > 1],
            device,
        )
        self.looks = self.waits = 0
        self.since = time.perf_counter()
        self.stage = next(
            (number for number, stage in enumerate(self.stages) if rank in stage), None
        )
        self.in_a_row = 0  # consecutive comparisons in which this rank was slower
        if self.stages and device.type == "cpu":
            threading.Thread(
                target=self._look, args=(threading.get_ident(),), name="stragglers", daemon=True
            ).start()

    def warn(self, step: int) -> None:
        """Compare, and log a slow rank on the first rank. A collective."""
        slow = self.compare()
        if slow and self.rank == 0:
            logger.warning(f"step {step}: {slow}", extra={"event": "slow"})

    def compare(self) -> str:
        """Return a line about ranks that are slower than others of their stage, or ""; the same on all ranks. A collective."""
        if not self.stages:
            return ""
        cpu = self.device.type == "cpu"
        seconds, waited = (
            (self.looks * PERIOD, self.waits * PERIOD) if cpu else self._time_of_nccl()
        )
        work = 1 - min(waited / max(seconds, PERIOD), 1)
        working = torch.zeros(
            len(self.stages) + 1, BINS, device=self.device
        )  # ranks by share; last, ranks that cannot tell yet
        if self.stage is not None:
            working[self.stage, _bin(work)] = 1
            working[-1, 0] = seconds < (LEAST if cpu else PERIOD)
        dist.all_reduce(working)
        working = working.cpu()
        if working[-1, 0]:
            return ""
        self.looks = self.waits = 0
        self.since = time.perf_counter()
        times = 0.0 if self.stage is None else times_slower(work, working[self.stage])
        self.in_a_row = self.in_a_row + 1 if times else 0
        named = self.in_a_row and self.in_a_row % IN_A_ROW == 0
        (slowest,) = reduce_numbers(round(10 * times) << 32 | self.rank if named else 0)
        (others,) = reduce_numbers(int(bool(named)), total=True)
        if not slowest:
            return ""
        also = (
            f"; {others - 1} more rank{'s are' if others > 2 else ' is'} slow" if others > 1 else ""
        )
        return (
            f"rank {slowest & 0xFFFFFFFF} is slower than the others, which wait for it: "
            f"its steps take {(slowest >> 32) / 10:.1f} times theirs{also}"
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
        return (max(started) - min(started)) / 1e9, sum(
            entry["duration_ms"] for entry in done
        ) / 1000


def times_slower(work: float, working: torch.Tensor) -> float:
    """Return the work of a rank relative to the median of the others, or 0 if it is not slower.

    work: its share of the time in which it does not wait. working: (BINS,), how many ranks have which share, this one included.
    """
    others = working.clone()
    others[_bin(work)] -= 1
    counts = others.cumsum(0)
    middle = [
        int(torch.searchsorted(counts, counts[-1] / 2, right=right)) for right in (False, True)
    ]
    median = max((sum(middle) / 2 + 0.5) / BINS, 0.01)
    return work / median if work > SLOWER * median else 0.0


def _bin(share: float) -> int:
    return min(int(share * BINS), BINS - 1)


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
