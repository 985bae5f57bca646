"""Rules of [metrics]: packages that are installed."""

import importlib.util
from collections.abc import Iterator

from titan_lite.config import Config
from titan_lite.rules.mistakes import Inputs, Mistake, rule_of_inputs


@rule_of_inputs
def packages_are_installed(config: Config, inputs: Inputs) -> Iterator[Mistake]:
    if config.metrics.enable_wandb and not is_installed("wandb"):
        yield Mistake(
            key="metrics.enable_wandb",
            value=True,
            why="needs wandb, which is not installed here",
            instead="it after pip install wandb, or enable_wandb = false",
        )


def is_installed(module: str) -> bool:
    """Return True if a module can be imported.

    A folder without sources, such as wandb's output, cannot.
    """
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None
