"""A family in a user's own file in a run."""

from collections.abc import Sequence

from titan_lite.config import Config
from titan_lite.config.families import FAMILIES
from titan_lite.distributed.layout import Layout
from titan_lite.feature import Feature


class OwnFamily(Feature):
    def is_on(self, config: Config) -> bool:
        return config.model.name not in FAMILIES

    def start_lines(self, config: Config, layout: Layout) -> Sequence[str]:
        if layout.world_size == 1:
            return ()
        return [
            f"the family in {config.model.name} is not verified on this layout;"
            f" `titan-lite verify RECIPE --world-size {layout.world_size}` does it"
        ]


FEATURE = OwnFamily()
