"""Objects over ranks, which all tests with more than one process show over several; and errors
about another rank.
"""

import os
import tempfile

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from titan_lite.distributed.mesh import build_mesh
from titan_lite.distributed.process_group import (
    all_equal,
    all_gather_objects,
    first_nonempty,
    gather_to_rank_0,
    is_communication_error,
    limit_collectives,
    max_over_ranks,
    share_on_node,
    sum_over_ranks,
)


def test_a_process_without_a_group_has_its_own_alone():
    assert all_gather_objects("value") == ["value"]
    assert gather_to_rank_0("value") == ["value"]
    assert max_over_ranks(1, 2) == [1, 2]
    assert sum_over_ranks(1, 2) == [1, 2]
    assert first_nonempty("value") == "value"
    assert all_equal("value")


def share_on_two_nodes(folder):
    """Ranks 0 and 1 are on a node, and rank 2 is on another one."""
    rank = int(os.environ["RANK"])
    os.environ |= {"LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2" if rank < 2 else "1"}
    tempfile.tempdir = folder
    store = dist.FileStore(f"{folder}/store", 3)
    return share_on_node({"of": rank}, store)


def test_the_ranks_of_a_node_get_what_its_first_rank_has(tmp_path):
    shared = run_ranks(3, share_on_two_nodes, str(tmp_path))
    assert shared == [{"of": 0}, {"of": 0}, {"of": 2}]
    assert not list(tmp_path.glob("titan_lite-*"))


def test_a_rank_that_does_not_see_the_file_keeps_its_own(monkeypatch):
    for name, value in (("RANK", "1"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    store = dist.HashStore()
    dist.PrefixStore("node/0/0", store).set("file", "/absent/titan_lite-documents")
    assert share_on_node("own", store) == "own"
    assert dist.PrefixStore("node/0/0", store).check(["all have read it"])


def limits_of_groups():
    mesh = build_mesh(dict(pp=1, dp_replicate=1, dp_shard=2, cp=1, tp=1), "cpu")
    dist.new_group(backend="gloo", group_desc="saves")
    limit_collectives(930, but_for="saves")
    limits = {}
    for group in dist.distributed_c10d._world.pg_map:
        options = group._get_backend(torch.device("cpu")).options
        limits[group.group_desc] = options._timeout.total_seconds()
    assert mesh.get_group("dp_shard").group_desc in limits
    return limits


def test_all_groups_but_that_of_saves_have_the_limit():
    limits, _ = run_ranks(2, limits_of_groups)
    assert limits.pop("saves") != 930
    assert len(limits) > 1
    assert set(limits.values()) == {930}


def caused_by(cause):
    error = ValueError("a checkpoint")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (
            RuntimeError(
                "[/build/gloo/transport/tcp/pair.cc:553] Connection closed by peer"
                " [127.0.0.1]:10673"
            ),
            True,
        ),
        (dist.DistBackendError("NCCL error"), True),
        (caused_by(dist.DistNetworkError("gone")), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("gloo"), False),
        (caused_by(OSError("no space")), False),
    ],
)
def test_errors_of_communication_are_told_from_others(error, is_one):
    assert is_communication_error(error) == is_one
