"""Degrees of a recipe: a table of what resolves, and of what is refused with which words; then the
mesh itself.
"""

import math

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from titan_lite.config import ConfigError, Parallelism
from titan_lite.distributed.layout import AXES, resolve_degrees
from titan_lite.distributed.mesh import build_mesh


@pytest.mark.parametrize(
    ("replicate", "shard", "world_size", "expected"),
    [
        pytest.param(1, -1, 1, (1, 1), id="one rank"),
        pytest.param(2, -1, 8, (2, 4), id="HSDP takes what is left"),
        pytest.param(3, -1, 6, (3, 2), id="no power of two"),
        pytest.param(1, 8, 8, (1, 8), id="FSDP"),
        pytest.param(2, 4, 8, (2, 4), id="HSDP"),
    ],
)
def test_degrees_that_fit(replicate, shard, world_size, expected):
    recipe = Parallelism(data_parallel_replicate_degree=replicate, data_parallel_shard_degree=shard)
    degrees = resolve_degrees(recipe, world_size)
    assert degrees == {
        "pp": 1,
        "dp_replicate": expected[0],
        "dp_shard": expected[1],
        "cp": 1,
        "tp": 1,
    }
    assert math.prod(degrees.values()) == world_size


@pytest.mark.parametrize(
    ("settings", "world_size", "words"),
    [
        pytest.param(
            dict(data_parallel_replicate_degree=3, data_parallel_shard_degree=2),
            4,
            ["need 6 ranks, and there are 4; lower degrees until they multiply to 4, or start 6"],
            id="nor any other number of shards",
        ),
        pytest.param(
            dict(data_parallel_shard_degree=1),
            2,
            [
                "data_parallel_shard_degree = 1",
                "(all 1) need 1 ranks, and there are 2",
                "data_parallel_shard_degree = -1",
            ],
            id="one rank asked for",
        ),
    ],
)
def test_degrees_that_do_not_fit_are_refused_with_key_value_and_a_way_out(
    settings, world_size, words
):
    with pytest.raises(ConfigError) as error:
        resolve_degrees(Parallelism(**settings), world_size)
    for word in words:
        assert word in str(error.value)


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
