"""Copies that part are found on every layout, named by rank and parameter."""

import math
import re

import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from titan_lite.features.replica_check.comparison import (
    CompareReplicas,
    Findings,
    TensorShard,
    describe,
)
from titan_lite.resilience import TrainingError

# Which rank


def told(*found):
    return describe(
        [
            Findings(f"node-{rank}", dict(differing), list(names))
            for rank, (differing, names) in enumerate(found)
        ]
    )


W = TensorShard("w", (-1, 0, 0))
V = TensorShard("v", (-1, 1, 0))
STEP = TensorShard("optimizer.state.w.step", ())


def test_ranks_that_have_the_same_are_together():
    assert told(({W: 1}, ()), ({W: 1}, ()), ({W: 2}, ())) == (
        "rank 2 (node-2) and ranks 0-1 (node-0, node-1) have different copies of w"
    )
    assert told(({W: 1, STEP: 1}, ()), ({W: 2, STEP: 2}, ("w",))) == (
        "w is not finite on rank 1 (node-1); rank 0 (node-0) and rank 1 (node-1) have different"
        " copies of w and 1 other"
    )


def test_tensors_that_differ_between_other_ranks_are_apart():
    assert told(({V: 1}, ()), ({V: 1, W: 5}, ()), ({V: 2, W: 6}, ())) == (
        "rank 2 (node-2) and ranks 0-1 (node-0, node-1) have different copies of v; rank 1 (node-1)"
        " and rank 2 (node-2) have different copies of w"
    )


def test_what_is_not_finite_on_all_copies_is_no_difference():
    text = told(((), ("w", "v")), ((), ("w",)))
    assert text == "w and 1 other are not finite on ranks 0-1 (node-0, node-1)"


# On ranks


def changed(function):
    """Return the error of `check` after function(rank, tensors) has changed equal tensors on a mesh
    of 2 x 2.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    shard = torch.randn(
        3, 4, generator=torch.Generator().manual_seed(mesh["dp_shard"].get_local_rank())
    )
    whole = torch.randn(4, generator=torch.Generator().manual_seed(2))
    tensors = {
        "w": DTensor.from_local(shard, mesh, [Replicate(), Shard(0)], run_check=False),
        "half": DTensor.from_local(
            shard.bfloat16(), mesh, [Replicate(), Shard(0)], run_check=False
        ),
        "norm": DTensor.from_local(whole, mesh, [Replicate(), Replicate()], run_check=False),
        "empty": DTensor.from_local(
            torch.empty(0, 4), mesh, [Replicate(), Shard(0)], run_check=False
        ),
        "optimizer.state.w.step": torch.tensor(3.0),
    }
    hook = CompareReplicas(freq=2)
    hook.tensors = lambda: tensors
    hook.describe_saved = lambda: "step-2 is whole"
    hook.on_save(1)  # equal
    function(dist.get_rank(), tensors)
    hook.on_step_end(3)
    hook.on_save(4)  # compared by `on_step_end`
    try:
        hook.on_step_end(4)
    except TrainingError as error:
        return f"{error.everywhere}: " + re.sub(r" \(.+?\)", "", str(error))
    return ""


def nothing(rank, tensors):
    pass


def a_shard(rank, tensors):
    if rank == 3:
        tensors["w"].to_local()[1, 2] += 1e-6


def a_half(rank, tensors):
    if rank == 0:
        tensors["half"].to_local().view(torch.int16)[0, 0] ^= 1


def a_norm(rank, tensors):
    if rank == 2:
        tensors["norm"].to_local()[3].neg_()


def a_counter(rank, tensors):
    if rank == 1:
        tensors["optimizer.state.w.step"] += 1


def not_finite_alike(rank, tensors):
    if rank in (1, 3):
        tensors["w"].to_local()[0, 0] = math.nan


def on_ranks(functions):
    return [changed(function) for function in functions]


def test_each_rank_tells_the_same_of_every_layout():
    cases = {
        nothing: r"",
        a_shard: (
            r"step 4: rank 1 and rank 3 have different copies of w; so nothing was saved at this"
            r" step; step-2 is whole"
        ),
        a_half: r"step 4: rank 0 and rank 2 have different copies of half; .*",
        a_norm: r"step 4: rank 2 and ranks 0, 3 have different copies of norm; .*",
        a_counter: r"step 4: rank 1 and ranks 0, 3 have different copies of w.step; .*",
        not_finite_alike: (
            r"step 4: w is not finite on ranks 1, 3; so nothing was saved at this step; step-2"
            r" is whole"
        ),
    }
    for found in run_ranks(4, on_ranks, [*cases]):
        for text, expected in zip(found, cases.values(), strict=True):
            assert re.fullmatch(expected and f"True: {expected}", text)
