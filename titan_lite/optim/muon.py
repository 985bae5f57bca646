"""Muon for the matrices within blocks, AdamW for all other parameters
(https://kellerjordan.github.io/posts/muon/).

A matrix is moved by its momentum, made orthogonal by a Newton-Schulz iteration and scaled to the
size of AdamW's steps as in Moonlight (arXiv 2502.16982, section 2.2), so that one learning rate and
one weight decay serve both. The momentum is sharded as its parameter. The iteration needs the
complete matrix, and its owner alone computes it (matrices.py). torch.optim.Muon with adjust_lr_fn =
"match_rms_adamw" takes the same steps.
"""

import math

import torch
from torch import Tensor

from titan_lite.dtensor import local
from titan_lite.optim.matrices import MatrixOptimizer
from titan_lite.optim.matrix_owners import WholeMatrices
from titan_lite.optim.state import OwnerCosts

# of the quintic polynomial: steepest at zero, so small singular values grow fastest
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7  # of the norm of a matrix: that of zeros


def orthogonalize(matrix: Tensor, steps: int) -> Tensor:
    """Return nearly U V^T of matrix = U S V^T: after five steps, most singular values are between
    0.7 and 1.2.

    matrix: (rows, columns), or (E, rows, columns): each of E matrices by itself.
    """
    a, b, c = COEFFICIENTS
    addmm = torch.addmm if matrix.ndim == 2 else torch.baddbmm
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if tall else matrix
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(steps):
        gram = x @ x.mT
        x = addmm(x, addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(MatrixOptimizer):
    """The momentum, sharded, and the iteration, which the owner computes."""

    def initial_state(self, index: int) -> dict[str, Tensor]:
        return {"momentum_buffer": torch.zeros_like(self.matrices[index].detach())}

    def local_part(self, index: int) -> Tensor:
        """Return this rank's part of the direction, and update the momentum."""
        matrix = self.matrices[index]
        momentum = self.config.momentum
        buffer = local(self.state[matrix]["momentum_buffer"])
        gradient = self.gradient_of(index)
        mean = buffer.lerp(gradient, 1 - momentum)
        direction = gradient.lerp(mean, momentum) if self.config.nesterov else mean
        self.store(buffer, mean)
        return direction.to(self.owners.dtype)

    def owner_update(self, index: int, complete: Tensor) -> Tensor:
        return orthogonalize(complete, self.config.ns_steps)

    def update_scale(self, index: int) -> float:
        return 0.2 * math.sqrt(max(self.shapes[index][-2:]))


class MuonOfExperts(Muon):
    """Muon for matrices of experts, (E, rows, columns), each moved by itself.

    Experts are sharded whole, so a rank computes the updates of those that it has.
    """

    def owners_of(self, costs: OwnerCosts) -> WholeMatrices:
        return WholeMatrices(len(self.matrices), getattr(torch, costs.dtype))
