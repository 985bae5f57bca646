"""Rules of [lr_scheduler]: a schedule that is as long as the run."""

from collections.abc import Iterator

from titan_lite.config import Config
from titan_lite.rules.mistakes import Mistake, rule_of_keys


@rule_of_keys
def lr_schedule_is_as_long_as_the_run(config: Config) -> Iterator[Mistake]:
    schedule = config.lr_scheduler
    steps = config.training.steps
    if schedule.total_steps == -1:
        return
    if schedule.total_steps < schedule.warmup_steps:
        yield Mistake(
            key="lr_scheduler.warmup_steps",
            value=schedule.warmup_steps,
            why=f"is longer than lr_scheduler.total_steps = {schedule.total_steps}",
            instead=f"warmup_steps = {max(1, schedule.total_steps // 10)}",
        )
    if schedule.total_steps < steps:
        yield Mistake(
            key="lr_scheduler.total_steps",
            value=schedule.total_steps,
            why=f"ends before training.steps = {steps}",
            instead="-1 or at least that many",
        )
