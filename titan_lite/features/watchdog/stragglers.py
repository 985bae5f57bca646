"""Name the rank that the others wait for at the start of their steps.

All ranks take the same time for a step, since each waits for the others in its collectives. What
differs is the part before the first one: data and the copy to the device. A slow GPU does not show
here; torch.profiler shows it.
"""

import statistics
import time
from collections.abc import Sequence

from titan_lite.distributed.process_group import gather_to_rank_0
from titan_lite.hooks import Hook
from titan_lite.logging import OF_GROUP, logger

NOTICEABLE = 0.05  # share of a step that the slowest rank takes longer than the median


class NameStragglers(Hook):
    """Log a slow rank on the first rank, every `freq` steps and at the last one."""

    def __init__(self, freq: int, last_step: int):
        self.freq = freq
        self.last_step = last_step
        self.forget()

    def forget(self) -> None:
        self.steps = 0
        self.preparing = 0.0  # seconds of these steps until their batches are ready
        self.seconds = 0.0  # of these steps as a whole

    def on_step_start(self, step: int) -> None:
        self.started = time.perf_counter()

    def on_batches(self, step: int) -> None:
        self.ready = time.perf_counter()

    def on_step_end(self, step: int) -> None:
        self.steps += 1
        self.preparing += self.ready - self.started
        self.seconds += time.perf_counter() - self.started
        if step % self.freq and step != self.last_step:
            return
        by_rank = gather_to_rank_0(self.preparing / self.steps)
        if by_rank and (slow := describe_slowest(by_rank, self.seconds / self.steps)):
            logger.warning(f"step {step}: {slow}", extra={"event": "slow", **OF_GROUP})
        self.forget()


def describe_slowest(seconds: Sequence[float], step_time: float) -> str:
    """Return a sentence about the slowest rank beside the median, or "" if that makes no noticeable
    part of a step.

    seconds: of a step, by rank, before it is ready for the first collective.
    """
    slowest = max(range(len(seconds)), key=lambda rank: seconds[rank])
    median = statistics.median_low(seconds)
    if seconds[slowest] - median <= NOTICEABLE * step_time:
        return ""
    return (
        f"rank {slowest} is ready for a step of {step_time:.2f} s after {seconds[slowest]:.2f} s, "
        f"the median rank after {median:.2f} s; the others wait for its data"
    )
