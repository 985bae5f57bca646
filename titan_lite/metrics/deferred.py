"""Read scalars of a step without stopping a GPU: at once on a CPU, one step late on a GPU.

    deferred = DeferredMetrics(device)
    deferred.defer(step, loss=loss, grad_norm=norm, ...)        # scalar tensors on the device
    for metrics in deferred.arrived(wait=False): ...            # metrics.loss is a float

Reading a tensor at once would leave a GPU idle until the host has launched the next kernels.
"""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

LAG = {"cpu": 0}  # steps until a scalar is read; 1 for other devices


class StepMetrics(NamedTuple):
    """Scalars of one optimizer step, the same on all ranks."""

    step: int
    loss: float  # nats per token, over all ranks
    grad_norm: float  # before clipping
    skip: float  # 1 if the update was skipped, else 0
    loss_limit: float  # the highest loss that was not a spike
    tokens: float  # counted tokens, over all ranks
    stop_requests: float  # ranks that had received a signal


class InFlight(NamedTuple):
    """Scalars of one step on their way to the host."""

    step: int
    names: list[str]
    values: Tensor  # float64, in pinned memory of the host or on the device
    arrived: torch.cuda.Event | None


class DeferredMetrics:
    """Scalars of steps that have not been read. device: that of the tensors."""

    def __init__(self, device: torch.device):
        self.device = device
        self.lag = LAG.get(device.type, 1)
        self.in_flight: deque[InFlight] = deque()

    def defer(self, step: int, **scalars: Tensor) -> None:
        """Queue the fields of StepMetrics, of any dtype that float64 can represent."""
        values = torch.stack([scalar.double() for scalar in scalars.values()])
        arrived = None
        if self.device.type == "cuda":
            on_host = torch.empty(len(scalars), dtype=torch.float64, pin_memory=True)
            values = on_host.copy_(values, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        self.in_flight.append(InFlight(step, list(scalars), values, arrived))

    def arrived(self, *, wait: bool) -> Iterator[StepMetrics]:
        """Yield the scalars of steps, oldest first.

        wait: of all steps, waiting for the last; else of those that are due.
        """
        while len(self.in_flight) > (0 if wait else self.lag):
            oldest = self.in_flight.popleft()
            if oldest.arrived is not None:
                oldest.arrived.synchronize()
            scalars = dict(zip(oldest.names, oldest.values.tolist(), strict=True))
            yield StepMetrics(step=oldest.step, **scalars)
