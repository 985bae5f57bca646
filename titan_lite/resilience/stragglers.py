"""Name the rank that the others wait for at the start of their steps.

    stragglers = Stragglers(rank)
    with stragglers.preparing(): ...      # before the first collective of a step
    stragglers.log(step, step_time)       # a collective, at each log interval

All ranks take the same time for a step, since each waits for the others in its collectives. What
differs is the part before the first one: data, garbage collection and the copy to the device. A
slow GPU does not show here; torch.profiler shows it.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from titan_lite.distributed.process_group import gather_to_rank_0
from titan_lite.logging import OF_COPY, logger

NOTICEABLE = 0.05  # share of a step that the slowest rank takes longer than the median


class Stragglers:
    """The seconds that this rank prepares its steps."""

    def __init__(self, rank: int):
        self.rank = rank
        self.seconds = 0.0
        self.steps = 0

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Return a context whose time counts, once a step."""
        started = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - started
        self.steps += 1

    def log(self, step: int, step_time: float) -> None:
        """Log a slow rank on the first rank. A collective. step_time: seconds of a step."""
        by_rank = gather_to_rank_0(self.seconds / max(self.steps, 1))
        self.seconds = 0.0
        self.steps = 0
        if self.rank == 0 and (slow := describe_slowest(by_rank, step_time)):
            logger.warning(f"step {step}: {slow}", extra={"event": "slow", **OF_COPY})


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
