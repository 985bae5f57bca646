"""The comparison of replicas in a run: of every run, which saves no replicas that differ."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from titan_lite.config import Config
from titan_lite.feature import Feature

if TYPE_CHECKING:
    from titan_lite.hooks import Hook


class ReplicaCheckFeature(Feature):
    def is_on(self, config: Config) -> bool:
        return True

    def hooks(self, config: Config) -> Sequence["Hook"]:
        from titan_lite.features.replica_check.comparison import CompareReplicas

        return [CompareReplicas(config.training.compare_replicas_freq)]


FEATURE = ReplicaCheckFeature()
