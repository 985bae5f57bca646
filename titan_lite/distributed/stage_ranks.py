"""The ranks of a pipeline stage, which run the same graphs and agree on them.

    ranks = stage_ranks(mesh)
    ranks.all_equal("the same text on every rank")      # True

compile/rank_agreement.py says on what.
"""

import functools
import os
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from titan_lite.compile.rank_agreement import PlaceOnNode
from titan_lite.distributed.process_group import all_equal, all_gather_objects, first_nonempty


class PipelineStageRanks:
    """The ranks of a pipeline stage, as compile's StageRanks."""

    def __init__(self, ranks: list[int], group: dist.ProcessGroup | None):
        self.ranks = ranks  # global
        self.group = group  # None: all ranks

    @property
    def place_on_node(self) -> PlaceOnNode:
        rank = dist.get_rank()
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return place_on_node(self.ranks, rank, local_rank, local_size)

    def all_equal(self, text: str) -> bool:
        return all_equal(text, self.group)

    def broadcast(self, text: str) -> str:
        return first_nonempty(text, self.group)

    def all_gather(self, text: str) -> dict[int, str]:
        return dict(zip(self.ranks, all_gather_objects(text, self.group), strict=True))


def place_on_node(stage: Sequence[int], rank: int, local_rank: int, local_size: int) -> PlaceOnNode:
    """Return the place of `rank` among the ranks of its stage on its node.

    Launchers number the ranks of a node consecutively. local_size: number of ranks on the node.
    """
    first = rank - local_rank
    on_node = [other for other in stage if first <= other < first + local_size]
    return PlaceOnNode(on_node.index(rank), len(on_node))


@functools.cache
def stage_ranks(mesh: DeviceMesh) -> PipelineStageRanks:
    """Return the ranks of this rank's pipeline stage.

    It may make process groups, which all ranks do together.
    """
    stage = mesh.mesh.select(0, mesh["pp"].get_local_rank()).flatten()
    if mesh["pp"].size() == 1:
        return PipelineStageRanks(stage.tolist(), None)
    by_stage = DeviceMesh(mesh.device_type, mesh.mesh.flatten(1), mesh_dim_names=("pp", "stage"))
    return PipelineStageRanks(stage.tolist(), by_stage.get_group("stage"))
