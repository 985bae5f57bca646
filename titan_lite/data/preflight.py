"""Check the first batch and the first loss, to find wrong data, tokenizers or weights early.

check_first_batch(loader.peek(), tokenizer, vocab_size, dp_rank)    # a collective, before step 1
check_first_loss(loss, vocab_size, is_trained=False)                # after step 1
warn_of_repeated_documents(validation_loader, sequences)               # after the first validation
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist

from titan_lite.config.errors import SharedConfigError
from titan_lite.data.loader import Batch, Loader
from titan_lite.data.tokenizer import Tokenizer
from titan_lite.distributed.process_group import all_gather_ints, hash64, max_over_ranks
from titan_lite.logging import logger

SAMPLE_CHARACTERS = 200  # of the first sequence in the log
# Largest difference between the first loss and ln(vocab_size), relative to that. The loss of a new
# model is 1/32 nats above, with tied embeddings about half a nat.
LOSS_TOLERANCE = 0.1


class BatchSummary(NamedTuple):
    """A rank's first batch in numbers, which ranks compare."""

    dp_rank: int
    digest: int  # hash of its tokens
    largest_token: int


def check_first_batch(batch: Batch, tokenizer: Tokenizer, vocab_size: int, dp_rank: int) -> None:
    """Log a sample of the first batch.

    Raises SharedConfigError if the batch of any rank is wrong.
    """
    digest = hash64(batch.input.numpy().tobytes() + batch.label.numpy().tobytes())
    largest_token = int(max(batch.input.max(), batch.label.max()))
    gathered = all_gather_ints(*BatchSummary(dp_rank, digest, largest_token))
    check_batches([BatchSummary(*numbers) for numbers in gathered], vocab_size)
    if dist.get_rank() == 0:
        text = tokenizer.decode(batch.input[0, : 2 * SAMPLE_CHARACTERS].tolist())
        dots = "..." if len(text) > SAMPLE_CHARACTERS else ""
        logger.info(
            f"first sequence of {batch.input.shape[1]} tokens: {text[:SAMPLE_CHARACTERS]!r}{dots}"
        )


def warn_of_repeated_documents(loader: Loader, sequences: int) -> None:
    """Warn if a validation has read documents several times. A collective.

    loader: of validation, after it. sequences: that all ranks have read.
    """
    times = max_over_ranks(*loader.times_read())
    if dist.get_rank() != 0:
        return
    names = loader.packing.data.source_names() or [""]
    for name, most in zip(names, times, strict=True):
        if most > 1:
            of_source = f" of source {name}" if name else ""
            logger.warning(
                f"validation reads its documents{of_source} up to {most} times, for its"
                f" {sequences:,} sequences; use smaller validation.steps or more documents"
            )


def check_batches(batches: Sequence[BatchSummary], vocab_size: int) -> None:
    """Raise SharedConfigError if the first batches, by rank, do not fit each other or the model."""
    ranks_of_digest = defaultdict(list)
    ranks_of_dp_rank = defaultdict(list)
    for rank, batch in enumerate(batches):
        if batch.largest_token >= vocab_size:
            raise SharedConfigError(
                f"rank {rank} has read token {batch.largest_token}, and the model has room for"
                f" {vocab_size}: model.tokenizer_path, or what the data was prepared with, has"
                " another vocabulary; use the model's own tokenizer"
            )
        ranks_of_digest[batch.digest].append(rank)
        ranks_of_dp_rank[batch.dp_rank].append(rank)
    for ranks in ranks_of_digest.values():
        if len({batches[rank].dp_rank for rank in ranks}) > 1:
            raise SharedConfigError(
                f"ranks {_listed(ranks)} have read the same first batch: [data] has too few"
                " different documents for this number of ranks; use fewer ranks (NGPU) or more"
                " documents: a .txt file is one, so split it, or write its texts as lines of .jsonl"
            )
    for ranks in ranks_of_dp_rank.values():
        if len({batches[rank].digest for rank in ranks}) > 1:
            raise SharedConfigError(
                f"ranks {_listed(ranks)} need the same sequences, but have read different ones: the"
                " files of [data] are not the same on all nodes; use the same ones"
            )


def check_first_loss(
    loss: float, vocab_size: int, is_trained: bool, *, is_tied: bool = False
) -> None:
    """Warn if the first loss of a new model is far from that of guessing, ln(vocab_size), or if
    that of initial weights (is_trained) is not far below it.

    is_tied: with tied embeddings. A token then first predicts itself, the more so the shallower the
    model is, and the loss may be far above: a line says so.
    """
    expected = math.log(vocab_size)
    if is_trained:
        if not loss < (1 - LOSS_TOLERANCE) * expected:
            logger.warning(
                f"the first loss is {loss:.2f}, not far below ln({vocab_size}) = {expected:.2f},"
                " that of an untrained model: the weights of checkpoint.initial_load_path, the"
                " tokenizer and the documents may not belong together"
            )
        return
    highest = (1 + LOSS_TOLERANCE) * expected
    if is_tied and highest <= loss < math.inf:
        logger.info(
            f"the first loss is {loss:.2f}, above ln({vocab_size}) = {expected:.2f}, that of"
            " guessing, and that is right: with tied embeddings a token first predicts itself, the"
            " more so the shallower the model is"
        )
    elif not (1 - LOSS_TOLERANCE) * expected <= loss < highest:  # also true for nan
        logger.warning(
            f"the first loss is {loss:.2f}, far from ln({vocab_size}) = {expected:.2f}, that of an"
            " untrained model: initial weights, tokenizer or labels may be wrong"
        )


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
