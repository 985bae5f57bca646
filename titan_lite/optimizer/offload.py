"""AdamW's moments in host memory (training.offload = "optimizer"), or parameters and gradients as well ("all").

    host = HostState(device, elements, torch.float32)
    moment = host.zeros_like(parameter)                                 # pinned; a DTensor if the parameter is one
    for bucket, lists in host.stream((parameters, gradients, firsts, seconds)):     # its rows of each, on the device
        ...                                                             # change them in place; they are copied back
    host.put(parameter, rows)                                           # "all": add a reduced gradient to parameter.grad

They stream through the device in buckets, of which two are there at once. While one is updated, the next one is copied to the
device, and the one before it back to the host, each on a stream of its own; PCIe carries both directions at once. This is the CPU
offload of FSDP (arXiv 2304.11277) with the update on the device, which also adds up the gradients of microbatches and computes
their norms, when they leave it. So the host computes nothing, and reads only after `wait`.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_lite.config import Optimizer, Training
from titan_lite.host_memory import zeros_on_host
from titan_lite.optimizer.state import OF_MATRIX

BUCKET = 2**24  # most elements of a bucket, of each list: 64 MiB in float32
SLOTS = 2  # buckets on the device at once
Lists = Sequence[list[Tensor]]  # parameters, gradients, first and second moments


class Piece(NamedTuple):
    """Rows of a tensor: its number in a list, the first row and the one after the last."""

    number: int
    start: int
    stop: int


def parts(bucket: list[Piece], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the rows of a bucket, as views."""
    return [tensors[number][start:stop] for number, start, stop in bucket]


def buckets_of(shapes: Sequence[torch.Size], elements: int) -> list[list[Piece]]:
    """Split the rows of tensors into buckets of at most so many elements, in order."""
    buckets: list[list[Piece]] = []
    left = 0
    for number, shape in enumerate(shapes):
        width, start = math.prod(shape[1:]), 0
        while start < shape[0] and width:
            if left < width:
                buckets.append([])
                left = elements
            rows = min(shape[0] - start, left // width)
            buckets[-1].append(Piece(number, start, start + rows))
            start, left = start + rows, left - rows * width
    return buckets


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def state_bytes(
    training: Training, optimizer: Optimizer, own: float, matrices: float = 0.0
) -> tuple[list[float], float]:
    """Return the bytes of each tensor of moments on the device, and of all that is in host memory, of `own` parameters.

    matrices: how many of them are in matrices within blocks. The first are those of buckets, if anything is in host memory. Step
    counts are left out, and what owners have.
    """
    kept, moments = (
        [getattr(torch, optimizer.state_dtype).itemsize] * 2,
        OF_MATRIX[optimizer.name].moments,
    )
    if training.offload == "none":
        return [
            size * (own - matrices * (moments < place)) for place, size in enumerate(kept, 1)
        ], 0.0
    away = (
        [getattr(torch, training.dtype).itemsize] * 2 + kept if training.offload == "all" else kept
    )
    return [size * min(BUCKET, own) for size in away] * SLOTS, sum(away) * own


class HostState:
    """Two moments of each parameter, in the memory of the host of `device`. On a CPU nothing is pinned and nothing overlaps.

    everything: parameters and gradients are there, too.
    """

    def __init__(
        self, device: torch.device, elements: int, dtype: torch.dtype, everything: bool = False
    ):
        self.device, self.dtype, self.everything = device, dtype, everything
        self.most = min(BUCKET, elements)  # elements of all parameters
        self.gradients: dict[nn.Parameter, Tensor] = {}  # in host memory, from the first one on
        self.norms: dict[
            nn.Parameter, Tensor
        ] = {}  # of gradients as they are now: scalars on the device
        self.factor: Tensor | None = (
            None  # on the device, of gradients, by which the next update multiplies them
        )
        cuda = device.type == "cuda"
        self.streams = (
            (torch.cuda.Stream(device), torch.cuda.Stream(device)) if cuda else None
        )  # to the device, and back
        self.slots: list[
            list[Tensor]
        ] = []  # on the device, from the first step on: a bucket of each list in host memory

    def zeros_like(self, parameter: Tensor) -> Tensor:
        """Return zeros in pinned memory with the shape and placements of a parameter."""
        return zeros_on_host(parameter, self.dtype, pinned=self.streams is not None)

    @torch.no_grad()
    def put(self, parameter: nn.Parameter, rows: Tensor) -> None:
        """Add a microbatch's gradient, this rank's rows of it on the device, to `parameter.grad` in host memory."""
        if parameter not in self.gradients:
            self.gradients[parameter] = zeros_on_host(
                parameter, parameter.dtype, pinned=self.streams is not None
            )
        kept = local(self.gradients[parameter])
        if parameter.grad is not None:
            rows = kept.to(self.device, non_blocking=True, copy=True).add_(rows)
        kept.copy_(rows, non_blocking=True)
        parameter.grad = self.gradients[parameter]
        (self.norms[parameter],) = torch._foreach_norm(
            [rows], dtype=torch.float64
        )  # as in clipping.py

    def stream(self, lists: Lists) -> Iterator[tuple[list[Piece], Lists]]:
        """Yield (bucket, its rows of parameters, gradients, first and second moments, on the device), until all have been there.

        What the caller has done with a bucket when it asks for the next one is copied back.
        """
        away = lists[0 if self.everything else 2 :]
        if self.streams is not None and (self.everything or not self.slots):
            # Gradients may be on their way to the host, and the memory of new slots in use, by work that was queued before.
            self.streams[0].wait_stream(torch.cuda.current_stream())
        if not self.slots:
            dtypes = [tensors[0].dtype for tensors in away]
            for _ in range(SLOTS):
                self.slots.append(
                    [torch.empty(self.most, dtype=dtype, device=self.device) for dtype in dtypes]
                )
        buckets = buckets_of([tensor.shape for tensor in lists[0]], self.most)
        if self.streams is not None:
            self.streams[0].wait_stream(
                self.streams[1]
            )  # a bucket of the step before may still be on its way back
        ahead = deque(
            self._load(number, bucket, away) for number, bucket in enumerate(buckets[:SLOTS])
        )
        for number, bucket in enumerate(buckets):
            views, arrived = ahead.popleft()
            if arrived is not None:
                torch.cuda.current_stream().wait_event(arrived)
            here = [
                *(parts(bucket, tensors) for tensors in lists[: len(lists) - len(away)]),
                *views,
            ]
            if self.factor is not None:
                torch._foreach_mul_(here[1], self.factor)
            yield bucket, here
            if self.streams is not None:
                self.streams[1].wait_stream(torch.cuda.current_stream())
            with self._on(1):
                for place, (mine, host) in enumerate(zip(views, away, strict=True)):
                    for view, rows in zip(mine, parts(bucket, host), strict=True):
                        if not self.everything or place != 1:  # gradients are done with
                            rows.copy_(view, non_blocking=True)
            if number + SLOTS < len(buckets):
                if self.streams is not None:
                    self.streams[0].wait_stream(
                        self.streams[1]
                    )  # its slot is that of the bucket which goes back
                ahead.append(self._load(number + SLOTS, buckets[number + SLOTS], away))
        if self.streams is not None and self.everything:
            torch.cuda.current_stream().wait_stream(
                self.streams[1]
            )  # the next step reads the parameters

    def wait(self) -> None:
        """Wait until the host can read what the last step has written."""
        if self.streams is not None:
            self.streams[1].synchronize()

    def _load(
        self, number: int, bucket: list[Piece], away: Lists
    ) -> tuple[Lists, "torch.cuda.Event | None"]:
        """Start to copy a bucket into its slot; return its rows of each list there, and when they have arrived."""
        with self._on(0):
            views = [
                *map(
                    self._filled, self.slots[number % SLOTS], (parts(bucket, host) for host in away)
                )
            ]
        return views, None if self.streams is None else self.streams[0].record_event()

    def _filled(self, buffer: Tensor, rows: list[Tensor]) -> list[Tensor]:
        """Return views of the buffer that have been, or will be, filled with these rows."""
        sizes = [each.numel() for each in rows]
        places = buffer[: sum(sizes)].split(sizes)
        return [
            place.view(each.shape).copy_(each, non_blocking=True)
            for place, each in zip(places, rows, strict=True)
        ]

    def _on(self, which: int) -> AbstractContextManager:
        return nullcontext() if self.streams is None else torch.cuda.stream(self.streams[which])
