"""Rules of [optimizer]: keys that the optimizer reads."""

from collections.abc import Iterator

from titan_lite.config import KEYS, Config
from titan_lite.config.errors import alternatives, shown
from titan_lite.config.optimizers import OPTIMIZERS
from titan_lite.rules.mistakes import Mistake, rule_of_keys


@rule_of_keys
def keys_are_read_by_the_optimizer(config: Config) -> Iterator[Mistake]:
    name = config.optimizer.name
    keys_of_some = {key for algorithm in OPTIMIZERS.values() for key in algorithm.keys}
    for key, value in config.optimizer:
        if key not in keys_of_some or key in OPTIMIZERS[name].keys:
            continue
        default = KEYS[f"optimizer.{key}"].default
        if value == default or not config.was_set(f"optimizer.{key}"):
            continue
        readers = [shown(other) for other, each in OPTIMIZERS.items() if key in each.keys]
        yield Mistake(
            key=f"optimizer.{key}",
            value=value,
            why=f"has no effect with optimizer.name = {shown(name)}",
            instead=f"its default, {shown(default)}, or optimizer.name = {alternatives(readers)}",
        )
