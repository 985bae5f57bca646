"""Describe what an optimizer keeps of each parameter, and share matrices out to owners.

Plain numbers, for run and planner alike.

is_matrix("layers.0.attention.wq.weight")               # True: Muon and Shampoo update it as a whole
OF_MATRIX["Muon"].cost(config, (4096, 4096))            # floating-point operations of its owner in a step
share_out(costs, ranks=8)                               # [{0: 4, 1: 5, ...}, ...]: buckets of {owner: number of its matrix}
"""

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from titan_lite.config import Optimizer

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]  # of parameters, by FQN

# whole matrices in memory at an owner: those that it computes with, and those that two all-to-alls
# send and receive
AT_ONCE = 8
# Operations of float32 products, divided by n^3, in the time of an eigendecomposition in float64.
# On a CPU they are 26 to 47 for n from 1024 to 256. The figure of a GPU, where most of the time is
# waiting for memory and launches, is a guess.
EIGENDECOMPOSITION = {"cpu": 30.0, "cuda": 1000.0}


def is_matrix(fqn: str) -> bool:
    """Return True for the weights within blocks, norms excepted.

    The others, embedding and output too, are AdamW's.
    """
    return fqn.startswith("layers.") and "norm" not in fqn


def numbers_in(shapes: Shapes) -> int:
    return sum(map(math.prod, shapes.values()))


def share_of_matrices(shapes: Shapes) -> float:
    """Return the share of these parameters that are in matrices within blocks."""
    return numbers_in({fqn: shape for fqn, shape in shapes.items() if is_matrix(fqn)}) / numbers_in(
        shapes
    )


def newton_schulz_flops(shape: Shape, steps: int = 1) -> float:
    """Return the floating-point operations of the iteration: three products a step, of which one is
    of squares.
    """
    short, long = sorted(shape)
    return steps * (4.0 * short * short * long + 2.0 * short**3)


def blocks_of(shape: Shape, most: int) -> list[tuple[slice, slice]]:
    """Return the blocks of a matrix with at most so many rows and columns each, row by row of
    blocks.
    """
    rows, columns = (
        [slice(start, min(start + most, size)) for start in range(0, size, most)] for size in shape
    )
    return [*itertools.product(rows, columns)]


def sides_of(shape: Shape, most: int) -> list[int]:
    """Return the rows and columns of each block: the sizes of Shampoo's factors of a matrix, L and
    then R.
    """
    return [side.stop - side.start for block in blocks_of(shape, most) for side in block]


def factor_numbers(shape: Shape, most: int, power: int = 2) -> int:
    """Return the sum over blocks of rows^2 + columns^2, the elements of Shampoo's factors of a
    matrix; or of another power.
    """
    return sum(side**power for side in sides_of(shape, most))


def turns_of(config: Optimizer, shapes: Shapes) -> list[list[int]]:
    """Return, for each matrix, the step of a period, from 0 on, in which the root of each of
    Shampoo's factors is computed.

    A matrix's roots are spread over the period, so that sums of n^3 are alike. Matrices of one
    shape, or its transpose, begin at different steps, by their places in the model: an owner of
    several has alike work in each step, and with other owners each root is computed in the same
    steps.
    """
    period, found, alike = (
        config.precondition_frequency,
        list[list[int]](),
        defaultdict[tuple, list[str]](list),
    )
    keys = {fqn: (int(fqn.split(".")[1]), *sorted(shape)) for fqn, shape in shapes.items()}
    for fqn, key in keys.items():
        alike[key].append(fqn)
    for fqn, shape in shapes.items():
        names, sides = alike[keys[fqn]], sides_of(shape, config.max_preconditioner_dim)
        place, steps = keys[fqn][0] * len(names) + names.index(fqn), min(period, len(sides))
        step_of = {
            number: step
            for each in share_out([side**3 for side in sides], steps)
            for step, number in each.items()
        }
        begin = place + place // period  # every second or tenth matrix begins at all steps, too
        found.append(
            [(begin + step_of[number] * period // steps) % period for number in range(len(sides))]
        )
    return found


def _shampoo_flops(config: Optimizer, shape: Shape) -> float:
    """Return the operations of two products for factors, and of two with their roots."""
    return 4.0 * math.prod(shape) * sum(min(config.max_preconditioner_dim, size) for size in shape)


class OfMatrix(NamedTuple):
    """Figures of an optimizer for a matrix within a block, some of them from its section and the
    matrix's shape.

    Of other parameters, there are AdamW's two moments.
    """

    moments: int  # tensors of its shape that are sharded as it is
    # bytes that are read and written for each element beside products, on its rank and its owner
    moved: float = 0.0
    on_owner: tuple[str, ...] = ()  # tensors that only its owner has
    kept: Callable[[Optimizer, Shape], float] = lambda config, shape: (
        0.0
    )  # elements of them, in float32
    flops: Callable[[Optimizer, Shape], float] = lambda config, shape: (
        0.0
    )  # of the owner's products; 0: it has no owner
    cubes: Callable[[Optimizer, Shape], float] = lambda config, shape: (
        0.0
    )  # sum of n^3 of its eigendecompositions, a step
    dtype: Callable[[Optimizer], str] = lambda config: (
        "float32"
    )  # of travelling matrices, and of products

    def cost(self, config: Optimizer, shape: Shape, device: str = "cuda") -> float:
        """Return the time of an owner in a step, in floating-point operations of products, on
        average over steps.
        """
        return self.flops(config, shape) + EIGENDECOMPOSITION[device] * self.cubes(config, shape)


OF_MATRIX = {  # by optimizer.name
    "AdamW": OfMatrix(2),
    "Muon": OfMatrix(
        1,
        moved=92,
        flops=lambda config, shape: newton_schulz_flops(shape, config.ns_steps),
        dtype=lambda config: config.ns_dtype,
    ),
    "Shampoo": OfMatrix(
        0,
        moved=190,
        on_owner=("exp_avg", "exp_avg_sq", "factor_matrices", "inv_factor_matrices"),
        kept=lambda config, shape: (
            2.0 * (math.prod(shape) + factor_numbers(shape, config.max_preconditioner_dim))
        ),
        flops=_shampoo_flops,
        cubes=lambda config, shape: (
            factor_numbers(shape, config.max_preconditioner_dim, 3) / config.precondition_frequency
        ),
    ),
}


def matrices_in(shapes: Shapes) -> list[Shape]:
    """Return the shapes of the matrices within blocks, in the order of their names."""
    return [shape for fqn, shape in shapes.items() if is_matrix(fqn)]


def owned(config: Optimizer, shapes: Shapes, ranks: int) -> list[dict[int, Shape]]:
    """Return buckets of {owner: shape of its matrix}; none for an optimizer without owners."""
    kind = OF_MATRIX[config.name]
    if kind.moments == 2:
        return []
    matrices = matrices_in(shapes)
    shared = share_out([kind.cost(config, shape) for shape in matrices], ranks)
    return [{owner: matrices[number] for owner, number in bucket.items()} for bucket in shared]


def by_owner(
    buckets: Iterable[Mapping[int, Shape]], ranks: int, figure: Callable[[Shape], float]
) -> list[float]:
    """Return the sum of a figure over the matrices of each rank."""
    sums = [0.0] * ranks
    for owner, shape in itertools.chain.from_iterable(bucket.items() for bucket in buckets):
        sums[owner] += figure(shape)
    return sums


def kept_by_owners(config: Optimizer, shapes: Shapes, ranks: int) -> list[float]:
    """Return the bytes that each rank keeps as an owner."""
    return by_owner(
        owned(config, shapes, ranks),
        ranks,
        lambda shape: 4 * OF_MATRIX[config.name].kept(config, shape),
    )


def moment_bytes(optimizer: Optimizer, own: float, matrices: float = 0.0) -> list[float]:
    """Return the bytes of each tensor of moments of `own` parameters, `matrices` of which are in
    matrices within blocks.

    Step counts are left out, and what owners have.
    """
    moments = OF_MATRIX[optimizer.name].moments
    return [4 * (own - matrices * (moments < place)) for place in (1, 2)]


def share_out(costs: Iterable[float], ranks: int) -> list[dict[int, int]]:
    """Return buckets of matrices, each as {owner: number of its matrix}, with at most one matrix
    for each of `ranks`.

    The costliest matrix goes first, always to the rank with least so far (Graham, SIAM J. Appl.
    Math. 17 (1969)). So costs within a bucket are alike. The answer depends on nothing but the
    costs: every rank has the same.
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
