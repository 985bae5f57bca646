"""Rules of [training]: batches that ranks can share, and the chunks of the loss."""

from collections.abc import Iterator

from titan_lite.config import Config, batch_ramp, gradient_accumulation_steps
from titan_lite.distributed.layout import Layout
from titan_lite.models.loss_chunk import MAX_CHUNKS
from titan_lite.rules.mistakes import Mistake, rule, rule_of_keys
from titan_lite.sharding import chunk_size


@rule_of_keys
def batches_can_be_shared(config: Config) -> Iterator[Mistake]:
    """Refuse a wrong batch before the number of ranks is known, if the recipe has all degrees."""
    batch_ramp(config.training.global_batch_ramp)  # raises ConfigError
    parallelism = config.parallelism
    if parallelism.data_parallel_shard_degree != -1:
        dp_degree = (
            parallelism.data_parallel_replicate_degree * parallelism.data_parallel_shard_degree
        )
        gradient_accumulation_steps(config.training, dp_degree)  # raises ConfigError
    return iter(())


@rule
def loss_chunk_is_a_part_of_a_microbatch(config: Config, layout: Layout) -> Iterator[Mistake]:
    chunk = config.training.loss_chunk_tokens
    tokens = layout.tokens_per_microbatch
    smallest = chunk_size(tokens, MAX_CHUNKS)
    if chunk >= tokens:
        why = f"has no effect: a rank has {tokens:,} tokens of a microbatch"
        instead = f"-1, or less than {tokens}"
    elif 0 < chunk < smallest:
        why = f"cuts the {tokens:,} tokens of a microbatch into more than {MAX_CHUNKS} chunks"
        instead = f"at least {smallest}"
    else:
        return
    yield Mistake("training.loss_chunk_tokens", chunk, why, instead)
