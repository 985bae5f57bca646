"""Sequences of a step: the local batches that a global batch takes; numbers of tokens in words.

gradient_accumulation_steps(config.training, dp_degree=4)   # 2: local batches of a rank in a step
number_of_tokens("2B tokens")                               # 2_000_000_000
"""

from titan_lite.config.errors import ConfigError, alternatives, nearest_multiples
from titan_lite.config.sections import Training

POWERS = {"M": 10**6, "B": 10**9, "T": 10**12}


def number_of_tokens(text: str) -> int:
    """Return the number of "2B tokens", "900 tokens", "15T" or "1e12".

    Raises ValueError and OverflowError.
    """
    number = text.removesuffix("tokens").strip()
    unit = number[-1:].upper()
    return round(float(number.rstrip("MBTmbt")) * POWERS.get(unit, 1))


def gradient_accumulation_steps(training: Training, dp_degree: int, groups: int = 1) -> int:
    """Return the local batches of a rank and optimizer step that training.global_batch_size makes;
    by default one for each of `groups`, replica groups that share local batches (fault_tolerance).

    Raises ConfigError for a batch that `dp_degree` data-parallel ranks cannot share.
    """
    sequences = training.global_batch_size
    if sequences == -1:
        return groups
    at_once = training.local_batch_size * dp_degree  # sequences of one local batch on every rank
    if sequences % at_once:
        raise ConfigError(
            f"training.global_batch_size = {sequences} is not a multiple of"
            " training.local_batch_size x data-parallel degree ="
            f" {training.local_batch_size} x {dp_degree} = {at_once}; use"
            f" {alternatives(nearest_multiples(sequences, at_once))}"
        )
    return sequences // at_once
