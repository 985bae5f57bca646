"""Config: one frozen dataclass per TOML section of a recipe, each key with its row (row.py).

    config.training.steps            # a Config is read by recipe.py from a TOML file and the command line
    KEYS["training.steps"].metadata["unit"]

Standard library only, so that a recipe is checked in a tenth of a second, before torch is imported or a process is started.
"""

# ruff: noqa: RUF009 - sections are frozen

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from titan_lite.config.learning import (
    Data,
    Debug,
    Job,
    LRScheduler,
    Model,
    Optimizer,
    Training,
    Validation,
)
from titan_lite.config.row import ConfigError
from titan_lite.config.system import (
    ActivationCheckpoint,
    Checkpoint,
    Comm,
    Compile,
    Float8,
    Metrics,
    Parallelism,
    Profiling,
)


@dataclass(frozen=True)
class Config:
    job: Job = Job()
    model: Model = Model()
    training: Training = Training()
    optimizer: Optimizer = Optimizer()
    lr_scheduler: LRScheduler = LRScheduler()
    parallelism: Parallelism = Parallelism()
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint()
    float8: Float8 = Float8()
    compile: Compile = Compile()
    checkpoint: Checkpoint = Checkpoint()
    data: Data = Data()
    validation: Validation = Validation()
    metrics: Metrics = Metrics()
    profiling: Profiling = Profiling()
    comm: Comm = Comm()
    debug: Debug = Debug()

    @property
    def total_steps(self) -> int:
        """Length of the learning-rate schedule, in steps."""
        return (
            self.training.steps
            if self.lr_scheduler.total_steps == -1
            else self.lr_scheduler.total_steps
        )


SECTIONS: dict[str, Any] = {field.name: type(field.default) for field in dataclasses.fields(Config)}
KEYS: dict[str, dataclasses.Field] = {
    f"{name}.{f.name}": f for name, cls in SECTIONS.items() for f in dataclasses.fields(cls)
}


def flatten(config: Config) -> dict[str, Any]:
    """Return {"training.steps": 1000, ...} for all keys."""
    return {
        key: getattr(getattr(config, key.partition(".")[0]), key.partition(".")[2]) for key in KEYS
    }


def batch_ramp(entries: Sequence[str]) -> list[tuple[int, int]]:
    """Parse training.global_batch_ramp into [(sequences, last step with this batch size), ...]. Raises ConfigError."""
    ramp: list[tuple[int, int]] = []
    for entry in entries:
        wrong = f'training.global_batch_ramp: "{entry}"'
        found = re.fullmatch(" *([1-9][0-9]{0,11}) +until +([1-9][0-9]{0,11}) *", entry)
        if not found:
            raise ConfigError(
                f'{wrong} is not of the form "SEQUENCES until STEP"; use one such as "64 until 1000"'
            )
        sequences, last = map(int, found.groups())
        if sequences > 2**20:
            raise ConfigError(f"{wrong} is too large; use at most {2**20} sequences")
        if ramp and last <= ramp[-1][1]:
            raise ConfigError(
                f"{wrong} does not come after step {ramp[-1][1]}, where the entry before it ends; use a later step"
            )
        ramp.append((sequences, last))
    return ramp


def gradient_accumulation_steps(training: Training, dp_degree: int) -> list[tuple[int, float]]:
    """Return [(microbatches per rank and optimizer step, last step with this number), ...] for `dp_degree` data-parallel ranks.

    The first entries are those of training.global_batch_ramp. The last one is training.global_batch_size, up to step infinity.
    Raises ConfigError.
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
                f"training.global_batch{key} is not a multiple of training.local_batch_size x data-parallel degree = "
                f"{training.local_batch_size} x {dp_degree} = {once}; use {' or '.join(map(str, nearest))}"
            )
    return [*((size // once, last) for _, size, last in sizes), (final // once, math.inf)]
