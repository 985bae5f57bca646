"""AdamW's moments in host memory (training.offload = "optimizer"): they stream through the device in buckets.

    host = HostState(device, elements, torch.float32)
    moment = host.zeros_like(parameter)                                 # pinned; a DTensor if the parameter is one
    for bucket, first, second in host.stream((firsts, seconds)):        # rows of both moments on the device
        ...                                                             # change them in place; they are copied back

Two buckets are on the device at once. While one is updated, the next one is copied to the device, and the one before it back to
the host, each on a stream of its own; PCIe carries both directions at once. This is the CPU offload of FSDP (arXiv 2304.11277)
for the optimizer alone, with the update on the device, where the gradients are.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_lite.config import Optimizer, Training

BUCKET = 2**24  # most elements of a bucket, of each moment: 64 MiB in float32
SLOTS = 2  # buckets on the device at once
Lists = tuple[list[Tensor], list[Tensor]]  # of first and of second moments


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


def state_bytes(training: Training, optimizer: Optimizer, own: float, once: float = 0.0) -> tuple[list[float], float]:
    """Return the bytes of each tensor of moments on the device, and of the moments in host memory, of `own` parameters.

    once: how many of them have one moment and not two, as Muon's. Step counts are left out.
    """
    kept = getattr(torch, optimizer.state_dtype).itemsize
    if training.offload == "none":
        return [kept * own, kept * (own - once)], 0.0
    return [kept * min(BUCKET, own)] * (2 * SLOTS), 2 * kept * own


class HostState:
    """Two moments of each parameter, in the memory of the host of `device`. On a CPU nothing is pinned and nothing overlaps."""

    def __init__(self, device: torch.device, elements: int, dtype: torch.dtype):
        self.device, self.dtype = device, dtype
        self.most = min(BUCKET, elements)  # elements of all parameters
        cuda = device.type == "cuda"
        self.streams = (torch.cuda.Stream(device), torch.cuda.Stream(device)) if cuda else None  # to the device, and back
        self.slots: list[list[Tensor]] = []  # on the device, from the first step on: both moments of a bucket

    def zeros_like(self, parameter: Tensor) -> Tensor:
        """Return zeros in pinned memory with the shape and placements of a parameter."""
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        zeros = torch.zeros(local.shape, dtype=self.dtype, pin_memory=self.streams is not None)
        if not isinstance(parameter, DTensor):
            return zeros
        spec = parameter._spec
        assert spec.tensor_meta is not None
        # Not DTensor.from_local, which would move it to the mesh's device.
        spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=self.dtype))
        return DTensor(zeros, spec, requires_grad=False)

    def stream(self, moments: Lists) -> Iterator[tuple[list[Piece], Lists]]:
        """Yield (bucket, its rows of the first and of the second moments, on the device), until all have been there.

        What the caller has done with a bucket when it asks for the next one is copied back.
        """
        if not self.slots:
            for _ in range(SLOTS):
                self.slots.append([torch.empty(self.most, dtype=self.dtype, device=self.device) for _ in moments])
            if self.streams is not None:  # their memory may be in use by work that was queued before
                self.streams[0].wait_stream(torch.cuda.current_stream())
        buckets = buckets_of([tensor.shape for tensor in moments[0]], self.most)
        if self.streams is not None:
            self.streams[0].wait_stream(self.streams[1])  # a bucket of the step before may still be on its way back
        ahead = deque(self._load(number, bucket, moments) for number, bucket in enumerate(buckets[:SLOTS]))
        for number, bucket in enumerate(buckets):
            views, arrived = ahead.popleft()
            if arrived is not None:
                torch.cuda.current_stream().wait_event(arrived)
            yield bucket, views
            if self.streams is not None:
                self.streams[1].wait_stream(torch.cuda.current_stream())
            with self._on(1):
                for mine, host in zip(views, moments, strict=True):
                    for view, rows in zip(mine, parts(bucket, host), strict=True):
                        rows.copy_(view, non_blocking=True)
            if number + SLOTS < len(buckets):
                if self.streams is not None:
                    self.streams[0].wait_stream(self.streams[1])  # its slot is that of the bucket which goes back
                ahead.append(self._load(number + SLOTS, buckets[number + SLOTS], moments))

    def wait(self) -> None:
        """Wait until the host can read what the last step has written."""
        if self.streams is not None:
            self.streams[1].synchronize()

    def _load(self, number: int, bucket: list[Piece], moments: Lists) -> tuple[Lists, "torch.cuda.Event | None"]:
        """Start to copy a bucket into its slot; return its rows of both moments there, and when they have arrived."""
        with self._on(0):
            first, second = map(self._filled, self.slots[number % SLOTS], (parts(bucket, host) for host in moments))
        return (first, second), None if self.streams is None else self.streams[0].record_event()

    def _filled(self, buffer: Tensor, rows: list[Tensor]) -> list[Tensor]:
        """Return views of the buffer that have been, or will be, filled with these rows."""
        sizes = [each.numel() for each in rows]
        places = buffer[: sum(sizes)].split(sizes)
        return [place.view(each.shape).copy_(each, non_blocking=True) for place, each in zip(places, rows, strict=True)]

    def _on(self, which: int) -> AbstractContextManager:
        return nullcontext() if self.streams is None else torch.cuda.stream(self.streams[which])
