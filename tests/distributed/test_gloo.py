"""Many all-gathers in flight on gloo: without the way round torch's, a process dies within seconds."""

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
    for _ in range(rounds):
        gathered = [collectives.all_gather_into_tensor(shard, ranks, group) for shard in shards]
        reduced = [collectives.reduce_scatter_tensor(shard.repeat(ranks, 1), "sum", ranks, group) for shard in shards]
        results = [[collectives.wait_tensor(each) for each in started] for started in (gathered, reduced)]
    return results


@pytest.mark.parametrize("ranks", [1, 2])
def test_collectives_in_flight_leave_the_heap_whole(ranks):
    rounds = 3000 if ranks == 1 else 500
    for gathered, reduced in run_ranks(ranks, many_in_flight, rounds):
        for number, (whole, part) in enumerate(zip(gathered, reduced, strict=True)):
            expected = [rank + number for rank in range(ranks)]
            assert whole[:, 0].tolist() == [float(each) for each in expected for _ in range(4)]
            assert part.unique().tolist() == [float(sum(expected))]


def test_the_result_is_what_it_was():
    assert run_ranks(2, compare) == [True, True]


def compare():
    group, shard = dist.group.WORLD.group_name, torch.arange(6.0).reshape(3, 2) + dist.get_rank()
    before = collectives.wait_tensor(collectives.all_gather_into_tensor(shard, 2, group))
    gather_without_coalescing()
    return torch.equal(before, collectives.wait_tensor(collectives.all_gather_into_tensor(shard, 2, group)))
