"""The watchdog in a run: hooks that look for hangs and for slow ranks."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from titan_lite.config import Config
from titan_lite.feature import Feature
from titan_lite.features.watchdog.keys import WatchdogKeys

if TYPE_CHECKING:
    from titan_lite.hooks import Hook


class WatchdogFeature(Feature):
    def is_on(self, config: Config) -> bool:
        return WatchdogKeys.of(config).watchdog

    def hooks(self, config: Config) -> Sequence["Hook"]:
        from titan_lite.features.watchdog.stragglers import NameStragglers
        from titan_lite.features.watchdog.watchdog import WatchForHangs

        return [
            WatchForHangs(config.comm),
            NameStragglers(config.metrics.log_freq, config.phase.end),
        ]


FEATURE = WatchdogFeature()
