"""A family in a user's own file is complete, and its blocks run on the first rank of a layout."""

from collections.abc import Iterator

from titan_lite.config import Config
from titan_lite.config.families import FAMILIES
from titan_lite.distributed.layout import Layout
from titan_lite.rules.mistakes import RULES_OF_LAYOUT, Mistake, apply, rule_of_layout, told_by


@rule_of_layout
def a_family_of_ones_own_is_complete(config: Config, layout: Layout) -> Iterator[Mistake]:
    if layout.model.family in FAMILIES:
        return
    others = [rule for rule in RULES_OF_LAYOUT if rule is not a_family_of_ones_own_is_complete]
    if apply(others, config, layout):
        return  # a block of a layout that cannot be would say so in other words
    from titan_lite.features.own_family.check import check_own_family

    yield from told_by("model.name", check_own_family, config, layout)
