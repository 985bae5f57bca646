"""Count what owners of matrices compute, and choose them by it; Muon's and Shampoo's shapes.

    is_matrix("layers.0.attention.wq.weight")       # True: Muon and Shampoo have owners of it
    costs = owner_costs(config.optimizer)           # MuonCosts, for optimizer.name = "Muon"
    costs.flops((4096, 4096))                       # operations of its owner in a step
    share_out([3.0, 1.0, 2.0], ranks=2)             # [{0: 0, 1: 2}, {1: 1}]: buckets {owner: index}

Importing this file imports no torch. What a rank keeps is counted in tools/plan/rank_bytes.py.
"""

import heapq
import itertools
import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping

from titan_lite.config import Optimizer
from titan_lite.models.fqns import is_router

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]  # of parameters, by FQN

FLOAT32_BYTES = 4
# Operations of float32 products, divided by n^3, in the time of an eigendecomposition in float64 on
# a GPU, where most of the time is waiting for memory and launches: a guess.
EIGENDECOMPOSITION = 1000.0


# Parameters


def is_matrix(fqn: str) -> bool:
    """Return True for the weights within blocks, norms and routers of experts excepted.

    The others, embedding and output too, are AdamW's.
    """
    return fqn.startswith("layers.") and "norm" not in fqn and not is_router(fqn)


def matrices_in(shapes: Shapes) -> list[Shape]:
    """Return the shapes of the matrices within blocks, in the order of their names. Those of all
    experts are one.
    """
    return [shape for fqn, shape in shapes.items() if is_matrix(fqn)]


def numbers_in(shapes: Shapes) -> int:
    """Return the number of elements of all parameters."""
    return sum(map(math.prod, shapes.values()))


# What the owner of a matrix computes


class OwnerCosts(ABC):
    """The work of the owner of a matrix within a block, by which owners are chosen."""

    has_roots = False  # computed by eigendecompositions from some step on

    def __init__(self, config: Optimizer):
        self.config = config

    @property
    def dtype(self) -> str:
        """The dtype in which matrices travel and are multiplied."""
        return "float32"

    @abstractmethod
    def product_flops(self, shape: Shape) -> float:
        """Return the operations of its products in a step."""

    def eigendecomposition_cubes(self, shape: Shape) -> float:
        """Return the sum of n^3 of its eigendecompositions, on average over steps."""
        return 0.0

    def flops(self, shape: Shape, eigendecomposition: float = EIGENDECOMPOSITION) -> float:
        """Return its time in a step, in operations of products; averaged over steps. The shape is
        that of the complete matrix.
        """
        cubes = self.eigendecomposition_cubes(shape)
        return self.product_flops(shape) + eigendecomposition * cubes


class MuonCosts(OwnerCosts):
    @property
    def dtype(self) -> str:
        return self.config.ns_dtype

    def product_flops(self, shape: Shape) -> float:
        return newton_schulz_flops(shape, self.config.ns_steps)


class ShampooCosts(OwnerCosts):
    has_roots = True

    def product_flops(self, shape: Shape) -> float:
        """Return the operations of two products for factors, and of two with their roots."""
        most = self.config.max_preconditioner_dim
        return 4.0 * math.prod(shape) * sum(min(most, size) for size in shape)

    def eigendecomposition_cubes(self, shape: Shape) -> float:
        cubes = factor_numbers(shape, self.config.max_preconditioner_dim, power=3)
        return cubes / self.config.precondition_frequency


OWNER_COSTS: dict[str, type[OwnerCosts]] = {"Muon": MuonCosts, "Shampoo": ShampooCosts}


def owner_costs(optimizer: Optimizer) -> OwnerCosts | None:
    """Return what an owner computes for a matrix; None: no rank owns any."""
    costs = OWNER_COSTS.get(optimizer.name)
    return None if costs is None else costs(optimizer)


# Owners


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


# Muon


def newton_schulz_flops(shape: Shape, steps: int = 1) -> float:
    """Return the floating-point operations of the iteration: three products a step, of which one is
    of squares.
    """
    *experts, rows, columns = shape
    short, long = sorted((rows, columns))
    return math.prod(experts) * steps * (4.0 * short * short * long + 2.0 * short**3)


# Shampoo


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
    shape, or its transpose, begin at different steps, by their positions in the model: an owner of
    several has alike work in each step, and with other owners each root is computed in the same
    steps.
    """
    period = config.precondition_frequency
    keys = {fqn: (int(fqn.split(".")[1]), *sorted(shape)) for fqn, shape in shapes.items()}
    same_key: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for fqn, key in keys.items():
        same_key[key].append(fqn)

    turns = []
    for fqn, shape in shapes.items():
        names = same_key[keys[fqn]]
        layer = keys[fqn][0]
        position = layer * len(names) + names.index(fqn)
        # An owner often has every n-th matrix. With the position alone, and an n that divides the
        # period, they would begin at few of its steps. One step later after each period, they begin
        # at all of them.
        start = position + position // period

        sides = sides_of(shape, config.max_preconditioner_dim)
        steps = min(period, len(sides))
        step_of = {}  # by index of the factor
        for bucket in share_out([side**3 for side in sides], steps):
            for step, index in bucket.items():
                step_of[index] = step
        turns.append(
            [(start + step_of[index] * period // steps) % period for index in range(len(sides))]
        )
    return turns
