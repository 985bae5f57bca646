"""Rules of [lr_scheduler]: a decay that comes after the warm-up, and does not end at zero early."""

from collections.abc import Iterator

from titan_lite.config import Config
from titan_lite.distributed.layout import Layout
from titan_lite.optim.lr_scheduler import decay_of
from titan_lite.rules.mistakes import Mistake, rule_of_keys, rule_of_layout


@rule_of_keys
def decay_that_begins_has_a_length(config: Config) -> Iterator[Mistake]:
    schedule = config.lr_scheduler
    if schedule.decay_begin != "" and schedule.decay_length == 0:
        yield Mistake(
            key="lr_scheduler.decay_begin",
            value=schedule.decay_begin,
            why="has no effect: lr_scheduler.decay_length = 0 is no decay",
            instead='decay_begin = "", or another decay_length',
        )


@rule_of_layout
def decay_comes_after_the_warm_up(config: Config, layout: Layout) -> Iterator[Mistake]:
    schedule = config.lr_scheduler
    decay = decay_of(schedule, config.training.steps, layout.tokens)
    if schedule.decay_begin != "" and decay.begin < schedule.warmup_steps:
        step = "" if isinstance(schedule.decay_begin, int) else f"is step {decay.begin}, which "
        yield Mistake(
            key="lr_scheduler.decay_begin",
            value=schedule.decay_begin,
            why=f"{step}comes before lr_scheduler.warmup_steps = {schedule.warmup_steps}",
            instead="that step or a later one",
        )


@rule_of_layout
def learning_rate_is_not_zero_before_the_end(config: Config, layout: Layout) -> Iterator[Mistake]:
    schedule = config.lr_scheduler
    steps = config.training.steps
    decay = decay_of(schedule, steps, layout.tokens)
    if decay.steps and decay.end < steps and not schedule.min_lr_factor:
        length = steps - decay.begin
        yield Mistake(
            key="lr_scheduler.decay_length",
            value=schedule.decay_length,
            why=f"ends at step {decay.end}, and the rate is 0 up to training.steps = {steps}",
            instead=f"decay_length = {length}, or min_lr_factor above 0",
        )
