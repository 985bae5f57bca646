"""Rules of [optimizer]: keys that the optimizer reads."""

from collections.abc import Iterator

from titan_lite.config import KEYS, Config
from titan_lite.config.errors import alternatives, shown
from titan_lite.config.optimizers import OPTIMIZERS
from titan_lite.rules.mistakes import Mistake, keys_set, rule_of_keys

# bfloat16 has 8 bits: from one number to the next one it is up to 2^-7 of it, and half of that is
# the largest decay that rounds to nothing
LARGEST_BETA_IN_BFLOAT16 = 0.996


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


@rule_of_keys
def moments_decrease_in_bfloat16(config: Config) -> Iterator[Mistake]:
    """A change of less than half a unit in bfloat16's last place is rounded away."""
    optimizer = config.optimizer
    if optimizer.state_dtype != "bfloat16":
        return
    for name in ("beta1", "beta2"):
        beta = getattr(optimizer, name)
        if beta > LARGEST_BETA_IN_BFLOAT16:
            yield Mistake(
                key=f"optimizer.{name}",
                value=beta,
                why='is too near to 1 for optimizer.state_dtype = "bfloat16": rounding would keep'
                " a moment from ever decreasing",
                instead=f'at most {LARGEST_BETA_IN_BFLOAT16}, or state_dtype = "float32"',
            )
