"""Warm-up, stable, decay: the learning rate as a plain function of the step.

    lr_factor(step, config.lr_scheduler, total_steps=1000) * config.optimizer.lr

It has no state: a resumed run is at the same learning rate because it is at the same step.
"""

import math

from titan_lite.config import LRScheduler


def lr_factor(step: int, config: LRScheduler, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (the first is 1) relative to the peak.

    Linear from 0 to 1 over warmup_steps, then 1, then over the last decay_ratio x total_steps (or what warm-up left of
    them) down to min_lr_factor, which step total_steps reaches, and keeps after it; with decay_ratio 0 it stays at the peak.
    A run shorter than the warm-up ends within it.
    """
    if step <= config.warmup_steps:
        return step / config.warmup_steps
    decay_steps = min(round(config.decay_ratio * total_steps), total_steps - config.warmup_steps)
    done = step - (total_steps - decay_steps)
    if done <= 0 or decay_steps <= 0:
        return 1.0
    progress = min(done / decay_steps, 1.0)
    shape = {
        "linear": 1 - progress,
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        "sqrt": 1 - math.sqrt(progress),
    }[config.decay_type]
    return config.min_lr_factor + (1 - config.min_lr_factor) * shape
