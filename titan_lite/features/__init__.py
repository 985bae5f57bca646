"""Optional parts of a run. The rest of the package imports none of them: it asks for those that a
recipe turns on.

A feature is a folder with
    keys.py      KEYS, the keys that it adds to a recipe; TENSORS, what the tensors are that it adds
                 to checkpoints, by the first word of their names; OPTIMIZERS, the rows of
                 optimizers; SCHEDULES, those of pipeline schedules; VALUES, what it adds to the
                 values of another key; and OF_TORCHTITAN, what to use in place of keys of
                 torchtitan (config/nearest.py), if it has any; always imported, without torch
    rules.py     what cannot be together with these keys (titan_lite/rules/); always imported
    feature.py   FEATURE, its Feature (titan_lite/feature.py): where it takes part in a run

and whatever these import. To remove a feature, delete its folder, its tests, its line here and that
in pyproject.toml.
"""

from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

FEATURES = (
    "matrix_optimizers",
    "moe",
    "float8",
    "powersgd",
    "replica_groups",
    "own_family",
    "evaluation",
    "watchdog",
    "replica_check",
    "cost_buckets",
    "async_tp",
    "split_backward",
)


def part_of_each(name: str) -> Iterator[ModuleType]:
    """Import and yield a module, such as "keys", of each feature."""
    for feature in FEATURES:
        yield import_module(f"titan_lite.features.{feature}.{name}")


# Whoever imports a feature's keys first needs the tables that they are added to.
import titan_lite.config  # noqa: E402, F401
