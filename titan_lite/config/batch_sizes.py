"""Sequences of a step: the batch sizes of [training], and the microbatches that they take.

gradient_accumulation_steps(config.training, dp_degree=4)        # [(2, inf)]: two microbatches a rank in every step
"""

import math
import re
from collections.abc import Sequence

from titan_lite.config.errors import ConfigError
from titan_lite.config.sections import Training


def batch_ramp(entries: Sequence[str]) -> list[tuple[int, int]]:
    """Parse training.global_batch_ramp into [(sequences, last step with this batch size), ...].

    Raises ConfigError.
    """
    ramp: list[tuple[int, int]] = []
    for entry in entries:
        wrong = f'training.global_batch_ramp: "{entry}"'
        found = re.fullmatch(" *([1-9][0-9]{0,11}) +until +([1-9][0-9]{0,11}) *", entry)
        if not found:
            raise ConfigError(
                f'{wrong} is not of the form "SEQUENCES until STEP"; use one such as "64 until'
                ' 1000"'
            )
        sequences, last = map(int, found.groups())
        if sequences > 2**20:
            raise ConfigError(f"{wrong} is too large; use at most {2**20} sequences")
        if ramp and last <= ramp[-1][1]:
            raise ConfigError(
                f"{wrong} does not come after step {ramp[-1][1]}, where the entry before it ends;"
                " use a later step"
            )
        ramp.append((sequences, last))
    return ramp


def gradient_accumulation_steps(training: Training, dp_degree: int) -> list[tuple[int, float]]:
    """Return [(microbatches per rank and optimizer step, last step with this number), ...] for
    `dp_degree` data-parallel ranks.

    The first entries are those of training.global_batch_ramp. The last one is
    training.global_batch_size, up to step infinity. Raises ConfigError.
    """
    once = training.local_batch_size * dp_degree
    sizes = [
        (f'_ramp: "{size} until {last}"', size, last)
        for size, last in batch_ramp(training.global_batch_ramp)
    ]
    final = once if training.global_batch_size == -1 else training.global_batch_size
    for key, size, _ in [*sizes, (f"_size = {final}", final, math.inf)]:
        if size % once:
            nearest = sorted({max(once, size // once * once), -(-size // once) * once})
            raise ConfigError(
                f"training.global_batch{key} is not a multiple of training.local_batch_size x"
                f" data-parallel degree = {training.local_batch_size} x {dp_degree} = {once}; use"
                f" {' or '.join(map(str, nearest))}"
            )
    return [*((size // once, last) for _, size, last in sizes), (final // once, math.inf)]
