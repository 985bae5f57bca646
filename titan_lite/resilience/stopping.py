"""Stop a run on all ranks after any of them has received a signal (signals.py).

stopping = Stopping(device, describe)
stopping.note(asked)              # at the end of a step, where `asked` was reduced together with the loss
if stopping.ask(): ...            # elsewhere; a collective
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from titan_lite.distributed.process_group import first_word, reduce_numbers
from titan_lite.logging import logger
from titan_lite.resilience.signals import LOST, received


class Stopping:
    """Agree on a stop.

    describe: returns the step at which the run stops and what follows, for the log.
    """

    def __init__(self, device: torch.device, describe: Callable[[], str]):
        self.device, self.describe = device, describe
        self.asked = False

    def ask(self) -> bool:
        """Return True once any rank has received a signal. A collective."""
        found = torch.tensor(bool(received()), dtype=torch.int32, device=self.device)
        dist.all_reduce(found)
        self.note(bool(found))
        return self.asked

    def note(self, asked: bool) -> None:
        """Record the agreed value, the same on all ranks.

        At the first True, the first rank logs which rank received a signal.
        """
        if self.asked or not asked:
            return
        self.asked = True
        name = received()
        rank = dist.get_rank()
        verb = "noticed" if name == LOST else "received"
        came = first_word(f"{name} {verb} by rank {rank}" if name else "")
        (signalled,) = reduce_numbers(1 if name else 0, total=True)
        if rank == 0:  # a warning, which is shown for any LOG_RANK
            others = signalled - 1
            also = f" and {others} other{'s' if others > 1 else ''}" if others else ""
            logger.warning(f"{came}{also} at {self.describe()}", extra={"event": "stop"})
