"""Lion (arXiv 2302.06675, algorithm 2): every element of a parameter moves by the learning rate, in
the direction of a momentum's sign.

The direction has more of the gradient (1 - beta1) than the momentum that is kept (1 - beta2).
"""

from torch import Tensor

from titan_lite.config import Optimizer
from titan_lite.optim.elementwise import Factors


def update(
    constants: Optimizer, factors: Factors, parameter: Tensor, gradient: Tensor, exp_avg: Tensor
) -> tuple[Tensor, Tensor]:
    direction = exp_avg.lerp(gradient, 1 - constants.beta1).sign()
    updated = parameter * factors.decay - direction * factors.lr
    return updated, exp_avg.lerp(gradient, 1 - constants.beta2)
