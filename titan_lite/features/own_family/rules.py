"""A family in a user's own file is complete, and its blocks run on the first rank of a layout."""

from collections.abc import Iterator

from titan_lite.config import Config
from titan_lite.config.families import FAMILIES
from titan_lite.distributed.layout import Layout
from titan_lite.rules.float8 import float8_products_have_multiples_of_16
from titan_lite.rules.mistakes import Mistake, rule_of_layout, told_by
from titan_lite.rules.model import (
    dimensions_of_a_head_rotate_in_pairs,
    query_heads_share_key_value_heads_evenly,
)


@rule_of_layout
def a_family_of_ones_own_is_complete(config: Config, layout: Layout) -> Iterator[Mistake]:
    of_shapes = (
        query_heads_share_key_value_heads_evenly,
        dimensions_of_a_head_rotate_in_pairs,
        float8_products_have_multiples_of_16,
    )
    is_own = layout.model.family not in FAMILIES
    if not is_own or any(mistake for rule in of_shapes for mistake in rule(config, layout)):
        return  # a block of a shape that cannot be would say so in other words
    from titan_lite.features.own_family.check import check_own_family

    arguments = (layout, config.float8, config.training)
    yield from told_by("model.name", check_own_family, *arguments)
