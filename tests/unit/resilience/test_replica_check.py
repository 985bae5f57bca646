"""Copies that part are found on every layout, named by rank and parameter; checksums see every bit
and every place.
"""

import math
import re

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from titan_lite.resilience import TrainingError
from titan_lite.resilience import replica_check as copies
from titan_lite.resilience.replica_check import (
    Findings,
    ReplicaCheck,
    TensorShard,
    describe,
    examine,
)


@pytest.fixture(scope="module", autouse=True)
def small_chunks():
    """So that a few numbers are several chunks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(copies.CHUNK, "cpu", 8)
        copies._weights.cache_clear()
        yield
    copies._weights.cache_clear()


# A checksum


def checksum(tensor):
    return examine(tensor)[0]


DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int32)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=2, max_size=40), st.data())
def test_it_sees_one_number_that_changes_and_two_that_change_places(numbers, data):
    bits = torch.tensor(numbers, dtype=torch.int32)
    before = checksum(bits.view(torch.float32))
    first, second = (data.draw(st.integers(0, len(numbers) - 1)) for _ in range(2))
    swapped = bits.clone()
    swapped[first], swapped[second] = bits[second], bits[first]
    assert bool(checksum(swapped.view(torch.float32)) == before) == torch.equal(swapped, bits)
    changed = bits.clone()
    changed[first] = data.draw(st.integers(-(2**31), 2**31 - 1))
    assert bool(checksum(changed.view(torch.float32)) == before) == torch.equal(changed, bits)


def test_of_places_a_chunk_apart_too():
    numbers = torch.randn(100)
    assert len({int(checksum(numbers.roll(shift))) for shift in range(100)}) == 100


def test_it_sees_where_the_only_negative_number_is():
    rows = torch.ones(16, 16) - 2 * torch.eye(16)
    assert len({int(checksum(row)) for row in rows}) == 16


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_of_the_numbers_in_their_order_and_not_of_their_strides(dtype):
    numbers = (100 * torch.randn(7, 5)).to(dtype)
    assert checksum(numbers.t().contiguous().t()) == checksum(numbers)
    assert checksum(numbers.t()) != checksum(numbers)
    assert checksum(numbers).dtype == torch.int64


def test_the_sign_of_zero_counts():
    assert checksum(torch.tensor([0.0, 1.0])) != checksum(torch.tensor([-0.0, 1.0]))


@pytest.mark.parametrize(
    ("dtype", "bits"), [(torch.float32, torch.int32), (torch.bfloat16, torch.int16)]
)
def test_equal_bits_of_what_is_no_number_are_equal_and_others_are_not(dtype, bits):
    nan = torch.tensor([math.nan, 1.0], dtype=dtype)
    assert checksum(nan) == checksum(nan.clone())
    payload = nan.clone()
    payload.view(bits)[0] += 1
    assert payload[0].isnan()
    assert checksum(payload) != checksum(nan)


def test_of_a_shard_without_rows_and_of_a_scalar():
    assert checksum(torch.empty(0, 8)) == 0
    assert checksum(torch.tensor(3.0)) != checksum(torch.tensor(4.0))


def test_several_changes_do_not_cancel():
    # as they do in a sum of numbers times their places: +1 -2 +1
    change, zeros = torch.tensor([1, -2, 1], dtype=torch.int32), torch.zeros(16, dtype=torch.int32)
    found = {int(checksum(torch.cat((zeros[:at], change, zeros[at + 3 :])))) for at in range(14)}
    assert 0 not in found


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
    check = ReplicaCheck(lambda: "step-2 is whole")
    check.check(1, tensors)  # equal
    function(dist.get_rank(), tensors)
    try:
        check.check(4, tensors)
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
