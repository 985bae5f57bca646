"""All that a recipe can say: one frozen dataclass per TOML section, each key with its row (row.py).

    config.training.steps            # of a Config, which recipe.py reads from a TOML file and the command line
    KEYS["training.steps"].metadata["unit"]

Standard library only, so that a recipe can be checked in a tenth of a second, before torch is imported or a process is started.
"""

# ruff: noqa: RUF009 - sections are frozen

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from titan_lite.config.learning import Data, Debug, Job, LRScheduler, Model, Optimizer, Training, Validation
from titan_lite.config.row import ConfigError, Need
from titan_lite.config.system import ActivationCheckpoint, Checkpoint, Comm, Compile, Metrics, Parallelism, Profiling


@dataclass(frozen=True)
class Config:
    job: Job = Job()
    model: Model = Model()
    training: Training = Training()
    optimizer: Optimizer = Optimizer()
    lr_scheduler: LRScheduler = LRScheduler()
    parallelism: Parallelism = Parallelism()
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint()
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
        return self.training.steps if self.lr_scheduler.total_steps == -1 else self.lr_scheduler.total_steps


SECTIONS: dict[str, Any] = {field.name: type(field.default) for field in dataclasses.fields(Config)}
KEYS: dict[str, dataclasses.Field] = {f"{name}.{f.name}": f for name, cls in SECTIONS.items() for f in dataclasses.fields(cls)}

DROPPED: dict[str, tuple[Any, str]] = {  # keys of earlier versions: the value that holds now, and where it went
    "optimizer.decay_norms": (False, "RMSNorm weights never decay; remove it"),
    "compile.bucket_memory": (-1.0, "a bucket and the one before it have as much as two blocks; remove it"),
    "checkpoint.explain": (False, "it is a flag of the command line, without a value: ./run_train.sh --checkpoint.explain"),
    "metrics.enable_color": (True, "NO_COLOR=1 in the environment turns colours off"),
    "profiling.save_traces_folder": ("profile_traces", "its name is profile_traces; remove it"),
    "profiling.save_memory_snapshot_folder": ("memory_snapshots", "its name is memory_snapshots; remove it"),
}


def flatten(config: Config) -> dict[str, Any]:
    """{"training.steps": 1000, ...} of all keys."""
    return {key: getattr(getattr(config, key.partition(".")[0]), key.partition(".")[2]) for key in KEYS}


def without_need(recipe: Mapping[str, Mapping[str, Any]], *, resuming: bool = False) -> dict[str, tuple[str, Need]]:
    """{key: (why, the need that is not met)} of the keys that have no effect in a recipe {section: {name: value}}, set or not.

    resuming: or none on a run that goes on.
    """
    found: dict[str, tuple[str, Need]] = {}
    for key, field in KEYS.items():
        for need in field.metadata["needs"] + (field.metadata["resume_needs"] if resuming else ()):
            if why := need.unmet(recipe):
                found.setdefault(key, (why, need))
    return found


def batch_ramp(entries: Sequence[str]) -> list[tuple[int, int]]:
    """training.global_batch_ramp as (sequences, the last step with so many). Raises ConfigError."""
    ramp: list[tuple[int, int]] = []
    for entry in entries:
        wrong = f'training.global_batch_ramp: "{entry}"'
        found = re.fullmatch(" *([1-9][0-9]{0,11}) +until +([1-9][0-9]{0,11}) *", entry)
        if not found:
            raise ConfigError(f'{wrong} is not sequences and the last step with so many: write it like "64 until 1000"')
        sequences, last = map(int, found.groups())
        if sequences > 2**20:
            raise ConfigError(f"{wrong}: a global batch has at most {2**20} sequences")
        if ramp and last <= ramp[-1][1]:
            raise ConfigError(
                f"{wrong} does not come after step {ramp[-1][1]}, where the entry before it ends; a later step would"
            )
        ramp.append((sequences, last))
    return ramp


def gradient_accumulation_steps(training: Training, dp_degree: int) -> list[tuple[int, float]]:
    """(microbatches of one rank in one optimizer step, the last step with so many), for `dp_degree` data-parallel ranks.

    Those of training.global_batch_ramp, and of training.global_batch_size, whose last step is infinity. Raises ConfigError.
    """
    once = training.local_batch_size * dp_degree
    sizes = [(f'_ramp: "{size} until {last}"', size, last) for size, last in batch_ramp(training.global_batch_ramp)]
    final = once if training.global_batch_size == -1 else training.global_batch_size
    for key, size, _ in [*sizes, (f"_size = {final}", final, math.inf)]:
        if size % once:
            nearest = sorted({max(once, size // once * once), -(-size // once) * once})
            raise ConfigError(
                f"training.global_batch{key} is not a multiple of training.local_batch_size x data-parallel degree = "
                f"{training.local_batch_size} x {dp_degree} = {once}; {' or '.join(map(str, nearest))} would work"
            )
    return [*((size // once, last) for _, size, last in sizes), (final // once, math.inf)]
