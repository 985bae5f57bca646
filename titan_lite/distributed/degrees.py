"""Resolve the parallel degrees of a recipe and check that they fit a model.

Needs no torch, so that checks are quick.

degrees = resolve_degrees(config.parallelism, world_size=8)     # {"pp": 1, "dp_replicate": 2, "dp_shard": 4, ...}
"""

import math

from titan_lite.config import ConfigError, Parallelism
from titan_lite.sharding import chunk_range

DEGREES = {  # axis: the key of its degree in [parallelism]
    "pp": "pipeline_parallel_degree",
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
}
AXES = tuple(DEGREES)


def resolve_degrees(parallelism: Parallelism, world_size: int) -> dict[str, int]:
    """Return the ranks along each axis, with -1 resolved.

    Raises ConfigError unless their product is world_size.
    """
    degrees: dict[str, int] = {axis: getattr(parallelism, key) for axis, key in DEGREES.items()}
    others = math.prod(degree for degree in degrees.values() if degree != -1)
    product = (
        " x ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1) or "all 1"
    )
    if degrees["dp_shard"] == -1:
        if world_size % others:
            raise ConfigError(
                "parallelism.data_parallel_shard_degree = -1 cannot be resolved: the other degrees"
                f" ({product}) multiply to {others}, which does not divide {world_size} ranks;"
                f" start {-(-world_size // others) * others} ranks, or lower degrees until they"
                f" multiply to a divisor of {world_size}"
            )
        degrees["dp_shard"] = world_size // others
    elif others != world_size:
        raise ConfigError(
            f"parallelism.data_parallel_shard_degree = {degrees['dp_shard']}: the degrees"
            f" ({product}) need {others} ranks, but {world_size} are running; start {others} ranks"
            f" (NGPU={others}), or set data_parallel_shard_degree = -1"
        )
    return degrees


def check_tensor_parallel(
    tp: int, *, n_heads: int, n_kv_heads: int, hidden_dim: int, vocab_size: int, seq_len: int
) -> None:
    """Raise ConfigError unless tp divides heads and tokens, and each rank has some hidden units and
    some of the vocabulary.

    The last two are split unevenly where tp does not divide them.
    """
    wrong = f"parallelism.tensor_parallel_degree = {tp}"
    for count, what in (
        (n_heads, "attention heads"),
        (n_kv_heads, "key/value heads"),
        (seq_len, "tokens of training.seq_len"),
    ):
        if count % tp:
            fix = " or ".join(
                str(d)
                for d in range(1, n_kv_heads + 1)
                if not any(n % d for n in (n_heads, n_kv_heads, seq_len))
            )
            raise ConfigError(f"{wrong} does not divide the {count} {what}; use {fix}")
    for count, what in ((hidden_dim, "hidden units"), (vocab_size, "tokens of the vocabulary")):
        if not chunk_range(count, tp, tp - 1):
            raise ConfigError(
                f"{wrong} leaves a rank without any of the {count} {what}; use a lower degree"
            )


def check_context_parallel(cp: int, *, seq_len: int, tp: int) -> None:
    """Raise ConfigError unless a sequence can be cut into 2 x cp chunks that tp divides."""
    if cp > 1 and seq_len % (2 * cp * tp):
        step = 2 * cp * tp
        nearest = sorted({max(step, seq_len // step * step), -(-seq_len // step) * step})
        raise ConfigError(
            f"parallelism.context_parallel_degree = {cp}: training.seq_len = {seq_len} cannot be"
            f" cut into 2 x {cp}"
            f" chunks{f' that {tp} tensor-parallel ranks share' if tp > 1 else ''}; use seq_len ="
            f" {' or '.join(map(str, nearest))}"
        )
