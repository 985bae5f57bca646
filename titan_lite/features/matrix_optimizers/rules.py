"""Rules of Muon and Shampoo."""

from collections.abc import Iterator

from titan_lite.config import Config
from titan_lite.config.errors import alternatives, shown
from titan_lite.config.optimizers import OPTIMIZERS
from titan_lite.distributed.layout import Layout
from titan_lite.rules.mistakes import Mistake, rule_of_layout


@rule_of_layout
def shampoo_has_a_dense_model(config: Config, layout: Layout) -> Iterator[Mistake]:
    if config.optimizer.name == "Shampoo" and layout.model.n_experts:
        yield Mistake(
            key="optimizer.name",
            value="Shampoo",
            why=(
                "is for dense models: statistics of each expert would be those of few tokens, and"
                f" {layout.model.n_experts} times as many roots"
            ),
            instead=alternatives(shown(name) for name in OPTIMIZERS if name != "Shampoo"),
        )
