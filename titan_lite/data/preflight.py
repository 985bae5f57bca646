"""Check the first batch of all ranks and the first loss, to find wrong data, tokenizers or weights
early.

preflight(loader.peek(), tokenizer, vocab_size, dp_rank)           # a collective, before the first step
check_first_loss(loss, vocab_size)                                 # after the first step of a new model
"""

import math
from collections import defaultdict
from collections.abc import Sequence

import torch.distributed as dist

from titan_lite.config import ConfigError
from titan_lite.data.loader import Batch
from titan_lite.data.tokenizer import Tokenizer
from titan_lite.distributed.process_group import gather_numbers, hash_of
from titan_lite.logging import logger

SHOWN = 200  # characters in the logged sample
# fraction of ln(vocabulary); the loss of a new model is 1/32 nats above, with tied embeddings about
# half a nat
FAR = 0.1


def preflight(batch: Batch, tokenizer: Tokenizer, vocab_size: int, dp_rank: int) -> None:
    """Log a sample of the first batch.

    Raises ConfigError on all ranks if the batch of any rank is wrong.
    """
    input, label = batch.input, batch.label
    digest = hash_of(input.numpy().tobytes() + label.numpy().tobytes())
    largest = int(max(input.max(), label.max()))
    check_batches(gather_numbers(dp_rank, digest, largest), vocab_size)
    if dist.get_rank() == 0:
        text = tokenizer.decode(input[0, : 2 * SHOWN].tolist())
        logger.info(
            f"first sequence of {input.shape[1]} tokens:"
            f" {text[:SHOWN]!r}{'...' if len(text) > SHOWN else ''}"
        )


def check_batches(everyone: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Compare (data-parallel rank, hash of its batch, its largest token) of all ranks.

    Raises ConfigError.
    """
    readers, batches = defaultdict(list), defaultdict(set)
    for rank, (dp_rank, digest, largest) in enumerate(everyone):
        if largest >= vocab_size:
            raise ConfigError(
                f"rank {rank} has read token {largest}, and the model has room for {vocab_size}:"
                " model.tokenizer_path, or what the data was prepared with, has another"
                " vocabulary; use the model's own tokenizer"
            )
        readers[digest].append(rank)
        batches[dp_rank].add(digest)
    for ranks in readers.values():
        if len({everyone[rank][0] for rank in ranks}) > 1:
            raise ConfigError(
                f"ranks {', '.join(map(str, ranks))} have read the same first batch: [data] has too"
                " few different documents for this number of ranks; use more documents or fewer"
                " ranks"
            )
    for dp_rank, digests in batches.items():
        if len(digests) > 1:
            ranks = [rank for rank, (other, *_) in enumerate(everyone) if other == dp_rank]
            raise ConfigError(
                f"ranks {', '.join(map(str, ranks))} need the same sequences, but have read"
                " different ones: the files of [data] are not the same on all nodes; use the same"
                " ones"
            )


def check_first_loss(loss: float, vocab_size: int) -> None:
    """Warn if the first loss of a new model is far from that of guessing, ln(vocab_size)."""
    expected = math.log(vocab_size)
    if not abs(loss - expected) <= FAR * expected:  # also true for nan
        logger.warning(
            f"the first loss is {loss:.2f}, far from ln({vocab_size}) = {expected:.2f}, that of an"
            " untrained model: initial weights, tokenizer or labels may be wrong"
        )
