"""Distributed Shampoo for the matrices within blocks, AdamW for all other parameters (arXiv
2309.06497).

With the gradient G of a block of at most `max_preconditioner_dim` rows and columns, in each step

    M = beta1 M + (1 - beta1) G               V = beta2 V + (1 - beta2) G * G         of the whole matrix
    L = beta2 L + (1 - beta2) G G^T           R = beta2 R + (1 - beta2) G^T G         of each block
    A = M' / (sqrt(V') + eps)                                                         AdamW's direction, M' and V' corrected
    S = (L + e l)^-1/4 M (R + e r)^-1/4                                               l and r: the largest eigenvalues
    W = W - lr (weight_decay W + S |A| / |S|)                                         norms of the whole matrix (grafting)

e is `preconditioner_eps`, a part of the largest eigenvalue (arXiv 2002.09018), so that it fits
gradients of any size. A factor of
all M does not change S |A| / |S|, so M needs no correction. L and R have it, as roots of different steps meet in one matrix.

Step `start_preconditioning_step` computes all roots; before it, A is the direction. Then each root
has its turn every `precondition_frequency` steps: a step computes the roots of a part of the
blocks, and parts cost alike (`turns_of`, state.py). Of the paper's two momenta, mu is 0.

The owner has M, V, L, R and the roots. So only the gradient travels to it.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from titan_lite.config import Optimizer
from titan_lite.dtensor import local
from titan_lite.optim.adamw import AdamW
from titan_lite.optim.matrices import Matrices
from titan_lite.optim.state import OF_MATRIX, blocks_of, factor_numbers, sides_of, turns_of

NAMES = OF_MATRIX["Shampoo"].on_owner
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


class Shampoo(Matrices):
    """Moments, factors and roots, all in float32 and on the owner alone.

    exp_avg, exp_avg_sq: as the matrix. factor_matrices, inv_factor_matrices: flat; of each block,
    row by row of blocks, L and then R, or their roots.
    """

    count = 0  # steps that were not skipped, with the present one

    def __init__(self, matrices: Mapping[str, nn.Parameter], adamw: AdamW, config: Optimizer):
        super().__init__(matrices, adamw, config)
        self.turns = turns_of(config, dict(zip(matrices, self.shapes, strict=True)))

    def zeros_of(self, number: int) -> dict[str, Tensor]:
        if number not in self.owners.own:
            return {}
        shape = self.shapes[number]
        flat = (factor_numbers(shape, self.config.max_preconditioner_dim),)
        sizes = zip(NAMES, (shape, shape, flat, flat), strict=True)
        return {
            name: self.owners.kept_here(torch.zeros(size, device=self.owners.device))
            for name, size in sizes
        }

    def step(self, skip: Tensor | None = None) -> None:  # type: ignore[override]
        """Update parameters.

        skip: as in `Matrices`, but the host reads it, and the count of steps, and so waits for the
        device.

        The count decides which roots are computed, and a device cannot leave out the others by
        itself.
        """
        if skip is None or not skip.item():
            self.count = 1 + int(self.state_of(self.matrices[0])["step"].item())
            super().step()

    def part_of(self, number: int) -> Tensor:
        return local(self.matrices[number].grad)

    def update_of(self, number: int, whole: Tensor) -> Tensor:
        """Return the direction of a step from the whole gradient, and move the state on."""
        config, age = self.config, self.count - self.config.start_preconditioning_step
        first, second, *flat = (local(self.state[self.matrices[number]][name]) for name in NAMES)
        factors, roots = (self._squares(number, each) for each in flat)
        blocks = blocks_of(self.shapes[number], config.max_preconditioner_dim)
        first.lerp_(whole, 1 - config.beta1)
        second.mul_(config.beta2).addcmul_(whole, whole, value=1 - config.beta2)
        for part, left, right in zip(blocks, factors[::2], factors[1::2], strict=True):
            block = whole[part]
            left.lerp_(block @ block.T, 1 - config.beta2)
            right.lerp_(block.T @ block, 1 - config.beta2)
        corrections = [1 - beta**self.count for beta in (config.beta1, config.beta2)]
        grafted = (
            second.sqrt()
            .div_(math.sqrt(corrections[1]))
            .add_(config.eps)
            .reciprocal_()
            .mul_(first)
            .div_(corrections[0])
        )
        if age < 0:
            return grafted
        for turn, factor, root in zip(self.turns[number], factors, roots, strict=True):
            if age == 0 or age % config.precondition_frequency == turn:
                root.copy_(inverse_fourth_root(factor / corrections[1], config.preconditioner_eps))
        direction = torch.empty_like(whole)
        for part, left, right in zip(blocks, roots[::2], roots[1::2], strict=True):
            direction[part] = left @ first[part] @ right
        return direction.mul_(_norm(grafted) / _norm(direction).clamp(min=TINY))

    def _squares(self, number: int, flat: Tensor) -> list[Tensor]:
        """Return flat factors or roots as views: L and then R of each block."""
        sides = sides_of(self.shapes[number], self.config.max_preconditioner_dim)
        return [
            part.view(side, side)
            for part, side in zip(flat.split([side**2 for side in sides]), sides, strict=True)
        ]


def _norm(matrix: Tensor) -> Tensor:
    return torch.linalg.vector_norm(
        matrix, dtype=torch.float64
    ).float()  # in float64 for a CPU, as in clipping.py
