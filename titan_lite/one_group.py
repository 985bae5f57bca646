"""The replica groups of a run that has one: it shares its steps with nobody.

titan_lite/features/replica_groups/ has several, which may be lost.
"""

from typing import TYPE_CHECKING

from torch import Tensor

from titan_lite.distributed.pipeline import DeviceBatch

if TYPE_CHECKING:
    from titan_lite.trainer import Trainer


class OneGroup:
    """The only replica group of a run: a trainer asks it as it would ask several."""

    has_several = False
    is_first = True  # this group writes the files of the run
    has_joined = False  # a run that other groups had begun
    living = 1  # groups that take part in the present step

    def __init__(self, trainer: "Trainer"):
        self.trainer = trainer

    def join(self) -> bool:
        """Take part in the run from its next step on; return False if there is none to take part
        in, since the run stops or is done.
        """
        return True

    def agree(self) -> bool:
        """Agree with the other groups on the next step; return False as `join`."""
        return True

    def write_due(self) -> None:
        """Write what another group has left."""

    def leave(self) -> None:
        """Take part in no further step, once what is due is on disk."""

    def poll_stop(self) -> bool:
        """Ask all ranks whether the run stops."""
        return self.trainer.stop.poll()

    def next_batches(self) -> list[DeviceBatch]:
        """Return the local batches of this step that are of this group."""
        return [self.trainer.next_batch() for _ in range(self.trainer.layout.accumulation)]

    def sum_tokens(self, tokens: Tensor) -> Tensor:
        """Return the counted tokens of this step over all groups, by which losses are divided.

        tokens: over all ranks of this group.
        """
        return tokens

    def commit(self, loss: Tensor, stop_requests: Tensor) -> tuple[Tensor, Tensor] | None:
        """Sum gradients over all groups in place, and return (loss, stop requests) over all groups;
        None if the step does not count, and has changed nothing.

        loss, stop_requests: scalars, over all ranks of this group.
        """
        return loss, stop_requests
