"""Copies of the model in a run."""

from typing import TYPE_CHECKING

from titan_lite.config import Config
from titan_lite.environment import set_torchft_variables
from titan_lite.feature import Feature

if TYPE_CHECKING:
    from titan_lite.features.copies.copies import Copies
    from titan_lite.trainer import Trainer


class CopiesOfTheModel(Feature):
    def is_on(self, config: Config) -> bool:
        return config.fault_tolerance.copies > 1

    def copies(self, trainer: "Trainer") -> "Copies":
        set_torchft_variables()
        from titan_lite.features.copies.copies import Copies

        return Copies(trainer)


FEATURE = CopiesOfTheModel()
