"""The mesh of a recipe's degrees."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from titan_lite.distributed.layout import AXES
from titan_lite.distributed.mesh import build_mesh


@pytest.fixture
def rank_5_of_8():
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    yield
    dist.destroy_process_group()


def test_the_mesh_has_every_axis_with_shards_on_neighbouring_ranks(rank_5_of_8):
    mesh = build_mesh(
        {"tp": 1, "dp_shard": 4, "cp": 1, "dp_replicate": 2, "pp": 1}, "cpu"
    )  # in whatever order
    assert mesh.mesh_dim_names == AXES == ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    assert mesh.shape == (1, 2, 4, 1, 1)
    assert mesh["dp_shard"].mesh.tolist() == [4, 5, 6, 7]
    assert mesh["dp_replicate"].mesh.tolist() == [1, 5]
    assert (mesh["dp_replicate"].get_local_rank(), mesh["dp_shard"].get_local_rank()) == (1, 1)
    assert [mesh[axis].size() for axis in ("pp", "cp", "tp")] == [1, 1, 1]
    assert torch.equal(mesh.mesh.flatten(), torch.arange(8))
