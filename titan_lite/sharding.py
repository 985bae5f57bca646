"""Which part of a sharded dimension is a rank's, and which of the things that ranks share out.

    chunk_size(10, parts=4)             # 3
    chunk_range(10, parts=4, index=3)   # range(9, 10); the other chunks have 3 indices each
    share_out([1.0, 3.0, 2.0], ranks=2) # [{0: 1, 1: 2}, {1: 0}]

Needs no torch: the layout of a run is computed without it.
"""

import heapq
from collections.abc import Iterable


def chunk_size(size: int, parts: int) -> int:
    """Return the length of the longest chunk of `size`, cut as torch.chunk and DTensor do."""
    return (size + parts - 1) // parts


def chunk_range(size: int, parts: int, index: int) -> range:
    """Return the indices of chunk `index`. The last chunks may be shorter, or empty."""
    step = chunk_size(size, parts)
    return range(min(index * step, size), min((index + 1) * step, size))


def share_out(costs: Iterable[float], ranks: int) -> list[dict[int, int]]:
    """Return buckets of matrices, each as {owner: index of its matrix}, with at most one matrix for
    each of `ranks`.

    The costliest matrix goes first, always to the rank with least so far (Graham, SIAM J. Appl.
    Math. 17 (1969)). So costs within a bucket are alike. The answer depends on nothing but the
    costs: every rank has the same.
    """
    costs = list(costs)
    loads = [(0.0, rank) for rank in range(ranks)]
    counts = [0] * ranks  # matrices of each rank
    buckets: list[dict[int, int]] = []
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + costs[index], rank))
        if counts[rank] == len(buckets):
            buckets.append({})
        buckets[counts[rank]][rank] = index
        counts[rank] += 1
    return buckets
