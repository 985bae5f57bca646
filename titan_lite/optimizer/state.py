"""Describe what an optimizer keeps of each parameter, and share matrices out to owners. Plain numbers, for run and planner alike.

is_matrix("layers.0.attention.wq.weight")               # True: Muon updates it as a whole
matrices = {"layers.0.attention.wq.weight": (4096, 4096), ...}
share_out(map(newton_schulz_flops, matrices.values()), ranks=8)      # [{0: 4, 1: 5, ...}, ...]: buckets of {owner: matrix}
"""

import heapq
import math
from collections.abc import Iterable, Mapping

Shapes = Mapping[str, tuple[int, ...]]  # of parameters, by FQN

MOMENTS_OF_MATRIX = {"AdamW": 2, "Muon": 1}  # by optimizer.name; of other parameters there are AdamW's two
AT_ONCE = 8  # whole matrices in memory at an owner: the iteration's, and those that two all-to-alls send and receive


def is_matrix(fqn: str) -> bool:
    """Return True for the weights within blocks, norms excepted. The others, embedding and output too, are AdamW's."""
    return fqn.startswith("layers.") and "norm" not in fqn


def numbers_in(shapes: Shapes) -> int:
    return sum(map(math.prod, shapes.values()))


def with_one_moment(name: str, shapes: Shapes) -> float:
    """Return the share of these parameters of which an optimizer keeps one moment; of the others it keeps two."""
    matrices = {fqn: shape for fqn, shape in shapes.items() if is_matrix(fqn)}
    return (2 - MOMENTS_OF_MATRIX[name]) * numbers_in(matrices) / numbers_in(shapes)


def newton_schulz_flops(shape: tuple[int, ...], steps: int = 1) -> float:
    """Return the floating-point operations of the iteration: three products a step, of which one is of squares."""
    short, long = sorted(shape)
    return steps * (4.0 * short * short * long + 2.0 * short**3)


def share_out(costs: Iterable[float], ranks: int) -> list[dict[int, int]]:
    """Return buckets of matrices, each as {owner: number of its matrix}, with at most one matrix for each of `ranks`.

    The costliest matrix goes first, always to the rank with least so far (Graham, SIAM J. Appl. Math. 17 (1969)). So costs within
    a bucket are alike. The answer depends on nothing but the costs: every rank has the same.
    """
    costs = list(costs)
    loads, counts = [(0.0, rank) for rank in range(ranks)], [0] * ranks
    buckets: list[dict[int, int]] = []
    for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + costs[number], rank))
        if counts[rank] == len(buckets):
            buckets.append({})
        buckets[counts[rank]][rank] = number
        counts[rank] += 1
    return buckets
