"""Skip the update of steps whose loss or gradient is not finite, or whose loss is far above those
of the steps before.

skipped = SkippedSteps(config.training, config.optimizer.lr, device)
skip, limit = skipped.decide(loss, grad_norm)         # a collective; tensors, which the host does not read
optimizer.step(skip)
skipped.note(step, loss, grad_norm, skip, limit)      # numbers, after they have been read
parts["skipped_steps"] = skipped.state_dict()
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_lite.config import Training
from titan_lite.logging import logger
from titan_lite.resilience import TrainingError


class SkippedSteps:
    """Decide which steps are skipped, and count them.

    A spike is a loss more than training.spike_sigmas standard deviations above the mean of the last
    training.spike_window accepted losses. Until there are that many, nothing is a spike; a window
    of 0 turns this off. lr: for the error message.
    """

    def __init__(self, training: Training, lr: float, device: torch.device):
        self.training, self.lr = training, lr
        self.count = self.in_a_row = 0
        self.spikes: list[dict[str, float]] = []  # step, loss and the limit that it exceeded
        self.window = torch.zeros(
            training.spike_window, dtype=torch.float64, device=device
        )  # a ring of accepted losses
        self.accepted = torch.zeros(
            (), dtype=torch.int64, device=device
        )  # number of accepted losses
        self.places = torch.arange(training.spike_window, device=device)

    def decide(self, loss: Tensor, grad_norm: Tensor) -> tuple[Tensor, Tensor]:
        """Return (1 if this step is skipped, else 0; the highest loss that is not a spike), float32
        scalars on the device.

        loss, grad_norm: scalars, the same on all ranks except perhaps for the last bit.
        """
        finite, limit = loss.isfinite() & grad_norm.isfinite(), self.limit()
        if not self.training.spike_window:
            return (~finite).float(), limit
        # All ranks must decide alike, even if the last bit of the loss differs.
        spike = (loss > limit).int()
        dist.all_reduce(spike, dist.ReduceOp.MAX)
        accept = finite & (spike == 0)
        here = (self.places == self.accepted % len(self.places)) & accept
        self.window = torch.where(here, loss.double(), self.window)
        self.accepted += accept
        return (~accept).float(), limit

    def limit(self) -> Tensor:
        """Return the highest loss that is not a spike, a scalar; infinite until the window is full."""
        if not self.training.spike_window:
            return torch.full((), math.inf, device=self.window.device)
        limit = self.window.mean() + self.training.spike_sigmas * self.window.std(correction=0)
        return torch.where(self.accepted < len(self.window), math.inf, limit).float()

    def note(self, step: int, loss: float, grad_norm: float, skip: float, limit: float) -> None:
        """Count a step by the arguments and results of `decide`; the first rank logs a skipped
        step.

        Raises TrainingError after training.max_nonfinite_steps skipped steps in a row.
        """
        if not skip:
            self.in_a_row = 0
            return
        self.count += 1
        self.in_a_row += 1
        why = f"loss {loss}, gradient norm {grad_norm}"
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self.spikes.append({"step": step, "loss": loss, "limit": limit})
            window, sigmas = self.training.spike_window, self.training.spike_sigmas
            where = (
                f"{sigmas:g} standard deviations above the mean of the last {window}"
                " (training.spike_sigmas)"
            )
            why = f"loss {loss:.4f} is a spike, above {limit:.4f}, {where}"
        if dist.get_rank() == 0:
            logger.warning(
                f"step {step} skipped: {why}; {self.in_a_row} in a row", extra={"event": "skip"}
            )
        most, spike = (
            self.training.max_nonfinite_steps,
            ", or a spike," if self.training.spike_window else "",
        )
        if self.in_a_row >= most:
            raise TrainingError(
                f"{most} steps in a row had a non-finite loss or gradient{spike}"
                " (training.max_nonfinite_steps), "
                f"the last one step {step}; parameters are those of step {step - most}; "
                f"use an optimizer.lr below {self.lr}, or training.mixed_precision_param ="
                ' "float32"',
                everywhere=True,
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, of JSON types; reads the device."""
        accepted, window = int(self.accepted), len(self.window)
        oldest = accepted % window if accepted > window else 0
        losses = self.window.roll(-oldest)[:accepted].tolist() if window else []
        return {
            "count": self.count,
            "in_a_row": self.in_a_row,
            "accepted": losses,
            "skipped": self.spikes,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint's state. A window longer than the saved one fills up first."""
        self.count = state["count"]
        self.in_a_row = state["in_a_row"]
        losses = state["accepted"][-len(self.window) :] if len(self.window) else []
        self.window[: len(losses)] = torch.tensor(losses, dtype=torch.float64)
        self.accepted.fill_(len(losses))
        self.spikes = state["skipped"]
