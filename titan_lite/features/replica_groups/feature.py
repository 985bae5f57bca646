"""Replica groups in a run."""

from typing import TYPE_CHECKING

from titan_lite.config import Config
from titan_lite.environment import set_torchft_variables
from titan_lite.feature import Feature

if TYPE_CHECKING:
    from titan_lite.features.replica_groups.groups import SeveralGroups
    from titan_lite.trainer import Trainer


class ReplicaGroupsFeature(Feature):
    def is_on(self, config: Config) -> bool:
        return config.fault_tolerance.replica_groups > 1

    def replica_groups(self, trainer: "Trainer") -> "SeveralGroups":
        set_torchft_variables()
        from titan_lite.features.replica_groups.groups import SeveralGroups

        return SeveralGroups(trainer)


FEATURE = ReplicaGroupsFeature()
