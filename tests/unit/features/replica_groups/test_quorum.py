"""Local batches are dealt to living groups, and tensors are summed in buckets."""

import pytest
import torch

pytest.importorskip("torchft")

from titan_lite.features.replica_groups import quorum as module
from titan_lite.features.replica_groups.quorum import Quorum, buckets_of


@pytest.mark.parametrize(
    ("local_batches", "living", "shares"),
    [
        (8, 2, [range(4), range(4, 8)]),
        (8, 3, [range(2), range(2, 5), range(5, 8)]),
        (1, 2, [range(0), range(1)]),  # a batch may have fewer than there are groups
        (5, 1, [range(5)]),
    ],
)
def test_each_local_batch_is_of_one_group(local_batches, living, shares):
    found = []
    for index in range(living):
        group = object.__new__(Quorum)
        group.living = living
        group.index = index
        found.append(group.share(local_batches))
    assert found == shares
    assert [batch for share in found for batch in share] == list(range(local_batches))


def test_a_bucket_has_one_dtype_and_few_bytes(monkeypatch):
    monkeypatch.setattr(module, "BUCKET_BYTES", 40)
    tensors = [torch.zeros(n) for n in (4, 6, 1, 20, 3)] + [torch.zeros(2).double()]
    sizes = [[tensor.numel() for tensor in bucket] for bucket in buckets_of(tensors)]
    assert sizes == [[4, 6], [1], [20], [3], [2]]
    assert list(buckets_of([])) == []
