"""The ranks of a pipeline stage, which run the same graphs and compare them."""

import functools

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from titan_lite.compile.rank_agreement import Peers
from titan_lite.distributed.process_group import alike, first_word, gather_objects


class StagePeers(Peers):
    """The ranks of a pipeline stage, by global rank. group: None for all ranks."""

    def __init__(self, ranks: list[int], group: dist.ProcessGroup | None):
        self.ranks, self.group = ranks, group

    def alike(self, word: str) -> bool:
        return alike(word, self.group)

    def first(self, word: str) -> str:
        return first_word(word, self.group)

    def all(self, word: str) -> dict[int, str]:
        return dict(zip(self.ranks, gather_objects(word, self.group), strict=True))


@functools.cache
def stage_peers(mesh: DeviceMesh) -> StagePeers:
    """The ranks of this rank's pipeline stage.

    It may make process groups, which all ranks do together.
    """
    stage = mesh.mesh.select(0, mesh["pp"].get_local_rank()).flatten()
    group = None
    if mesh["pp"].size() > 1:
        group = DeviceMesh(mesh.device_type, mesh.mesh.flatten(1), mesh_dim_names=("pp", "stage"))[
            "stage"
        ].get_group()
    return StagePeers(stage.tolist(), group)
