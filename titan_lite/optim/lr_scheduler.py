"""The learning rate as a function of the step: warm-up, constant, decay.

    decay = decay_of(config.lr_scheduler, 10_000, layout.tokens_until)
    lr_factor(8001, config.lr_scheduler, decay) * config.optimizer.lr

There is no state: a resumed run has the same learning rate at the same step.
"""

import bisect
import math
from collections.abc import Callable
from typing import NamedTuple

from titan_lite.config import LRScheduler
from titan_lite.config.batch_sizes import number_of_tokens


class Decay(NamedTuple):
    """The steps over which the learning rate decays."""

    begin: int  # the last step before it
    steps: int  # 0: there is none

    @property
    def end(self) -> int:
        """The last step of the decay."""
        return self.begin + self.steps


def decay_of(schedule: LRScheduler, steps: int, tokens_until: Callable[[int], int]) -> Decay:
    """Return the decay of a schedule in steps.

    steps: of the run. tokens_until: (step) -> tokens of all steps up to it, over all ranks.
    """
    if schedule.decay_begin != "":
        begin = _steps_of(schedule.decay_begin, steps, tokens_until)
    elif schedule.decay_length == "":
        begin = schedule.warmup_steps
    else:
        # the last so many tokens
        length = _steps_of(schedule.decay_length, steps, tokens_until, until=steps)
        begin = max(steps - length, schedule.warmup_steps)
        return Decay(begin, max(0, steps - begin))
    if schedule.decay_length == "":
        return Decay(begin, max(0, steps - begin))
    return Decay(begin, _steps_of(schedule.decay_length, steps, tokens_until, after=begin))


def _steps_of(
    amount: int | str,
    steps: int,
    tokens_until: Callable[[int], int],
    *,
    after: int = 0,
    until: int | None = None,
) -> int:
    """Return the steps after `after`, or up to `until`, that have an amount.

    amount: a number of steps, "20%" of `steps`, or "2B tokens", which are rounded up to steps.
    """
    if isinstance(amount, int):
        return amount
    if amount.endswith("%"):
        return round(float(amount.removesuffix("%")) / 100 * steps)
    tokens = number_of_tokens(amount)
    if until is not None:
        most = max(0, tokens_until(until) - tokens)
        return until - bisect.bisect_right(range(1, until + 1), most, key=tokens_until)
    most = tokens_until(after) + tokens
    # a step has one token or more
    return bisect.bisect_left(range(after, after + tokens), most, key=tokens_until)


def lr_factor(step: int, schedule: LRScheduler, decay: Decay) -> float:
    """Return the learning rate of optimizer step `step` (the first is 1) relative to the peak.

    It rises linearly from 0 to 1 over warmup_steps, stays at 1, and decays towards min_lr_factor,
    where it stays. It reaches min_lr_factor one step after the decay's last: a last step at zero
    would learn nothing (torchtitan issue 1261).
    """
    if step <= schedule.warmup_steps:
        return step / schedule.warmup_steps
    done = step - decay.begin
    if done <= 0 or decay.steps <= 0:
        return 1.0
    progress = min(done / (decay.steps + 1), 1.0)
    shape = {
        "linear": 1 - progress,
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        "sqrt": 1 - math.sqrt(progress),
    }[schedule.decay_type]
    return schedule.min_lr_factor + (1 - schedule.min_lr_factor) * shape
