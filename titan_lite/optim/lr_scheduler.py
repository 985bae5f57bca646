"""The learning rate as a function of the step: warm-up, constant, decay.

    lr_factor(step, config.lr_scheduler, total_steps=1000) * config.optimizer.lr

There is no state: a resumed run has the same learning rate at the same step.
"""

import math

from titan_lite.config import LRScheduler


def lr_factor(step: int, config: LRScheduler, total_steps: int) -> float:
    """Return the learning rate of optimizer step `step` (the first is 1) relative to the peak.

    It rises linearly from 0 to 1 over warmup_steps, stays at 1, and decays towards min_lr_factor
    over the last decay_ratio x total_steps (or the steps that warm-up leaves). It reaches
    min_lr_factor one step after total_steps: a last step at zero would learn nothing (torchtitan
    issue 1261). With decay_ratio = 0 there is no decay.
    """
    if step <= config.warmup_steps:
        return step / config.warmup_steps
    decay_steps = min(round(config.decay_ratio * total_steps), total_steps - config.warmup_steps)
    done = step - (total_steps - decay_steps)
    if done <= 0 or decay_steps <= 0:
        return 1.0
    progress = min(done / (decay_steps + 1), 1.0)
    shape = {
        "linear": 1 - progress,
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        "sqrt": 1 - math.sqrt(progress),
    }[config.decay_type]
    return config.min_lr_factor + (1 - config.min_lr_factor) * shape
