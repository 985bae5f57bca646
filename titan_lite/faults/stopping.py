"""A run stops on all ranks alike, once a signal (signals.py) has asked any of them to.

stopping = Stopping(device, describe)
stopping.note(asked)              # at the end of a step, where `asked` has travelled with the loss
if stopping.ask(): ...            # elsewhere
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from titan_lite.faults.signals import LOST, received
from titan_lite.logging import logger
from titan_lite.ranks import gather_objects


class Stopping:
    """describe: says at which step the run stops and what follows, for the log."""

    def __init__(self, device: torch.device, describe: Callable[[], str]):
        self.device, self.describe = device, describe
        self.asked = False

    def ask(self) -> bool:
        """True once any rank has received a signal. All ranks call it together."""
        found = torch.tensor(bool(received()), dtype=torch.int32, device=self.device)
        dist.all_reduce(found)
        self.note(bool(found))
        return self.asked

    def note(self, asked: bool) -> None:
        """All ranks call it with the same value. The first time that it is True, the first rank logs who received what."""
        if self.asked or not asked:
            return
        self.asked = True
        names = gather_objects(received())
        if dist.get_rank() == 0:  # a warning, so wherever LOG_RANK points
            logger.warning(f"{reason(names)} at {self.describe()}", extra={"event": "stop"})


def reason(names: Sequence[str]) -> str:
    """("", "SIGTERM", "SIGTERM") of three ranks -> SIGTERM received by rank 1 and 1 other."""
    ranks = [rank for rank, name in enumerate(names) if name]
    first, others = names[ranks[0]], len(ranks) - 1
    came = f"{first} {'noticed' if first == LOST else 'received'} by rank {ranks[0]}"
    return came + (f" and {others} other{'s' * (others > 1)}" if others else "")
