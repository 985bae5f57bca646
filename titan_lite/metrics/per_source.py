"""Count tokens and loss of each source of a data mix, from the losses per sequence.

    per_source = PerSource(["web", "code"], mesh, device)
    per_source.read(batch.sources, counted)     # of a local batch: (B,), and counted labels (B,)
    loss = per_source.add(losses, tokens)       # in the same order: losses (B,) -> their sum
    per_source.values()                         # {"loss_by_source/web": 3.21, ...}
    per_source.gather()                         # before a checkpoint has its state
    state = per_source.state_dict()             # {"tokens": {"web": 81920, ...}}

A window comes from one source (data/loader.py), so the sum of its tokens' losses is sufficient.
Without names nothing is kept, and there is no collective.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pydantic import NonNegativeInt
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from titan_lite.distributed.mesh import sum_of_losses, sum_over_tokens
from titan_lite.logging import logger
from titan_lite.manifest import validated


class PerSource:
    """Counts by source. names: those of the sources, () without a data mix."""

    def __init__(self, names: Sequence[str], mesh: DeviceMesh, device: torch.device):
        self.names = names
        self.mesh = mesh
        self.device = device
        # nats and tokens of each source: own: of this rank, since the last sum; window: of all
        # ranks, since the last values
        self.own = torch.zeros(2, len(names), dtype=torch.float64, device=device)
        self.window = torch.zeros(2, len(names), dtype=torch.float64)
        self.seen = [0] * len(names)  # tokens of the run, resumed parts included
        self.of_others: dict[str, int] = {}  # of sources that the run no longer reads
        self.waiting: deque[Tensor] = deque()
        self.missing: set[str] = set()  # absent values that were reported

    def read(self, sources: Sequence[int], counted: Tensor) -> None:
        """Add a local batch. sources: (B,) source of each sequence.

        counted: (B,) counted labels of each sequence.
        """
        if self.names:
            where = torch.tensor(sources, device=self.device)
            self.own[1].index_add_(0, where, counted.double())
            self.waiting.append(where)

    def add(self, losses: Tensor, tokens: Tensor | float = 1.0) -> Tensor:
        """Add the losses (B,), in nats / tokens, of the oldest batch still waiting, and return
        their sum.
        """
        if self.names:
            where = self.waiting.popleft()
            self.own[0].index_add_(0, where, losses.double() * tokens)
        return losses.sum()

    def forget(self) -> None:
        """Forget what this rank has counted since the last sum."""
        self.own.zero_()
        self.waiting.clear()

    def gather(self) -> None:
        """Add up what all ranks have counted since the last call. A collective."""
        if not self.names:
            return
        sum_of_losses(self.own[0], self.mesh)
        sum_over_tokens(self.own[1], self.mesh)
        both = self.own.cpu()
        self.window += both
        self.seen = [
            before + int(more) for before, more in zip(self.seen, both[1].tolist(), strict=True)
        ]
        self.own.zero_()

    def values(self, prefix: str = "") -> dict[str, float]:
        """Return nats per token since the last call for each source that was read, and tokens of
        the run. A collective.

        A loss that is not finite affects only its source. With a prefix, such as "validation_",
        only the losses are returned.
        """
        if not self.names:
            return {}
        self.gather()
        window = zip(self.names, *self.window.tolist(), strict=True)
        values = {
            f"{prefix}loss_by_source/{name}": nats / tokens
            for name, nats, tokens in window
            if tokens
        }
        self.window.zero_()
        if prefix:
            for key in (f"{prefix}loss_by_source/{name}" for name in self.names):
                if key not in values and key not in self.missing:
                    self.missing.add(key)
                    logger.warning(
                        f"{key} is absent: no sequence of that source was read; use a larger"
                        " validation.steps"
                    )
        else:
            values |= {
                f"tokens_by_source/{name}": seen
                for name, seen in zip(self.names, self.seen, strict=True)
            }
        return values

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: the counts of all ranks when `gather` was called."""
        counts = {**self.of_others, **dict(zip(self.names, self.seen, strict=True))}
        return {"tokens": counts} if counts else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint's state; without a count, from zero."""
        counts = validated(dict[str, NonNegativeInt], {"tokens": {}, **state}, "tokens")
        self.seen = [counts.pop(name, 0) for name in self.names]
        self.of_others = counts
