"""The keys of Muon and Shampoo, and their rows among optimizers. Imports no torch."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from titan_lite.config.effects import OnlyWith, RestartsOptimizer
from titan_lite.config.optimizers import ADAMW_KEYS, Algorithm
from titan_lite.config.section import Section


class MatrixOptimizerKeys(Section):
    table: ClassVar[str] = "optimizer"

    momentum: float = Field(0.95, ge=0, lt=1)
    """Muon: decay of the momentum."""

    nesterov: bool = True
    """Muon: Nesterov momentum."""

    ns_steps: int = Field(5, ge=1, le=99)
    """Muon: steps of the Newton-Schulz iteration."""

    ns_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Muon: dtype of that iteration, and of matrices on the way to their owners and back."""

    max_preconditioner_dim: Annotated[
        RestartsOptimizer[int], OnlyWith("optimizer.name", "Shampoo")
    ] = Field(1024, ge=1)
    """Shampoo: larger matrices are cut into blocks of at most so many rows and columns."""

    precondition_frequency: int = Field(10, ge=1)
    """Shampoo: steps between computations of the roots."""

    start_preconditioning_step: Annotated[
        RestartsOptimizer[int], OnlyWith("optimizer.name", "Shampoo")
    ] = Field(10, ge=1)
    """Shampoo: first step with roots; earlier ones are AdamW's."""

    preconditioner_eps: float = Field(1e-5, gt=0)
    """Shampoo: added to the statistics' eigenvalues, relative to the largest."""


KEYS = (MatrixOptimizerKeys,)
TENSORS: dict[str, str] = {}
OPTIMIZERS = {
    "Muon": Algorithm(
        about="momentum made orthogonal, for matrices of blocks but routers",
        keys=(*ADAMW_KEYS, "momentum", "nesterov", "ns_steps", "ns_dtype"),
        moments=("momentum_buffer",),
        update_bytes=92.0,
        is_elementwise=False,
    ),
    "Shampoo": Algorithm(
        about="roots of gradient statistics, for matrices of dense models",
        keys=(
            *ADAMW_KEYS,
            "max_preconditioner_dim",
            "precondition_frequency",
            "start_preconditioning_step",
            "preconditioner_eps",
        ),
        moments=(),  # an owner has all state
        update_bytes=190.0,
        is_elementwise=False,
    ),
}
