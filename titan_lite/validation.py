"""Compute the loss on held-out documents, always the same ones, in total and for each source.

validation = Validation(loader, batches=20, by_source, device, mesh)
figures = validation.figures(runner.evaluate, to_device, begin_batch, stopping.ask)       # None where the run is to stop
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from titan_lite.distributed.mesh import sum_of_losses, sum_over_tokens
from titan_lite.metrics.per_source import PerSource
from titan_lite.models.loss import counted


class Validation:
    """Validation on held-out documents of `loader`, in `batches` global batches of `accumulation`
    local ones.
    """

    def __init__(
        self,
        loader: Any,
        batches: int,
        accumulation: int,
        by_source: PerSource,
        device: torch.device,
        mesh: DeviceMesh,
    ):
        self.loader, self.batches, self.accumulation = loader, batches, accumulation
        self.by_source, self.device, self.mesh = by_source, device, mesh

    @torch.no_grad()
    def figures(
        self,
        evaluate: Callable[..., Tensor],
        to_device: Callable[[Any], tuple[Tensor, Tensor, dict[str, Tensor]]],
        begin_batch: Callable[[], None],
        stops: Callable[[], bool],
    ) -> dict[str, float] | None:
        """Return the validation loss over all ranks in nats per token, or None to stop.

        Every call begins with the same batch.

        evaluate: a batch -> its summed loss, a scalar or (B,); stops: called on all ranks after
        each global batch.
        """
        beginning = self.loader.state_dict()
        sums = torch.zeros(2, device=self.device, dtype=torch.float64)
        for _ in range(self.batches):
            for _ in range(self.accumulation):
                begin_batch()
                batch = next(self.loader)
                moved = to_device(batch)
                labels = counted(moved[1])
                self.by_source.read(batch.sources, labels)
                sums[0] += self.by_source.add(evaluate(moved))
                sums[1] += labels.sum()
            if stops():
                return None
        sum_of_losses(sums[0], self.mesh)
        sum_over_tokens(sums[1], self.mesh)
        self.loader.load_state_dict(beginning)
        return {
            "validation_loss": float(sums[0] / sums[1]),
            **self.by_source.figures("validation_"),
        }
