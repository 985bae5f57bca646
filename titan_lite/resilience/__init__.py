"""Faults of a run: signals, hangs, failures of a rank, slow ranks, steps that are skipped,
restarts.
"""


class TrainingError(RuntimeError):
    """The run cannot go on; the message says why and what to change.

    everywhere: all ranks raise the same one.
    """

    def __init__(self, message: str, *, everywhere: bool = False):
        super().__init__(message)
        self.everywhere = everywhere
