"""Compare what two runs computed: losses, gradients, and the outputs of modules.

result = compare(run(small, model), run(reference(small), model))
result.agrees, result.parameter, result.module
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from titan_lite.tools.verify.observe import Observed

TINY = 1e-30  # a divisor is at least this


class Tolerances(NamedTuple):
    """Largest relative differences of two runs that agree."""

    loss: float  # over all steps, since rounding grows with training
    gradient: float  # norm of the difference relative to the norm, for each parameter
    activation: float  # of a module's sum of squares
    # Of two probabilities, absolute: a router may choose either of two that are nearer.
    tie: float


FLOAT32 = Tolerances(loss=1e-4, gradient=1e-4, activation=1e-4, tie=1e-6)
# Of matmuls in 8 bits, of which 2 or 3 are a mantissa. A scale depends on the tokens of a rank, so
# layouts round otherwise.
LOW_PRECISION = Tolerances(loss=1e-3, gradient=0.25, activation=0.02, tie=0.02)


@dataclass(frozen=True)
class Comparison:
    """Largest differences between two runs."""

    loss: float  # relative
    gradient: float  # relative, of `parameter`
    parameter: str
    module: str  # the first that diverges, or ""
    agrees: bool
    flips: int = 0  # tokens whose experts differ, over all routers
    gap: float = 0.0  # the largest distance of two probabilities of which one was chosen instead


def compare(found: Observed, expected: Observed, within: Tolerances = FLOAT32) -> Comparison:
    """Return the largest differences of `found`, and whether they are within the tolerances."""
    loss = max(_loss_differences(found, expected))
    gradients = {
        fqn: _relative(float((found.gradients[fqn] - gradient).norm()), float(gradient.norm()))
        for fqn, gradient in expected.gradients.items()
    }
    parameter = max(gradients, key=lambda fqn: gradients[fqn])
    module = _first_that_diverges(found, expected, within.activation)
    flips, gap = _flips(found, expected)
    agrees = loss <= within.loss and gradients[parameter] <= within.gradient and not module
    agrees = agrees and gap <= within.tie
    return Comparison(loss, gradients[parameter], parameter, module, agrees, flips, gap)


def _flips(found: Observed, expected: Observed) -> tuple[int, float]:
    """Return the number of tokens whose experts differ, and the largest gap of these."""
    flips = 0
    largest = 0.0
    for fqn, choices in expected.choices.items():
        own = found.choices[fqn].experts.sort(-1)[0]
        differ = (own != choices.experts.sort(-1)[0]).any(-1)
        if differ.any():
            flips += int(differ.sum())
            largest = max(largest, float(choices.gaps[differ].max()))
    return flips, largest


def _loss_differences(found: Observed, expected: Observed) -> Iterator[float]:
    """Yield those of losses and gradient norms on every rank, and of validation losses."""
    ranks = {rank for rank, _ in found.losses}  # not only those of the last pipeline stage
    for (_, step), values in expected.losses.items():
        for rank in ranks:
            for mine, value in zip(found.losses[rank, step], values, strict=True):
                yield _relative(abs(mine - value), abs(value))
    for step, loss in expected.validation.items():
        yield _relative(abs(found.validation[step] - loss), abs(loss))


def _relative(difference: float, size: float) -> float:
    """Return the quotient; infinity if it is not a number."""
    quotient = difference / max(size, TINY)
    return quotient if math.isfinite(quotient) else math.inf


def _first_that_diverges(found: Observed, expected: Observed, tolerance: float) -> str:
    """Return the first module, in the order of the reference's forward, that diverges, or ""."""
    if not found.activations:  # a compiled run has none
        return ""
    for fqn, sums in expected.activations.items():
        if fqn not in found.activations or _diverges(found.activations[fqn], sums, tolerance):
            return fqn
    return ""


def _diverges(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Return True if two outputs, as in Observed.activations, differ."""
    found_count, found_sum, found_squares = found.tolist()
    count, total, squares = expected.tolist()
    difference = max(
        abs(found_sum - total) / math.sqrt(count * squares + TINY),
        abs(found_squares - squares) / (squares + TINY),
    )
    return found_count != count or not difference <= tolerance  # nan is no agreement
