"""Muon for the matrices within blocks, AdamW for all other parameters
(https://kellerjordan.github.io/posts/muon/).

A matrix is moved by its momentum, made orthogonal by a Newton-Schulz iteration and scaled to the
size of AdamW's steps as in Moonlight (arXiv 2502.16982, section 2.2), so that one learning rate and
one weight decay serve both. The momentum is sharded as its parameter. The iteration needs the
complete matrix, and its owner alone computes it
(matrix_optimizer.py). torch.optim.Muon with adjust_lr_fn =
"match_rms_adamw" takes the same steps.
"""

import math

import torch
from torch import Tensor

from titan_lite.config.families import Shape
from titan_lite.dtensor import local
from titan_lite.features.matrix_optimizers.matrix_optimizer import MatrixOptimizer, OwnerCosts

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


def newton_schulz_flops(shape: Shape, steps: int = 1) -> float:
    """Return the floating-point operations of the iteration: three matmuls a step, of which one is
    of squares.
    """
    *experts, rows, columns = shape
    short, long = sorted((rows, columns))
    return math.prod(experts) * steps * (4.0 * short * short * long + 2.0 * short**3)


class MuonCosts(OwnerCosts):
    @property
    def dtype(self) -> str:
        return self.keys.ns_dtype

    def matmul_flops(self, shape: Shape) -> float:
        return newton_schulz_flops(shape, self.keys.ns_steps)


class Muon(MatrixOptimizer):
    """The momentum, sharded, and the iteration, which the owner computes. Of experts, each matrix
    is moved by itself.
    """

    costs = MuonCosts

    def initial_state(self, index: int) -> dict[str, Tensor]:
        return {"momentum_buffer": torch.zeros_like(self.matrices[index].detach())}

    def local_part(self, index: int) -> Tensor:
        """Return this rank's part of the direction, and update the momentum."""
        matrix = self.matrices[index]
        momentum = self.keys.momentum
        buffer = local(self.state[matrix]["momentum_buffer"])
        gradient = self.gradient_of(index)
        mean = buffer.lerp(gradient, 1 - momentum)
        direction = gradient.lerp(mean, momentum) if self.keys.nesterov else mean
        self.store(buffer, mean)
        return direction.to(self.owners.dtype)

    def owner_update(self, index: int, complete: Tensor) -> Tensor:
        return orthogonalize(complete, self.keys.ns_steps)

    def update_scale(self, index: int) -> float:
        return 0.2 * math.sqrt(max(self.shapes[index][-2:]))
