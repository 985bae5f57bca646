"""Rules of [optimizer]: keys that the optimizer reads."""

from collections.abc import Iterator

from titan_lite.config import KEYS, Config
from titan_lite.config.errors import alternatives, shown
from titan_lite.config.optimizers import OPTIMIZERS
from titan_lite.rules.mistakes import Mistake, keys_set, rule_of_keys


@rule_of_keys
def keys_are_read_by_the_optimizer(config: Config) -> Iterator[Mistake]:
    name = config.optimizer.name
    for key, value in keys_set(config, KEYS).items():
        readers = [
            other
            for other, algorithm in OPTIMIZERS.items()
            if key in (f"optimizer.{own}" for own in algorithm.keys)
        ]
        if readers and name not in readers:
            default = shown(KEYS[key].default)
            yield Mistake(
                key=key,
                value=value,
                why=f"has no effect with optimizer.name = {shown(name)}",
                instead=f"its default, {default}, or optimizer.name ="
                f" {alternatives(map(shown, readers))}",
            )
