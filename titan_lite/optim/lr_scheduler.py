"""The learning rate as a function of the step: warm-up, constant, decay.

    decay = decay_of(config.lr_scheduler, 10_000, layout.tokens)
    lr_factor(8001, config.lr_scheduler, decay) * config.optimizer.lr

There is no state: a resumed run has the same learning rate at the same step.
"""

import math
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


def decay_of(schedule: LRScheduler, steps: int, tokens: int) -> Decay:
    """Return the decay of a schedule in steps.

    steps: of the run. tokens: of a step, over all ranks.
    """
    if schedule.decay_begin != "":
        begin = _steps_of(schedule.decay_begin, steps, tokens)
    elif schedule.decay_length == "":
        begin = schedule.warmup_steps
    else:
        length = _steps_of(schedule.decay_length, steps, tokens)
        begin = max(steps - length, schedule.warmup_steps)
        return Decay(begin, max(0, steps - begin))
    if schedule.decay_length == "":
        return Decay(begin, max(0, steps - begin))
    return Decay(begin, _steps_of(schedule.decay_length, steps, tokens))


def _steps_of(amount: int | str, steps: int, tokens: int) -> int:
    """Return an amount in steps: a number of them, "20%" of `steps`, or "2B tokens", which are
    rounded up to steps of `tokens`.
    """
    if isinstance(amount, int):
        return amount
    if amount.endswith("%"):
        return round(float(amount.removesuffix("%")) / 100 * steps)
    return -(-number_of_tokens(amount) // tokens)


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
