"""Distributed Shampoo for the matrices within blocks, AdamW for all other parameters (arXiv 2309.06497).

With the gradient G of a block of at most `max_preconditioner_dim` rows and columns, in each step

    M = beta1 M + (1 - beta1) G               V = beta2 V + (1 - beta2) G * G         of the whole matrix
    L = beta2 L + (1 - beta2) G G^T           R = beta2 R + (1 - beta2) G^T G         of each block
    A = M' / (sqrt(V') + eps)                                                         AdamW's direction, M' and V' corrected
    S = (L + e l)^-1/4 M (R + e r)^-1/4                                               l and r: the largest eigenvalues
    W = W - lr (weight_decay W + S |A| / |S|)                                         norms of the whole matrix (grafting)

e is `preconditioner_eps`, a part of the largest eigenvalue (arXiv 2002.09018), so that it fits gradients of any size. Factors of
M, L and R do not change S |A| / |S|, so these need no correction. Roots are computed in step `start_preconditioning_step`, and
then every `precondition_frequency` steps. Before that step, A is the direction. Of the paper's two momenta, mu is 0.

The owner has M, V, L, R and the roots. So only the gradient travels to it.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from titan_lite.optimizer.matrices import Matrices
from titan_lite.optimizer.offload import local
from titan_lite.optimizer.owners import Part
from titan_lite.optimizer.state import OF_MATRIX, blocks_of, factor_numbers

NAMES = OF_MATRIX["Shampoo"].on_owner
TINY = 1e-30  # of an eigenvalue or a norm: that of zeros


def inverse_fourth_root(factor: Tensor, eps: float) -> Tensor:
    """Return (factor + eps l)^-1/4 of a symmetric matrix with the largest eigenvalue l, in its dtype.

    Computed in float64. Eigenvalues of a sum in float32 are wrong by about 1e-7 l, which the default of 1e-5 l outweighs.
    """
    values, vectors = torch.linalg.eigh(factor.double())
    damped = values.clamp(min=0) + eps * values[-1].clamp(min=TINY)
    return (vectors * damped.pow(-0.25) @ vectors.T).to(factor.dtype)


class Shampoo(Matrices):
    """Moments, factors and roots, all in float32 and on the owner alone.

    exp_avg, exp_avg_sq: as the matrix. factor_matrices, inv_factor_matrices: flat; of each block, row by row of blocks, L and
    then R, or their roots.
    """

    count = 0  # steps that were not skipped, with the present one

    def zeros_of(self, number: int) -> dict[str, Tensor]:
        if number not in self.owners.own:
            return {}
        shape = self.shapes[number]
        flat = (factor_numbers(shape, self.config.max_preconditioner_dim),)
        sizes = zip(NAMES, (shape, shape, flat, flat), strict=True)
        return {name: self.owners.kept_here(torch.zeros(size, device=self.owners.device)) for name, size in sizes}

    def step(self, skip: Tensor | None = None) -> None:  # type: ignore[override]
        """Update parameters. skip: as in `Matrices`, but the host reads it, and the count of steps, and so waits for the device.

        The count decides whether roots are computed, which a device cannot leave out by itself.
        """
        if skip is None or not skip.item():
            self.count = 1 + int(self.state_of(self.matrices[0])["step"].item())
            super().step()

    def part_of(self, number: int) -> Tensor:
        return local(self.matrices[number].grad).float()

    def update_of(self, number: int, whole: Tensor) -> Tensor:
        """Return the direction of a step from the whole gradient, and move the state on."""
        config, age = self.config, self.count - self.config.start_preconditioning_step
        first, second, factors, roots = (local(self.state[self.matrices[number]][name]) for name in NAMES)
        first.lerp_(whole, 1 - config.beta1)
        second.mul_(config.beta2).addcmul_(whole, whole, value=1 - config.beta2)
        for part, *of_block in self._blocks(number, factors):
            block = whole[part]
            for factor, product in zip(of_block, (block @ block.T, block.T @ block), strict=True):
                factor.lerp_(product, 1 - config.beta2)
        corrections = 1 - config.beta1**self.count, math.sqrt(1 - config.beta2**self.count)
        grafted = second.sqrt().div_(corrections[1]).add_(config.eps).reciprocal_().mul_(first).div_(corrections[0])
        if age < 0:
            return grafted
        if age % config.precondition_frequency == 0:
            for (_, *of_block), (_, *its_roots) in zip(self._blocks(number, factors), self._blocks(number, roots), strict=True):
                for factor, root in zip(of_block, its_roots, strict=True):
                    root.copy_(inverse_fourth_root(factor, config.preconditioner_eps))
        direction = torch.empty_like(whole)
        for part, left, right in self._blocks(number, roots):
            direction[part] = left @ first[part] @ right
        return direction.mul_(_norm(grafted) / _norm(direction).clamp(min=TINY))

    def _blocks(self, number: int, flat: Tensor) -> Iterator[tuple[Part, Tensor, Tensor]]:
        """Yield (block, its L, its R) of flat factors or roots, as views."""
        for part in blocks_of(self.shapes[number], self.config.max_preconditioner_dim):
            rows, columns = (each.stop - each.start for each in part)
            left, right, flat = flat.split([rows**2, columns**2, flat.numel() - rows**2 - columns**2])
            yield part, left.view(rows, rows), right.view(columns, columns)


def _norm(matrix: Tensor) -> Tensor:
    return torch.linalg.vector_norm(matrix, dtype=torch.float64).float()  # in float64 for a CPU, as in clipping.py
