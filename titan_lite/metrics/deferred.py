"""Read scalars of a step without stopping a GPU: at once on a CPU, one step late on a GPU.

    readings = DeferredMetrics(device)
    readings.put(step, loss=loss, grad_norm=norm)          # tensors on the device
    for step, values in readings.take(now=logs): ...       # values["loss"] is a float; now: wait for all steps

Reading a tensor at once would leave a GPU idle until the host has launched the next kernels.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

LAG = {"cpu": 0}  # steps; 1 for other devices


class DeferredMetrics:
    """Values of steps that have not been read. device: that of the tensors."""

    def __init__(self, device: torch.device):
        self.device, self.lag = device, LAG.get(device.type, 1)
        self.waiting: deque[tuple[int, list[str], Tensor, Any]] = deque()

    def put(self, step: int, **values: Tensor) -> None:
        """Queue scalars of a step, of any dtype that float64 can represent."""
        packed = torch.stack([value.double() for value in values.values()])
        arrived = None
        if self.device.type == "cuda":
            on_host = torch.empty(len(values), dtype=torch.float64, pin_memory=True)
            packed = on_host.copy_(packed, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        self.waiting.append((step, [*values], packed, arrived))

    def take(self, *, now: bool) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield (step, values) of the steps that are due, oldest first.

        now: of all steps, waiting for the last.
        """
        while len(self.waiting) > (0 if now else self.lag):
            step, names, packed, arrived = self.waiting.popleft()
            if arrived is not None:
                arrived.synchronize()
            yield step, dict(zip(names, packed.tolist(), strict=True))
