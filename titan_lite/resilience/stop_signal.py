"""Agree on all ranks that a run stops, after any of them has received a signal (signals.py).

    stop = StopSignal(device, describe_stop)
    stop.received                     # by this rank; every step sums it over ranks, as its loss
    stop.update(requests)             # one step later, with that sum
    if stop.poll(): ...               # elsewhere: a collective of its own
    stop.requested                    # the same on all ranks

Apart from signals.py, which listens before torch is imported.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from titan_lite.distributed.process_group import first_nonempty, sum_over_ranks
from titan_lite.logging import logger
from titan_lite.resilience import signals


class StopSignal:
    """The agreement of ranks to stop.

    describe_stop: returns the step at which the run stops and what follows, for the log.
    """

    def __init__(self, device: torch.device, describe_stop: Callable[[], str]):
        self.device = device
        self.describe_stop = describe_stop
        self.requested = False  # the same on all ranks

    @property
    def received(self) -> bool:
        """True if this rank has received a signal."""
        return bool(signals.received())

    def poll(self) -> bool:
        """Ask all ranks, and return `requested`. A collective."""
        requests = torch.tensor(self.received, dtype=torch.int32, device=self.device)
        dist.all_reduce(requests)
        self.update(int(requests))
        return self.requested

    def update(self, requests: int) -> None:
        """Record how many ranks have received a signal, a number that all ranks know.

        A collective the first time that it is not 0: the first rank logs who received which signal.
        """
        if self.requested or not requests:
            return
        self.requested = True
        name = signals.received()
        rank = dist.get_rank()
        verb = "noticed" if name == signals.LAUNCHER_DEATH else "received"
        origin = first_nonempty(f"{name} {verb} by rank {rank}" if name else "")
        (receivers,) = sum_over_ranks(1 if name else 0)
        if rank != 0:
            return
        others = ""
        if receivers == 2:
            others = " and 1 other"
        elif receivers > 2:
            others = f" and {receivers - 1} others"
        # a warning, which is shown for any LOG_RANK
        origin = origin or "signal received by another group"
        logger.warning(f"{origin}{others} at {self.describe_stop()}", extra={"event": "stop"})
