"""Rules of PowerSGD."""

from collections.abc import Iterator

from titan_lite.config import Config
from titan_lite.distributed.layout import Layout
from titan_lite.features.powersgd.keys import PowerSGDKeys
from titan_lite.rules.mistakes import Mistake, rule_of_layout


@rule_of_layout
def compression_has_replicas_and_steps(config: Config, layout: Layout) -> Iterator[Mistake]:
    keys = PowerSGDKeys.of(config)
    if keys.replicate_compression == "none":
        return
    if layout.degrees["dp_replicate"] == 1:
        yield Mistake(
            key="parallelism.replicate_compression",
            value=keys.replicate_compression,
            why="has no effect with data_parallel_replicate_degree = 1",
            instead='data_parallel_replicate_degree = 2 or more, or replicate_compression = "none"',
        )
    steps = config.training.steps
    if keys.replicate_uncompressed_steps >= steps:
        yield Mistake(
            key="parallelism.replicate_uncompressed_steps",
            value=keys.replicate_uncompressed_steps,
            why=f"is all of training.steps = {steps}, and nothing would be compressed",
            instead='fewer, or replicate_compression = "none"',
        )


@rule_of_layout
def compression_makes_gradients_smaller(config: Config, layout: Layout) -> Iterator[Mistake]:
    keys = PowerSGDKeys.of(config)
    if keys.replicate_compression == "none":
        return
    from titan_lite.features.powersgd.compression import compressed_sizes

    if not any(factors for _, factors in compressed_sizes(keys, layout).values()):
        yield Mistake(
            key="parallelism.replicate_rank",
            value=keys.replicate_rank,
            why=(
                "is too large: the factors of every shard would have more than a quarter of its"
                " numbers, so all would travel as they are"
            ),
            instead='a smaller rank, or replicate_compression = "none"',
        )
