"""Skip the update of steps whose loss or gradient is not finite, or whose loss is far above those
of the steps before.

    skipped_steps = SkippedSteps(config.training, config.optimizer.lr, device)
    skip, loss_limit = skipped_steps.decide(loss, grad_norm)       # tensors: nothing waits
    optimizer.step(skip)
    skipped_steps.record(step, loss, grad_norm, skip, loss_limit)  # numbers, later
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from pydantic import FiniteFloat, NonNegativeInt
from torch import Tensor

from titan_lite.config import Training
from titan_lite.logging import logger
from titan_lite.manifest import validated
from titan_lite.resilience import TrainingError


class SkippedSteps:
    """Decide which steps are skipped, and count them.

    A spike is a loss more than training.spike_sigmas standard deviations above the mean of the last
    training.spike_window accepted losses. Until there are that many, nothing is a spike; a window
    of 0 turns this off.

    lr: for the error message.
    """

    def __init__(self, training: Training, lr: float, device: torch.device):
        self.training = training
        self.lr = lr
        self.count = 0
        self.in_a_row = 0
        self.spikes: list[dict[str, float]] = []  # step, loss and the limit that it exceeded
        # The last accepted losses, a ring buffer: number n is at n % window
        self.window = torch.zeros(training.spike_window, dtype=torch.float64, device=device)
        self.accepted = torch.zeros((), dtype=torch.int64, device=device)  # number of them so far
        self.indices = torch.arange(training.spike_window, device=device)

    def decide(self, loss: Tensor, grad_norm: Tensor) -> tuple[Tensor, Tensor]:
        """Return (1 if this step is skipped, else 0; the highest loss that is not a spike), float32
        scalars on the device. A collective.

        loss, grad_norm: scalars, the same on all ranks except perhaps for the last bit.
        """
        is_finite = loss.isfinite() & grad_norm.isfinite()
        limit = self.limit()
        if not self.training.spike_window:
            return (~is_finite).float(), limit
        # All ranks must decide alike, even if the last bit of the loss differs.
        is_spike = (loss > limit).int()
        dist.all_reduce(is_spike, dist.ReduceOp.MAX)
        accept = is_finite & (is_spike == 0)
        replaced = (self.indices == self.accepted % len(self.indices)) & accept
        self.window = torch.where(replaced, loss.double(), self.window)
        self.accepted += accept
        return (~accept).float(), limit

    def limit(self) -> Tensor:
        """Return the highest loss that is no spike: a scalar, infinite until the window is full."""
        if not self.training.spike_window:
            return torch.full((), math.inf, device=self.window.device)
        limit = self.window.mean() + self.training.spike_sigmas * self.window.std(correction=0)
        return torch.where(self.accepted < len(self.window), math.inf, limit).float()

    def record(self, step: int, loss: float, grad_norm: float, skip: float, limit: float) -> None:
        """Count a step by the arguments and results of `decide`; the first rank logs a skipped
        step.

        Raises TrainingError after training.max_nonfinite_steps skipped steps in a row.
        """
        if not skip:
            self.in_a_row = 0
            return
        self.count += 1
        self.in_a_row += 1
        reason = f"loss {loss}, gradient norm {grad_norm}"
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self.spikes.append({"step": step, "loss": loss, "limit": limit})
            reason = (
                f"loss {loss:.4f} is a spike, above {limit:.4f}, {self.training.spike_sigmas:g}"
                f" standard deviations above the mean of the last {self.training.spike_window}"
                " (training.spike_sigmas)"
            )
        if dist.get_rank() == 0:
            logger.warning(
                f"step {step} skipped: {reason}; {self.in_a_row} in a row", extra={"event": "skip"}
            )
        if self.in_a_row >= self.training.max_nonfinite_steps:
            self._raise(step)

    def _raise(self, step: int) -> None:
        steps = self.training.max_nonfinite_steps
        spike = ", or a spike," if self.training.spike_window else ""
        raise TrainingError(
            f"{steps} steps in a row had a non-finite loss or gradient{spike}"
            f" (training.max_nonfinite_steps), the last one step {step}; parameters are those of"
            f" step {step - steps}; use an optimizer.lr below {self.lr}, or"
            ' training.mixed_precision_param = "float32"',
            everywhere=True,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, of JSON types; reads the device."""
        accepted = int(self.accepted)
        window = len(self.window)
        losses = []  # oldest first
        if window:
            oldest = accepted % window if accepted > window else 0
            losses = self.window.roll(-oldest)[:accepted].tolist()
        return {
            "count": self.count,
            "in_a_row": self.in_a_row,
            "accepted": losses,
            "skipped": self.spikes,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint's state. A window longer than the saved one fills up first."""
        self.count = validated(NonNegativeInt, state, "count")
        self.in_a_row = validated(NonNegativeInt, state, "in_a_row")
        validated(list[dict[str, float]], state, "skipped")
        self.spikes = state["skipped"]
        window = len(self.window)
        losses = validated(list[FiniteFloat], state, "accepted")[-window:] if window else []
        self.window[: len(losses)] = torch.tensor(losses, dtype=torch.float64)
        self.accepted.fill_(len(losses))
