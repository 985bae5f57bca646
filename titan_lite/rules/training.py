"""Rules of [training]: the chunks of the loss."""

from collections.abc import Iterator

from titan_lite.config import Config
from titan_lite.distributed.layout import Layout
from titan_lite.models.loss_chunk import MAX_CHUNKS
from titan_lite.rules.mistakes import Mistake, rule_of_layout
from titan_lite.sharding import chunk_size


@rule_of_layout
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
