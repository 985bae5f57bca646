"""All that a recipe can say: one frozen dataclass per TOML section, each key with its row (row.py).

    config.training.steps            # of a Config, which recipe.py reads from a TOML file and the command line
    KEYS["training.steps"].metadata["unit"]

Standard library only, so that a recipe can be checked in a tenth of a second, before torch is imported or a process is started.
"""

# ruff: noqa: RUF009 - sections are frozen

import dataclasses
from collections.abc import Mapping
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


def gradient_accumulation_steps(training: Training, dp_degree: int) -> int:
    """Microbatches of one rank in one optimizer step, for `dp_degree` data-parallel ranks. Raises ConfigError."""
    once = training.local_batch_size * dp_degree
    if training.global_batch_size == -1:
        return 1
    if training.global_batch_size % once:
        nearest = sorted({max(once, training.global_batch_size // once * once), -(-training.global_batch_size // once) * once})
        raise ConfigError(
            f"training.global_batch_size = {training.global_batch_size} is not a multiple of training.local_batch_size x "
            f"data-parallel degree = {training.local_batch_size} x {dp_degree} = {once}; "
            f"{' or '.join(map(str, nearest))} would work"
        )
    return training.global_batch_size // once
