"""All-gathers on gloo do not go by the coalesced one, with which a process that has many in flight
may die.
"""

import torch
import torch.distributed as dist
from ranks import run_ranks

from titan_lite.distributed.gloo import gather_without_coalescing

collectives = torch.ops._c10d_functional


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
