"""What its keys cannot be together with."""

from collections.abc import Iterator

from titan_lite.config import Config
from titan_lite.features.scaled.keys import ScaledKeys
from titan_lite.rules.mistakes import Mistake, rule_of_keys


@rule_of_keys
def lion_has_no_use_for_a_factor(config: Config) -> Iterator[Mistake]:
    factor = ScaledKeys.of(config).factor
    if factor != 1 and config.optimizer.name == "Lion":
        yield Mistake("scaled.factor", factor, "changes no sign", "1")
