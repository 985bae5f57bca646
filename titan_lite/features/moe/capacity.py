"""Give experts room for as many rows as the recipe says, and for all in a step that needs more.

    capacity = ExpertCapacity(model.stages, 1.5, device, recomputes=True)
    capacity.begin_step(step)
    losses = model.forward_backward(batches, tokens)
    if repeat := capacity.repeat():             # a collective, for which the host waits
        ...                                     # drop gradients and counts of the step
        with repeat.context:
            losses = model.forward_backward(batches, tokens)

With expert parallelism, all ranks may send a rank all their tokens: ep times the rows of equally
loaded experts, if ep is at most E / K. With experts.capacity_factor = 1.5, tensors are for 1.5
times these rows, and a rank that gets more has no room for the last ones. No token is dropped for
that: the step does not count, and the same batches run again with room for all rows. Then blocks
recompute all that they can in backward, so that the rows of one layer are in memory at a time.
Compiled stages have other graphs for that, made when a step needs them first.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from titan_lite.distributed.activation_checkpoint import fully_checkpointed
from titan_lite.distributed.stage import Stage
from titan_lite.feature import Repeat, StepPart
from titan_lite.features.moe.load import line_of_repeats
from titan_lite.logging import logger
from titan_lite.models.experts import ROOM_NEEDED, experts_of


def apply_capacity(model: nn.Module, factor: float) -> None:
    """Set the capacity of the experts of `model`, in place. factor: experts.capacity_factor."""
    for experts in experts_of(model).values():
        experts.capacity_factor = factor


class ExpertCapacity(StepPart):
    """The rows that the experts of this rank need."""

    def __init__(
        self, stages: Sequence[Stage], factor: float, device: torch.device, *, recomputes: bool
    ):
        """factor: experts.capacity_factor. recomputes: blocks do in a step that runs again."""
        self.stages = stages
        self.factor = factor
        self.recomputes = recomputes
        self.repeated_steps = 0  # since the last `metrics`
        self.most = 0.0  # rows relative to equally loaded experts, likewise
        # rows of this step relative to the room, of each layer; a zero on a rank without experts
        fqns = [fqn for stage in stages for fqn in experts_of(stage.model)]
        self.needed = torch.zeros(len(fqns) + 1, dtype=torch.float64, device=device)
        ROOM_NEEDED.update(zip(fqns, self.needed[1:], strict=True))

    def begin_step(self, step: int) -> None:
        self.needed.zero_()

    def repeat(self) -> Repeat | None:
        """Return how the step runs again, if a rank has needed more rows than there is room for. A
        collective, for which the host waits.
        """
        needed = self.needed.max()
        dist.all_reduce(needed, dist.ReduceOp.MAX)
        most = needed.item()
        self.most = max(self.most, most * self.factor)
        if most <= 1:
            return None
        self.repeated_steps += 1
        return Repeat("a step with room for all rows of experts", self.room_for_all())

    @contextmanager
    def room_for_all(self) -> Iterator[None]:
        """Return a context in which experts have room for all rows."""
        with ExitStack() as stack:
            for stage in self.stages:
                apply_capacity(stage.model, 0.0)
                stack.callback(apply_capacity, stage.model, self.factor)
                if self.recomputes:
                    stack.enter_context(fully_checkpointed(stage.model.layers))
                stack.enter_context(stage.repeating())
            yield

    def metrics(self, steps: range, folder: Path | None) -> dict[str, float]:
        values = {"expert_rows_max": self.most, "repeated_steps": float(self.repeated_steps)}
        if dist.get_rank() == 0 and (line := line_of_repeats(values, self.factor, steps)):
            logger.warning(line)
        self.most = 0.0
        self.repeated_steps = 0
        return values
