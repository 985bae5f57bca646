"""An optimizer of the matrices within blocks. AdamW has all other parameters (build.py).

    optimizer = Muon(matrices, config)  # or Shampoo: a file each, with what its owner does
    optimizer.step(skip)                # skip: a scalar; if it is 1, nothing changes

Each matrix has one owner (matrix_owners.py). A part of it goes there from every rank, and a part of
its update returns.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from titan_lite.config import ConfigError, Optimizer
from titan_lite.config.errors import shown
from titan_lite.dtensor import local
from titan_lite.optim.matrix_owners import MatrixOwners, WholeMatrices
from titan_lite.optim.state import OwnerCosts, owner_costs


class MatrixOptimizer(torch.optim.Optimizer, ABC):
    """The part of a step that is the same for all optimizers of matrices.

    matrices: by FQN. A subclass has the abstract methods. It refers to a matrix by its index in
    `matrices`.
    """

    def __init__(self, matrices: Mapping[str, nn.Parameter], config: Optimizer):
        settings = {"lr": config.lr, "weight_decay": config.weight_decay}
        super().__init__([*matrices.values()], settings)
        self.config = config
        self.matrices: list[nn.Parameter] = self.param_groups[0]["params"]
        self.fqns = list(matrices)
        self.indices = {matrix: index for index, matrix in enumerate(self.matrices)}
        self.shapes = [tuple(matrix.shape) for matrix in self.matrices]
        costs = owner_costs(config)
        assert costs is not None
        self.owners: MatrixOwners | WholeMatrices = self.owners_of(costs)
        self.skipped = torch.zeros((), dtype=torch.bool)  # True in a step that is skipped

    def owners_of(self, costs: OwnerCosts) -> MatrixOwners | WholeMatrices:
        """Return who computes updates."""
        flops = [costs.flops(shape) for shape in self.shapes]
        return MatrixOwners(self.matrices, flops, getattr(torch, costs.dtype))

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
