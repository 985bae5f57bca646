"""Checks before the first step and after it: that the ranks train on what the recipe's author thinks they do.

preflight(loader.peek(), tokenizer, vocab_size, dp_rank)           # all ranks together, before the first step
check_first_loss(loss, vocab_size)                                 # after it, of a model that knows nothing yet
"""

import hashlib
import math
from collections import defaultdict

import torch.distributed as dist
from torch import Tensor

from titan_lite.config import ConfigError
from titan_lite.data.tokenizer import Tokenizer
from titan_lite.logging import logger
from titan_lite.ranks import gather_objects

SHOWN = 200  # characters of the sample
FAR = 0.1  # of ln(vocabulary): a fresh model is 1/32 nats above it, one with tied embeddings half a nat or so


def preflight(batch: tuple[Tensor, Tensor], tokenizer: Tokenizer, vocab_size: int, dp_rank: int) -> None:
    """Log a sample of the first batch. Raises ConfigError, on all ranks alike, for one that the ranks cannot train on."""
    input, label = batch
    digest = hashlib.sha256(input.numpy().tobytes() + label.numpy().tobytes()).hexdigest()
    largest = int(max(input.max(), label.max()))
    check_batches(gather_objects((dp_rank, digest, largest)), vocab_size)
    if dist.get_rank() == 0:
        text = tokenizer.decode(input[0, : 2 * SHOWN].tolist())
        logger.info(f"first sequence of {input.shape[1]} tokens: {text[:SHOWN]!r}{'...' if len(text) > SHOWN else ''}")


def check_batches(everyone: list[tuple[int, str, int]], vocab_size: int) -> None:
    """(place among the data-parallel ranks, hash of its batch, its largest token) of every rank. Raises ConfigError."""
    readers, batches = defaultdict(list), defaultdict(set)
    for rank, (dp_rank, digest, largest) in enumerate(everyone):
        if largest >= vocab_size:
            raise ConfigError(
                f"rank {rank} has read token {largest}, and the model has room for {vocab_size}: model.tokenizer_path, or what "
                "the data was prepared with, is of another vocabulary; the model's own would work"
            )
        readers[digest].append(rank)
        batches[dp_rank].add(digest)
    for ranks in readers.values():
        if len({everyone[rank][0] for rank in ranks}) > 1:
            raise ConfigError(
                f"ranks {', '.join(map(str, ranks))} have read the same first batch: [data] has too few different documents for "
                "so many ranks; more of them, or fewer ranks, would work"
            )
    for dp_rank, digests in batches.items():
        if len(digests) > 1:
            ranks = [rank for rank, (other, *_) in enumerate(everyone) if other == dp_rank]
            raise ConfigError(
                f"ranks {', '.join(map(str, ranks))} should work on the same sequences, and have read different ones: the files "
                "of [data] are not the same on all nodes; the same ones would work"
            )


def check_first_loss(loss: float, vocab_size: int) -> None:
    """Warn where a model with fresh weights does better or worse than guessing."""
    expected = math.log(vocab_size)
    if not abs(loss - expected) <= FAR * expected:  # so also no number at all
        logger.warning(
            f"the first loss is {loss:.2f}, far from ln({vocab_size}) = {expected:.2f} of a model that knows nothing: initial "
            "weights, tokenizer or labels may be wrong"
        )
