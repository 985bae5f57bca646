"""Collectives on gloo: many in flight, all-gathers without the coalesced one, and reduce-scatters by an all-to-all."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from titan_lite.distributed.gloo import replace_kernels

collectives = torch.ops._c10d_functional


def many_in_flight(rounds, coalesced):
    replace_kernels()
    ranks, group = dist.get_world_size(), dist.group.WORLD.group_name
    shards = [torch.full((4, 2), float(dist.get_rank() + number)) for number in range(16)]
    gradients = [shard.repeat(ranks, 1) for shard in shards]
    for _ in range(rounds):
        if coalesced:
            gathered = collectives.all_gather_into_tensor_coalesced(shards, ranks, group)
            reduced = collectives.reduce_scatter_tensor_coalesced(gradients, "sum", ranks, group)
        else:
            gathered = [collectives.all_gather_into_tensor(shard, ranks, group) for shard in shards]
            reduced = [collectives.reduce_scatter_tensor(gradient, "sum", ranks, group) for gradient in gradients]
        results = [[collectives.wait_tensor(each) for each in started] for started in (gathered, reduced)]
    return results


def reduced(shape, dtype):
    replace_kernels()
    group, rank = dist.group.WORLD, dist.get_rank()
    numbers = torch.arange(float(torch.Size(shape).numel())).view(shape).to(dtype)
    started = [
        collectives.reduce_scatter_tensor(factor * (rank + 1) * numbers, "sum", group.size(), group.group_name)
        for factor in (1, 2)
    ]
    again = [collectives.wait_tensor(collectives.wait_tensor(each)) for each in reversed(started)]
    with pytest.raises(NotImplementedError, match='reduce_op = "max" is not there; use "sum"'):
        collectives.reduce_scatter_tensor(numbers, "max", group.size(), group.group_name)
    return again[::-1], numbers.chunk(group.size())[rank]


@pytest.mark.parametrize(("shape", "dtype"), [((6, 5), torch.float32), ((12,), torch.bfloat16), ((3, 0), torch.float32)])
def test_a_reduce_scatter_sums_the_parts_of_all_ranks(shape, dtype):
    for (once, twice), own in run_ranks(3, reduced, shape, dtype):
        assert torch.equal(once, 6 * own)
        assert torch.equal(twice, 12 * own)


@pytest.mark.parametrize(("ranks", "coalesced"), [(1, False), (2, False), (2, True)])
def test_collectives_in_flight_leave_the_heap_whole(ranks, coalesced):
    for gathered, reduced in run_ranks(ranks, many_in_flight, 500, coalesced):
        for number, (whole, part) in enumerate(zip(gathered, reduced, strict=True)):
            expected = [rank + number for rank in range(ranks)]
            assert whole[:, 0].tolist() == [float(each) for each in expected for _ in range(4)]
            assert part.unique().tolist() == [float(sum(expected))]


def test_gathering_without_coalescing_has_the_same_result_by_another_operation():
    """If torch's own is no longer the coalesced one, the module is not needed any more."""
    for before, after in run_ranks(2, compare):
        assert torch.equal(before[0], after[0])
        assert "c10d::allgather_into_tensor_coalesced_" in before[1]
        assert "c10d::allgather_into_tensor_coalesced_" not in after[1]


def compare():
    """[(what was gathered, the operations that took)], first without the way round it."""
    group, shard = dist.group.WORLD.group_name, torch.arange(6.0).reshape(3, 2) + dist.get_rank()
    found = []
    for prepare in (lambda: None, replace_kernels):
        prepare()
        with torch.profiler.profile() as profile:
            whole = collectives.wait_tensor(collectives.all_gather_into_tensor(shard, 2, group))
        found.append((whole, {event.name for event in profile.events()}))
    return found
