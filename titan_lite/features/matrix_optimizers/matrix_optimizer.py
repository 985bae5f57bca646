"""An optimizer of the matrices within blocks. AdamW has all other parameters (optim/build.py).

    optimizer = Muon(matrices, config)  # or Shampoo: a file each, with what its owner does
    optimizer.step(skip)                # skip: a scalar; if it is 1, nothing changes
    Muon.costs(MatrixOptimizerKeys.of(config)).flops((4096, 4096))  # of its owner in a step

Each matrix has one owner (owners.py). A part of it goes there from every rank, and a part of its
update returns. Of experts, a rank is the owner of those that it has.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from titan_lite.config import Config, ConfigError
from titan_lite.config.errors import shown
from titan_lite.config.families import Shape
from titan_lite.dtensor import local
from titan_lite.features.matrix_optimizers.keys import MatrixOptimizerKeys
from titan_lite.features.matrix_optimizers.owners import MatrixOwners, WholeMatrices
from titan_lite.models.fqns import is_of_experts

# Operations of float32 matmuls, divided by n^3, in the time of an eigendecomposition in float64 on
# a GPU, where most of the time is waiting for memory and launches: a guess.
EIGENDECOMPOSITION = 1000.0


class OwnerCosts(ABC):
    """The work of the owner of a matrix within a block, by which owners are chosen."""

    has_roots = False  # computed by eigendecompositions from some step on

    def __init__(self, keys: MatrixOptimizerKeys):
        self.keys = keys

    @property
    def dtype(self) -> str:
        """The dtype in which matrices travel and are multiplied."""
        return "float32"

    @abstractmethod
    def matmul_flops(self, shape: Shape) -> float:
        """Return the operations of its matmuls in a step."""

    def eigendecomposition_cubes(self, shape: Shape) -> float:
        """Return the sum of n^3 of its eigendecompositions, on average over steps."""
        return 0.0

    def flops(self, shape: Shape, eigendecomposition: float = EIGENDECOMPOSITION) -> float:
        """Return its time in a step, in operations of matmuls; averaged over steps. The shape is
        that of the complete matrix.
        """
        cubes = self.eigendecomposition_cubes(shape)
        return self.matmul_flops(shape) + eigendecomposition * cubes

    def kept_bytes(self, shape: Shape) -> float:
        """Return the bytes that it keeps of the matrix, beside this rank's shard."""
        return 0.0


class MatrixOptimizer(torch.optim.Optimizer, ABC):
    """The part of a step that is the same for all optimizers of matrices.

    matrices: by FQN, all or none of them of experts. A subclass has `costs` and the abstract
    methods. It refers to a matrix by its index in `matrices`.
    """

    costs: ClassVar[type[OwnerCosts]]

    def __init__(self, matrices: Mapping[str, nn.Parameter], config: Config):
        self.config = config.optimizer
        self.keys = MatrixOptimizerKeys.of(config)
        settings = {"lr": self.config.lr, "weight_decay": self.config.weight_decay}
        super().__init__([*matrices.values()], settings)
        self.matrices: list[nn.Parameter] = self.param_groups[0]["params"]
        self.fqns = list(matrices)
        self.indices = {matrix: index for index, matrix in enumerate(self.matrices)}
        self.shapes = [tuple(matrix.shape) for matrix in self.matrices]
        costs = self.costs(self.keys)
        dtype = getattr(torch, costs.dtype)
        self.owners: MatrixOwners | WholeMatrices
        if is_of_experts(self.shapes[0]):
            self.owners = WholeMatrices(len(self.matrices), dtype)
        else:
            self.owners = MatrixOwners(self.matrices, map(costs.flops, self.shapes), dtype)
        self.skipped = torch.zeros((), dtype=torch.bool)  # True in a step that is skipped

    @abstractmethod
    def initial_state(self, index: int) -> dict[str, Tensor]:
        """Return the state of a matrix before its first step, beside its count of steps."""

    @abstractmethod
    def local_part(self, index: int) -> Tensor:
        """Return this rank's part of what the owner of a matrix needs."""

    @abstractmethod
    def owner_update(self, index: int, complete: Tensor) -> Tensor:
        """Return the update of a matrix. Called by its owner alone.

        complete: what `local_part` returns the parts of.
        """

    def update_scale(self, index: int) -> float:
        """Return the factor of an update, beside the learning rate."""
        return 1.0

    def state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the live state of a matrix: of zeros before its first step."""
        if parameter not in self.state:
            step = torch.zeros((), dtype=torch.float32, device=parameter.device)
            initial = self.initial_state(self.indices[parameter])
            self.state[parameter] = {"step": step, **initial}
        return self.state[parameter]

    def gradient_of(self, index: int) -> Tensor:
        """Return this rank's part of the gradient of a matrix. Raises ConfigError without one."""
        matrix = self.matrices[index]
        if matrix.grad is None:
            raise ConfigError(
                f"optimizer.name = {shown(self.config.name)}: {self.fqns[index]} has no gradient,"
                " since no forward uses it; leave it out of the model, or use AdamW, which leaves"
                " it as it is"
            )
        return local(matrix.grad)

    @torch.no_grad()
    def step(self, skip: Tensor | None = None) -> None:  # type: ignore[override]
        """Update the matrices.

        skip: a float32 scalar on their device, not read on the host; if it is 1, nothing changes.
        """
        group = self.param_groups[0]
        steps = [self.state_of(matrix)["step"] for matrix in self.matrices]
        skip = torch.zeros_like(steps[0]) if skip is None else skip
        torch._foreach_add_(steps, 1 - skip)
        self.skipped = skip.bool()
        for index, update in self.owners.updates(self.local_part, self.owner_update):
            shard = local(self.matrices[index].detach())
            decayed = shard.mul(1 - group["lr"] * group["weight_decay"])
            updated = decayed.add_(update, alpha=-group["lr"] * self.update_scale(index))
            self.store(shard, updated)

    def store(self, tensor: Tensor, updated: Tensor) -> None:
        """Write `updated` to this rank's part of a tensor, unless the step is skipped."""
        tensor.copy_(torch.where(self.skipped, tensor, updated))


def optimizer_class(name: str) -> type[MatrixOptimizer]:
    """Return the class of optimizer.name."""
    from titan_lite.features.matrix_optimizers.muon import Muon
    from titan_lite.features.matrix_optimizers.shampoo import Shampoo

    classes: dict[str, type[MatrixOptimizer]] = {"Muon": Muon, "Shampoo": Shampoo}
    return classes[name]
