"""Optimizers that see whole matrices: theirs are those within blocks, and AdamW has all other
parameters.

    optimizer = Muon(matrices, adamw, config)           # or Shampoo: a file each, which says what travels and what its owner does
    optimizer.step(skip)                                # skip: a scalar on the device; if it is 1, nothing changes

Each matrix has one owner (owners.py). A part of it goes there from every rank, and a part of its
update returns.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from titan_lite.config import Optimizer
from titan_lite.dtensor import local
from titan_lite.optim.adamw import AdamW
from titan_lite.optim.matrix_owners import MatrixOwners
from titan_lite.optim.state import OF_MATRIX


class Matrices(torch.optim.Optimizer):
    """An optimizer of matrices and AdamW, with one learning rate; the groups of both are in
    `param_groups`.

    matrices: by FQN. adamw: of the other parameters. A subclass has the methods that raise here.
    """

    def __init__(self, matrices: Mapping[str, nn.Parameter], adamw: AdamW, config: Optimizer):
        super().__init__([*matrices.values()], dict(lr=config.lr, weight_decay=config.weight_decay))
        self.matrices = self.param_groups[0]["params"]
        self.param_groups += adamw.param_groups
        self.config = config
        self.adamw = adamw
        self.numbers = {matrix: number for number, matrix in enumerate(self.matrices)}
        kind = OF_MATRIX[config.name]
        self.shapes = [tuple(matrix.shape) for matrix in self.matrices]
        costs = [kind.cost(config, shape) for shape in self.shapes]
        self.owners = MatrixOwners(self.matrices, costs, getattr(torch, kind.dtype(config)))
        self.stays = torch.zeros(())  # True in a step that is skipped

    def zeros_of(self, number: int) -> dict[str, Tensor]:
        """Return the state of a matrix before its first step, beside its count of steps."""
        raise NotImplementedError

    def part_of(self, number: int) -> Tensor:
        """Return this rank's part of what the owner of a matrix needs."""
        raise NotImplementedError

    def update_of(self, number: int, whole: Tensor) -> Tensor:
        """Return the update of a matrix from the whole of what `part_of` has the parts of.

        Called by its owner alone.
        """
        raise NotImplementedError

    def scale_of(self, number: int) -> float:
        """Return the factor of an update, beside the learning rate."""
        return 1.0

    def state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the live state of a parameter: of zeros before its first step."""
        if parameter not in self.numbers:
            return self.adamw.state_of(parameter)
        if parameter not in self.state:
            step = torch.zeros((), dtype=torch.float32, device=parameter.device)
            self.state[parameter] = dict(step=step, **self.zeros_of(self.numbers[parameter]))
        return self.state[parameter]

    @torch.no_grad()
    def step(self, skip: Tensor | None = None) -> None:  # type: ignore[override]
        """Update parameters.

        skip: a float32 scalar on their device, not read on the host; if it is 1, nothing changes.
        """
        self.adamw.step(skip)
        group = self.param_groups[0]
        steps = [self.state_of(matrix)["step"] for matrix in self.matrices]
        skipped = torch.zeros_like(steps[0]) if skip is None else skip
        torch._foreach_add_(steps, 1 - skipped)
        self.stays = skipped.bool()
        for number, update in self.owners.updates(self.part_of, self.update_of):
            own = local(self.matrices[number].detach())
            decayed = own.mul(1 - group["lr"] * group["weight_decay"])
            after = decayed.add_(update, alpha=-group["lr"] * self.scale_of(number))
            self.store(own, after)

    def store(self, tensor: Tensor, after: Tensor) -> None:
        """Write `after` to this rank's part of a tensor, unless the step is skipped."""
        tensor.copy_(torch.where(self.stays, tensor, after))
