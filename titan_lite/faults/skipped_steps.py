"""Steps whose update is left out: the loss or the gradient is not finite, or the loss is far above those of the steps before it.

skipped = SkippedSteps(config.training, config.optimizer.lr, device)
if not skipped.skips(step, loss, grad_norm):          # on all ranks together
    optimizer.step()
state |= skipped.state_dict()
"""

import math
from collections import deque
from typing import Any

import torch
import torch.distributed as dist

from titan_lite.config import Training
from titan_lite.faults import TrainingError
from titan_lite.logging import logger


class SkippedSteps:
    """Decides which steps are skipped, and counts them.

    training.spike_window: accepted losses, in steps; until there are so many nothing is a spike, and 0 turns the guard off.
    training.spike_sigmas: a spike is so many of their standard deviations above their mean. lr: for the error's message.
    """

    def __init__(self, training: Training, lr: float, device: torch.device):
        self.training, self.lr, self.device = training, lr, device
        self.count = self.in_a_row = 0
        self.accepted: deque[float] = deque(maxlen=training.spike_window)
        self.spikes: list[dict[str, float]] = []  # step, loss and the limit that it exceeded

    def skips(self, step: int, loss: float, grad_norm: float) -> bool:
        """True where this step is to be skipped, which the first rank logs. loss, grad_norm: alike on all ranks, but for a bit.

        Raises TrainingError at the training.max_nonfinite_steps-th in a row.
        """
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        why = self._spike(step, loss) if finite else f"loss {loss}, gradient norm {grad_norm}"
        if not why:
            self.in_a_row = 0
            return False
        self.count += 1
        self.in_a_row += 1
        if dist.get_rank() == 0:
            logger.warning(f"step {step} skipped: {why}; {self.in_a_row} in a row", extra={"event": "skip"})
        limit, spike = self.training.max_nonfinite_steps, ", or a spike," if self.training.spike_window else ""
        if self.in_a_row >= limit:
            raise TrainingError(
                f"{limit} steps in a row had a non-finite loss or gradient{spike} (training.max_nonfinite_steps), "
                f"the last one step {step}; parameters are those of step {step - limit}. "
                f'A lower optimizer.lr = {self.lr} or training.mixed_precision_param = "float32" may help',
                everywhere=True,
            )
        return True

    def _spike(self, step: int, loss: float) -> str:
        """A description, where any rank finds the loss to be a spike; otherwise the loss joins the window. loss: finite."""
        window, sigmas = self.training.spike_window, self.training.spike_sigmas
        if not window:
            return ""
        limit = self.limit()
        # The last bit of the loss, which may differ, must not part the ranks.
        found = torch.tensor(loss > limit, dtype=torch.int32, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        if not found:
            self.accepted.append(loss)
            return ""
        self.spikes.append({"step": step, "loss": loss, "limit": limit})
        where = f"{sigmas:g} standard deviations above the mean of the last {window} (training.spike_sigmas)"
        return f"loss {loss:.4f} is a spike, above {limit:.4f}, {where}"

    def limit(self) -> float:
        """The highest loss that is no spike; infinite as long as the window is not full."""
        window = self.training.spike_window
        if len(self.accepted) < window:
            return math.inf
        mean = math.fsum(self.accepted) / window
        return mean + self.training.spike_sigmas * math.sqrt(math.fsum((loss - mean) ** 2 for loss in self.accepted) / window)

    def state_dict(self) -> dict[str, Any]:
        """JSON's types, for a checkpoint's state."""
        spikes = {"accepted": [*self.accepted], "skipped": self.spikes}
        return {"skipped_steps": self.count, "skipped_in_a_row": self.in_a_row, "spikes": spikes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a checkpoint's state. A window that is longer than that of the run before fills up first."""
        self.count, self.in_a_row = state["skipped_steps"], state["skipped_in_a_row"]
        self.accepted = deque(state["spikes"]["accepted"], maxlen=self.training.spike_window)
        self.spikes = state["spikes"]["skipped"]
