"""Split backward in a run."""

from typing import TYPE_CHECKING

from titan_lite.config import Config
from titan_lite.distributed.pipeline_schedule import runs_halves
from titan_lite.feature import Feature

if TYPE_CHECKING:
    from titan_lite.compile.joint import SplitBackward


class SplitBackwardFeature(Feature):
    def is_on(self, config: Config) -> bool:
        return runs_halves(config.parallelism)

    def split_backward(self) -> "SplitBackward":
        from titan_lite.features.split_backward.backward_halves import halves_of

        return halves_of


FEATURE = SplitBackwardFeature()
