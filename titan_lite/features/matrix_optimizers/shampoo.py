"""Distributed Shampoo for the matrices within blocks, AdamW for all other parameters (arXiv
2309.06497).

With the gradient G of a block of at most `max_preconditioner_dim` rows and columns, in each step

    M = beta1 M + (1 - beta1) G               V = beta2 V + (1 - beta2) G * G     complete matrix
    L = beta2 L + (1 - beta2) G G^T           R = beta2 R + (1 - beta2) G^T G     each block
    A = M' / (sqrt(V') + eps)                 AdamW's direction, M' and V' corrected
    S = (L + e l)^-1/4 M (R + e r)^-1/4       l and r: the largest eigenvalues
    W = W - lr (weight_decay W + S |A| / |S|) norms of the complete matrix (grafting)

e is `preconditioner_eps`, a part of the largest eigenvalue (arXiv 2002.09018), so that it fits
gradients of any size. A factor of all M does not change S |A| / |S|, so M needs no correction. L
and R have it, as roots of different steps meet in one matrix.

Step `start_preconditioning_step` computes all roots; before it, A is the direction. Then each root
has its turn every `precondition_frequency` steps: a step computes the roots of a part of the
blocks, and parts cost alike (`turns_of`). Of the paper's two momenta, mu is 0.

The owner has M, V, L, R and the roots. So only the gradient travels to it.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from titan_lite.config import Config
from titan_lite.config.families import Shape
from titan_lite.dtensor import local
from titan_lite.features.matrix_optimizers.keys import MatrixOptimizerKeys
from titan_lite.features.matrix_optimizers.matrix_optimizer import MatrixOptimizer, OwnerCosts
from titan_lite.features.matrix_optimizers.owners import MatrixOwners, share_out
from titan_lite.models.shapes import FLOAT32_BYTES

TINY = 1e-30  # of an eigenvalue or a norm: that of zeros


def inverse_fourth_root(factor: Tensor, eps: float) -> Tensor:
    """Return (factor + eps l)^-1/4 of a symmetric matrix with the largest eigenvalue l, in its
    dtype.

    Computed in float64. Eigenvalues of a sum in float32 are wrong by about 1e-7 l, which the
    default of 1e-5 l outweighs.
    """
    values, vectors = torch.linalg.eigh(factor.double())
    damped = values.clamp(min=0) + eps * values[-1].clamp(min=TINY)
    return (vectors * damped.pow(-0.25) @ vectors.T).to(factor.dtype)


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


def turns_of(keys: MatrixOptimizerKeys, shapes: Mapping[str, Shape]) -> list[list[int]]:
    """Return, for each matrix, the step of a period, from 0 on, in which the root of each of
    Shampoo's factors is computed.

    A matrix's roots are spread over the period, so that sums of n^3 are alike. Matrices of one
    shape, or its transpose, begin at different steps, by their positions in the model: an owner of
    several has alike work in each step, and with other owners each root is computed in the same
    steps.
    """
    period = keys.precondition_frequency
    kinds = {fqn: (int(fqn.split(".")[1]), *sorted(shape)) for fqn, shape in shapes.items()}
    of_kind: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for fqn, kind in kinds.items():
        of_kind[kind].append(fqn)

    turns = []
    for fqn, shape in shapes.items():
        names = of_kind[kinds[fqn]]
        layer = kinds[fqn][0]
        position = layer * len(names) + names.index(fqn)
        # An owner often has every n-th matrix. With the position alone, and an n that divides the
        # period, they would begin at few of its steps. One step later after each period, they begin
        # at all of them.
        start = position + position // period

        sides = sides_of(shape, keys.max_preconditioner_dim)
        steps = min(period, len(sides))
        step_of = {}  # by index of the factor
        for bucket in share_out([side**3 for side in sides], steps):
            for step, index in bucket.items():
                step_of[index] = step
        turns.append(
            [(start + step_of[index] * period // steps) % period for index in range(len(sides))]
        )
    return turns


class ShampooCosts(OwnerCosts):
    has_roots = True

    def matmul_flops(self, shape: Shape) -> float:
        """Return the operations of two matmuls for factors, and of two with their roots."""
        most = self.keys.max_preconditioner_dim
        return 4.0 * math.prod(shape) * sum(min(most, size) for size in shape)

    def eigendecomposition_cubes(self, shape: Shape) -> float:
        cubes = factor_numbers(shape, self.keys.max_preconditioner_dim, power=3)
        return cubes / self.keys.precondition_frequency

    def kept_bytes(self, shape: Shape) -> float:
        """Return the bytes of two moments, the factors of blocks and their roots."""
        factors = factor_numbers(shape, self.keys.max_preconditioner_dim)
        return FLOAT32_BYTES * 2.0 * (math.prod(shape) + factors)


class Shampoo(MatrixOptimizer):
    """Moments, factors and roots, all in float32 and on the owner alone.

    exp_avg, exp_avg_sq: as the matrix. factor_matrices, inv_factor_matrices: flat; of each block,
    row by row of blocks, L and then R, or their roots.
    """

    costs = ShampooCosts
    owners: MatrixOwners

    def __init__(self, matrices: Mapping[str, nn.Parameter], config: Config):
        super().__init__(matrices, config)
        self.turns = turns_of(self.keys, dict(zip(matrices, self.shapes, strict=True)))
        self.count = 0  # steps that were not skipped, with the present one

    def initial_state(self, index: int) -> dict[str, Tensor]:
        if index not in self.owners.own:
            return {}
        shape = self.shapes[index]
        factors = (factor_numbers(shape, self.keys.max_preconditioner_dim),)
        return {
            "exp_avg": self._owned_zeros(shape),
            "exp_avg_sq": self._owned_zeros(shape),
            "factor_matrices": self._owned_zeros(factors),
            "inv_factor_matrices": self._owned_zeros(factors),
        }

    def _owned_zeros(self, shape: tuple[int, ...]) -> Tensor:
        return self.owners.on_this_rank(torch.zeros(shape, device=self.owners.device))

    @torch.no_grad()
    def step(self, skip: Tensor | None = None) -> None:  # type: ignore[override]
        """Update the matrices.

        The host reads `skip` and the count of steps, and so waits for the device: the count decides
        which roots are computed, and a device cannot leave out the others by itself.
        """
        if skip is not None and skip.item():
            return
        self.count = 1 + int(self.state_of(self.matrices[0])["step"].item())
        super().step()

    def local_part(self, index: int) -> Tensor:
        return self.gradient_of(index)

    def owner_update(self, index: int, complete: Tensor) -> Tensor:
        """Return the direction of a step from the complete gradient, and update the state."""
        state = self.state[self.matrices[index]]
        factors = self._as_squares(index, local(state["factor_matrices"]))
        roots = self._as_squares(index, local(state["inv_factor_matrices"]))
        self._update_statistics(index, complete, factors)

        grafted = self._adamw_direction(index)
        age = self.count - self.keys.start_preconditioning_step
        if age < 0:
            return grafted

        beta2_correction = 1 - self.config.beta2**self.count
        for turn, factor, root in zip(self.turns[index], factors, roots, strict=True):
            if age == 0 or age % self.keys.precondition_frequency == turn:
                corrected = factor / beta2_correction
                root.copy_(inverse_fourth_root(corrected, self.keys.preconditioner_eps))

        exp_avg = local(state["exp_avg"])
        direction = torch.empty_like(complete)
        for block, left, right in zip(self._blocks(index), roots[::2], roots[1::2], strict=True):
            direction[block] = left @ exp_avg[block] @ right
        return direction.mul_(_norm(grafted) / _norm(direction).clamp(min=TINY))

    def _update_statistics(self, index: int, gradient: Tensor, factors: list[Tensor]) -> None:
        """Add a gradient to the moments and to the factors L and R of each block."""
        beta1 = self.config.beta1
        beta2 = self.config.beta2
        state = self.state[self.matrices[index]]
        local(state["exp_avg"]).lerp_(gradient, 1 - beta1)
        exp_avg_sq = local(state["exp_avg_sq"])
        exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        for block, left, right in zip(
            self._blocks(index), factors[::2], factors[1::2], strict=True
        ):
            part = gradient[block]
            left.lerp_(part @ part.T, 1 - beta2)
            right.lerp_(part.T @ part, 1 - beta2)

    def _adamw_direction(self, index: int) -> Tensor:
        """Return A, the direction of AdamW."""
        state = self.state[self.matrices[index]]
        beta1_correction = 1 - self.config.beta1**self.count
        beta2_correction = 1 - self.config.beta2**self.count
        denominator = local(state["exp_avg_sq"]).sqrt().div_(math.sqrt(beta2_correction))
        inverse = denominator.add_(self.config.eps).reciprocal_()
        return inverse.mul_(local(state["exp_avg"])).div_(beta1_correction)

    def _blocks(self, index: int) -> list[tuple[slice, slice]]:
        return blocks_of(self.shapes[index], self.keys.max_preconditioner_dim)

    def _as_squares(self, index: int, flat: Tensor) -> list[Tensor]:
        """Return flat factors or roots as views: L and then R of each block."""
        sides = sides_of(self.shapes[index], self.keys.max_preconditioner_dim)
        parts = flat.split([side**2 for side in sides])
        return [part.view(side, side) for part, side in zip(parts, sides, strict=True)]


def _norm(matrix: Tensor) -> Tensor:
    # in float64 for a CPU, as in clipping.py
    return torch.linalg.vector_norm(matrix, dtype=torch.float64).float()
