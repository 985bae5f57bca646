"""The ranks of a pipeline stage, which run the same graphs and agree on them.

    ranks = stage_ranks(mesh)
    ranks.all_equal("the same text on every rank")      # True

compile/rank_agreement.py says on what.
"""

import functools

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from titan_lite.distributed.process_group import all_equal, all_gather_objects, first_nonempty


class PipelineStageRanks:
    """The ranks of a pipeline stage, as compile's StageRanks."""

    def __init__(self, ranks: list[int], group: dist.ProcessGroup | None):
        self.ranks = ranks  # global
        self.group = group  # None: all ranks

    def all_equal(self, text: str) -> bool:
        return all_equal(text, self.group)

    def broadcast(self, text: str) -> str:
        return first_nonempty(text, self.group)

    def all_gather(self, text: str) -> dict[int, str]:
        return dict(zip(self.ranks, all_gather_objects(text, self.group), strict=True))


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
