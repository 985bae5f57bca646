"""Sequences of a step: the batch sizes of [training], and the microbatches that they take; numbers
of tokens in words.

gradient_accumulation_steps(config.training, dp_degree=4)
# [(2, inf)]: two local batches a rank in every step
number_of_tokens("2B tokens")   # 2_000_000_000
"""

import math
import re
from collections.abc import Sequence

from titan_lite.config.errors import ConfigError, alternatives, nearest_multiples
from titan_lite.config.sections import Training

MAX_SEQUENCES = 2**20  # of a batch of the ramp
POWERS = {"M": 10**6, "B": 10**9, "T": 10**12}


def number_of_tokens(text: str) -> int:
    """Return the number of "2B tokens", "900 tokens", "15T" or "1e12".

    Raises ValueError and OverflowError.
    """
    number = text.removesuffix("tokens").strip()
    unit = number[-1:].upper()
    return round(float(number.rstrip("MBTmbt")) * POWERS.get(unit, 1))


def batch_ramp(entries: Sequence[str]) -> list[tuple[int, int]]:
    """Parse training.global_batch_ramp into [(sequences, last step with this batch size), ...].

    Raises ConfigError.
    """
    ramp: list[tuple[int, int]] = []
    for entry in entries:
        wrong = f'training.global_batch_ramp: "{entry}"'
        match = re.fullmatch(" *([1-9][0-9]{0,11}) +until +([1-9][0-9]{0,11}) *", entry)
        if not match:
            raise ConfigError(
                f'{wrong} is not of the form "SEQUENCES until STEP"; use one such as "64 until'
                ' 1000"'
            )
        sequences = int(match[1])
        last_step = int(match[2])
        if sequences > MAX_SEQUENCES:
            raise ConfigError(f"{wrong} is too large; use at most {MAX_SEQUENCES} sequences")
        if ramp and last_step <= ramp[-1][1]:
            raise ConfigError(
                f"{wrong} does not come after step {ramp[-1][1]}, where the entry before it ends;"
                " use a later step"
            )
        ramp.append((sequences, last_step))
    return ramp


def gradient_accumulation_steps(
    training: Training, dp_degree: int, groups: int = 1
) -> list[tuple[int, float]]:
    """Return [(local batches of a rank and optimizer step, last step with this number), ...].

    The first entries are those of training.global_batch_ramp. The last one is
    training.global_batch_size, up to step infinity; by default one for each of `groups`,
    replica groups that share local batches (fault_tolerance). Raises ConfigError for a batch that
    `dp_degree` data-parallel ranks cannot share.
    """
    steps: list[tuple[int, float]] = []
    for sequences, last_step in batch_ramp(training.global_batch_ramp):
        written = f'training.global_batch_ramp: "{sequences} until {last_step}"'
        steps.append((_local_batches(sequences, training, dp_degree, written), last_step))
    if training.global_batch_size == -1:
        return [*steps, (groups, math.inf)]
    sequences = training.global_batch_size
    written = f"training.global_batch_size = {sequences}"
    return [*steps, (_local_batches(sequences, training, dp_degree, written), math.inf)]


def _local_batches(sequences: int, training: Training, dp_degree: int, written: str) -> int:
    """Return the local batches of a rank that make up a batch. written: it, for an error."""
    at_once = training.local_batch_size * dp_degree  # sequences of one local batch on every rank
    if sequences % at_once:
        raise ConfigError(
            f"{written} is not a multiple of training.local_batch_size x data-parallel degree ="
            f" {training.local_batch_size} x {dp_degree} = {at_once}; use"
            f" {alternatives(nearest_multiples(sequences, at_once))}"
        )
    return sequences // at_once
