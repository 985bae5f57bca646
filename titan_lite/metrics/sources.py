"""Tokens and loss of each source of a mixture, from the losses of sequences that a step computes anyway.

    by_source = BySource(["web", "code"], device, sum_of_losses, sum_over_tokens)
    by_source.read(loader.sources, counted)     # each local batch as it is read: sources (B,), labels that count (B,)
    loss = by_source.add(runner.forward_backward(...), tokens)      # in the same order: losses (B,) -> their sum
    by_source.figures()                         # {"loss_by_source/web": 3.21, "tokens_by_source/web": 1_048_576, ...}

A window is of one source (data/loader.py), so the sum of its tokens' losses is enough. Without names nothing is kept and no
collective is added.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from titan_lite.logging import logger


class BySource:
    """names: of the sources, none where there is one alone. sum_losses, sum_tokens: add a tensor up over ranks, in place."""

    def __init__(
        self,
        names: Sequence[str],
        device: torch.device,
        sum_losses: Callable[[Tensor], None],
        sum_tokens: Callable[[Tensor], None],
    ):
        self.names, self.device, self.sum_losses, self.sum_tokens = names, device, sum_losses, sum_tokens
        # nats and tokens of each source: of this rank, not yet added up; of all ranks, since the last figures
        self.own = torch.zeros(2, len(names), dtype=torch.float64, device=device)
        self.window = torch.zeros(2, len(names), dtype=torch.float64)
        self.seen = [0] * len(names)  # tokens of the whole run
        self.waiting: deque[Tensor] = deque()
        self.missing: set[str] = set()  # figures with a prefix that were left out, and this was said

    def read(self, sources: Sequence[int], counted: Tensor) -> None:
        """sources: (B,) of a local batch's sequences; counted: (B,) labels of each that count."""
        if self.names:
            where = torch.tensor(sources, device=self.device)
            self.own[1].index_add_(0, where, counted.double())
            self.waiting.append(where)

    def add(self, losses: Tensor, tokens: Tensor | float = 1.0) -> Tensor:
        """The sum of the losses (B,), in nats / tokens, of the batch that was read first of those still waiting.

        losses: a scalar zero before the last pipeline stage, and their sum where there are no names.
        """
        if self.names:
            where = self.waiting.popleft()
            self.own[0].index_add_(0, where, (losses.double() * tokens).expand(len(where)))
        return losses.sum()

    def _gather(self) -> None:
        self.sum_losses(self.own[0])
        self.sum_tokens(self.own[1])
        both = self.own.cpu()
        self.window += both
        self.seen = [before + int(more) for before, more in zip(self.seen, both[1].tolist(), strict=True)]
        self.own.zero_()

    def figures(self, prefix: str = "") -> dict[str, float]:
        """Nats a token since this was last called, of the sources that were read; tokens of the whole run. By all ranks together.

        A loss that is not finite is that of its source alone. With a prefix, such as "validation_", the losses alone.
        """
        if not self.names:
            return {}
        self._gather()
        window = zip(self.names, *self.window.tolist(), strict=True)
        values = {f"{prefix}loss_by_source/{name}": nats / tokens for name, nats, tokens in window if tokens}
        self.window.zero_()
        if prefix:
            for key in (f"{prefix}loss_by_source/{name}" for name in self.names):
                if key not in values and key not in self.missing:
                    self.missing.add(key)
                    logger.warning(f"{key} is left out: no sequence of that source was read; raise validation.steps")
        else:
            values |= {f"tokens_by_source/{name}": seen for name, seen in zip(self.names, self.seen, strict=True)}
        return values

    def state_dict(self) -> dict[str, Any]:
        """Called by all ranks together."""
        if not self.names:
            return {}
        self._gather()
        return {"tokens_by_source": dict(zip(self.names, self.seen, strict=True))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """A step saved before there was such a count goes on from zero."""
        counts = state.get("tokens_by_source", {})
        self.seen = [counts.get(name, 0) for name in self.names]
