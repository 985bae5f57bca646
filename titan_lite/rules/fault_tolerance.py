"""Rules of [fault_tolerance]: what goes together with replica groups that may be lost."""

import os
import re
from collections.abc import Iterator

from titan_lite.config import Config
from titan_lite.environment import COPY, LAST_PORT
from titan_lite.feature import FEATURES
from titan_lite.rules.mistakes import Mistake, keys_set, rule_of_keys

ADDRESS = r"http://(\[[0-9a-fA-F:]+\]|[^\s/:]+):([0-9]{1,5})"


@rule_of_keys
def keys_are_read_with_groups(config: Config) -> Iterator[Mistake]:
    settings = config.fault_tolerance
    if settings.replica_groups > 1:
        return
    keys = [f"fault_tolerance.{name}" for name in type(settings).model_fields]
    for key, value in keys_set(config, keys).items():
        why = "has no effect with fault_tolerance.replica_groups = 1"
        yield Mistake(key, value, why, "fault_tolerance.replica_groups = 2 or more, or remove it")


@rule_of_keys
def groups_are_enough(config: Config) -> Iterator[Mistake]:
    settings = config.fault_tolerance
    if settings.replica_groups > 1 and settings.min_replica_groups > settings.replica_groups:
        why = f"is more than fault_tolerance.replica_groups = {settings.replica_groups}"
        instead = f"1 to {settings.replica_groups}"
        yield Mistake(
            "fault_tolerance.min_replica_groups", settings.min_replica_groups, why, instead
        )


@rule_of_keys
def a_sum_ends_before_a_step_is_called_a_hang(config: Config) -> Iterator[Mistake]:
    seconds = config.fault_tolerance.timeout_seconds
    limit = config.comm.train_timeout_seconds
    if (
        config.fault_tolerance.replica_groups > 1 and 2 * seconds >= limit
    ):  # two ranks, one after another
        why = f"is not below half of comm.train_timeout_seconds = {limit}, when a group ends"
        most = (limit - 1) // 2
        instead = "a higher comm.train_timeout_seconds"
        if most > 0:
            instead = f"{most} or less, or {instead}"
        yield Mistake("fault_tolerance.timeout_seconds", seconds, why, instead)


@rule_of_keys
def a_lighthouse_has_an_address(config: Config) -> Iterator[Mistake]:
    address = config.fault_tolerance.lighthouse
    match = re.fullmatch(ADDRESS, address)
    if address and not (match and 0 < int(match[2]) <= LAST_PORT):
        why = "is not of the form http://HOST:PORT"
        yield Mistake("fault_tolerance.lighthouse", address, why, "such as http://node0:29510")


@rule_of_keys
def groups_have_no_replicas(config: Config) -> Iterator[Mistake]:
    """Gradients are summed over replica groups by torchft, and over replicas by the mesh."""
    groups = config.fault_tolerance.replica_groups
    replicas = config.parallelism.data_parallel_replicate_degree
    if groups > 1 and replicas != 1:
        yield Mistake(
            key="parallelism.data_parallel_replicate_degree",
            value=replicas,
            why=(
                f"makes replicas that are lost together, within each of the {groups}"
                " groups of fault_tolerance.replica_groups"
            ),
            instead=f"1, and fault_tolerance.replica_groups = {groups * replicas}",
        )


@rule_of_keys
def groups_are_a_feature(config: Config) -> Iterator[Mistake]:
    groups = config.fault_tolerance.replica_groups
    if groups > 1 and "replica_groups" not in FEATURES:
        yield Mistake(
            "fault_tolerance.replica_groups",
            groups,
            "needs titan_lite/features/replica_groups/",
            "1",
        )


def missing_lighthouse(config: Config) -> Iterator[Mistake]:
    """Yield a mistake if a group that was started alone does not know where the others are."""
    if config.fault_tolerance.replica_groups > 1 and not config.fault_tolerance.address:
        yield Mistake(
            key="fault_tolerance.lighthouse",
            value="",
            why=(
                f"names no lighthouse for group {os.environ.get(COPY, 0)}, which ./run_train.sh has"
                " not started together with the others"
            ),
            instead="http://HOST:PORT of python -m titan_lite.lighthouse",
        )
