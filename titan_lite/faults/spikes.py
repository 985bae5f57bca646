"""A loss far above those of the steps before it: its step is better left out.

guard = SpikeGuard(window=100, sigmas=6)
if not guard.is_spike(step, loss):          # on all ranks together
    optimizer.step()
"""

import math
from collections import deque
from typing import Any

import torch
import torch.distributed as dist


class SpikeGuard:
    """window: of accepted losses, in steps; until it is full nothing is a spike, and 0 turns the guard off. sigmas: how many of
    their standard deviations a loss may be above their mean."""

    def __init__(self, window: int, sigmas: float, device: torch.device):
        self.window, self.sigmas, self.device = window, sigmas, device
        self.accepted: deque[float] = deque(maxlen=window)
        self.skipped: list[dict[str, float]] = []

    def is_spike(self, step: int, loss: float) -> bool:
        """Whether any rank finds it one, which notes the step; otherwise the loss joins the window. loss: a finite number."""
        if not self.window:
            return False
        limit = self.limit()
        # Ranks have the same loss but perhaps for its last bit, which must not part them.
        found = torch.tensor(loss > limit, dtype=torch.int32, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        if found:
            self.skipped.append({"step": step, "loss": loss, "limit": limit})
        else:
            self.accepted.append(loss)
        return bool(found)

    def limit(self) -> float:
        if len(self.accepted) < self.window:
            return math.inf
        mean = math.fsum(self.accepted) / self.window
        return mean + self.sigmas * math.sqrt(math.fsum((loss - mean) ** 2 for loss in self.accepted) / self.window)

    def describe(self, step: int) -> str:
        """What was wrong with a step; empty: it was no spike."""
        if not self.skipped or self.skipped[-1]["step"] != step:
            return ""
        last = self.skipped[-1]
        where = f"{self.sigmas:g} standard deviations above the mean of the last {self.window} (training.spike_sigmas)"
        return f"loss {last['loss']:.4f} is a spike, above {last['limit']:.4f}, {where}"

    def state_dict(self) -> dict[str, Any]:
        """JSON's types."""
        return {"accepted": [*self.accepted], "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A window that is longer than that of the run before fills up first."""
        self.accepted = deque(state.get("accepted", ()), maxlen=self.window)
        self.skipped = list(state.get("skipped", ()))
