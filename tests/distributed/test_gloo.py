"""All-gathers on gloo do not go by the coalesced one, with which a process that has many in flight
may die.
"""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from titan_lite.distributed.gloo import gather_without_coalescing

collectives = torch.ops._c10d_functional


def many_in_flight(rounds):
    gather_without_coalescing()
    ranks, group = dist.get_world_size(), dist.group.WORLD.group_name
    shards = [torch.full((4, 2), float(dist.get_rank() + number)) for number in range(16)]
    gradients = [shard.repeat(ranks, 1) for shard in shards]
    for _ in range(rounds):
        gathered = [collectives.all_gather_into_tensor(shard, ranks, group) for shard in shards]
        reduced = [
            collectives.reduce_scatter_tensor(gradient, "sum", ranks, group)
            for gradient in gradients
        ]
        results = [
            [collectives.wait_tensor(each) for each in started] for started in (gathered, reduced)
        ]
    return results


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_collectives_in_flight_leave_the_heap_whole(ranks):
    for gathered, reduced in run_ranks(ranks, many_in_flight, 500):
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
    for prepare in (lambda: None, gather_without_coalescing):
        prepare()
        with torch.profiler.profile() as profile:
            whole = collectives.wait_tensor(collectives.all_gather_into_tensor(shard, 2, group))
        found.append((whole, {event.name for event in profile.events()}))
    return found
