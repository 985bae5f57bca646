"""Reduce gradients in buckets during an eager backward, without waiting for the sums.

    reducer = GradientReducer(specs)            # one for a model
    rows = reducer.add(gradient, spec, dtype)   # this rank's rows of the sum: the first use waits
    reducer.finish_backward()

    backward of      layers.2             layers.1             layers.0
    reduce-scatter                        layers.2             layers.1
    all-reduce (HSDP)                                          layers.2

A bucket starts when it has all its gradients, or at the end of backward. It is waited for when a
gradient is used or when the next bucket of the same groups starts; in HSDP, its all-reduce then
starts. Accumulating gradients over microbatches waits for neither. The order comes from the program
alone, so it is the same on every rank: autograd copies a gradient that something else refers to,
such as a thread that looks at the stack, and that copy waits for nothing either. Limits: a weight
that is read twice (tied) has two gradients, whose sum waits for both; torch 2.11 gathers uneven
shards to copy them.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from titan_lite.distributed.buckets import Bucket, Specs, reduce_buckets
from titan_lite.distributed.param_collectives import ShardSpec

aten = torch.ops.aten


class BucketReduction:
    """The asynchronous sums of a bucket's gradients, over one group after another.

    Some gradients may be missing.
    """

    def __init__(self, bucket: Bucket, dtype: torch.dtype):
        self.bucket = bucket
        self.dtype = dtype  # of the results
        self.groups = bucket.specs[0].reduce_groups
        self.gradients: dict[str, Tensor] = {}  # by FQN, until the reduction starts
        self.sums: dict[str, PendingSum] = {}  # by FQN, until it ends
        self.flat: Tensor | None = None  # in flight
        self.remaining = len(self.groups)  # collectives not waited for

    def start(self) -> None:
        """Start the first collective, unless it was started."""
        if not self.gradients:
            return
        present = [
            (parameter, spec)
            for parameter, spec in zip(self.bucket.parameters, self.bucket.specs, strict=True)
            if spec.fqn in self.gradients
        ]
        if len(present) < len(self.bucket.specs):
            parameters, specs = zip(*present, strict=True)
            self.bucket = Bucket(parameters, specs)
        gradients = [self.gradients.pop(spec.fqn) for spec in self.bucket.specs]
        self.flat = self.bucket.start_reduce(gradients)

    def advance(self) -> None:
        """Wait for the collective in flight, and start the next one.

        After the last one, add the rows to their sums.
        """
        assert self.flat is not None
        number = len(self.groups) - self.remaining
        self.flat = self.bucket.as_one.next_reduce(self.flat, number)
        self.remaining -= 1
        if self.remaining:
            return
        all_rows = self.bucket.rows_of(self.flat.to(self.dtype))
        self.flat = None
        for spec, rows in zip(self.bucket.specs, all_rows, strict=True):
            self.sums.pop(spec.fqn).add(rows)

    def finish(self) -> None:
        self.start()
        while self.remaining:
            self.advance()


class PendingSum:
    """This rank's rows of one gradient, summed over ranks, and over microbatches if these
    accumulate.
    """

    def __init__(self, reduction: BucketReduction):
        self.reduction: BucketReduction | None = reduction  # not finished
        self.rows: Tensor | None = None
        # of an earlier microbatch, to which this one is added
        self.earlier: PendingSum | None = None

    def wait(self) -> Tensor:
        if self.reduction is not None:
            self.reduction.finish()
        assert self.rows is not None
        return self.rows

    def add(self, rows: Tensor) -> None:
        """Take the rows of the finished reduction."""
        self.rows = rows if self.rows is None else self.rows.add_(rows)
        self.reduction = None
        if self.earlier is not None:
            self.earlier.add(rows)

    def accumulate(self, later: "PendingSum") -> bool:
        """Add the sum of a later microbatch without waiting for it; return False if it ended."""
        if later.reduction is None or later.earlier is not None:
            return False
        self.wait()
        self.reduction = later.reduction
        later.earlier = self
        return True


class PendingRows(AsyncCollectiveTensor):
    """A PendingSum as a tensor.

    Any use waits for it, except what autograd does to accumulate it: detach or copy it, or add it
    to those of earlier microbatches.
    """

    pending: PendingSum | None  # None: of a copy, which has no value yet

    @staticmethod
    def __new__(
        cls,
        pending: PendingSum | None,
        size: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> "PendingRows":
        rows = Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=device)
        rows.pending = pending
        return rows

    @property
    def elem(self) -> Tensor:  # type: ignore[override]
        assert self.pending is not None
        return self.pending.wait()

    def trigger_wait(self) -> Tensor:
        return self.elem

    wait = trigger_wait

    def accept(self, later: PendingSum, *, adds: bool) -> bool:
        """Add a sum, or have it as the value of a copy, without waiting; return False if that
        cannot be.
        """
        if self.pending is None:
            self.pending = later
            return True
        return adds and self.pending.accumulate(later)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        rows = args[0]
        if _is_alias(func, args):
            return PendingRows(rows.pending, rows.shape, rows.dtype, rows.device)
        if func is aten.new_empty_strided.default and tuple(args[1]) == rows.shape:
            return PendingRows(None, rows.shape, rows.dtype, rows.device)
        if func in (aten.copy_.default, aten.add_.Tensor) and not kwargs:
            both_pending = isinstance(rows, PendingRows) and isinstance(args[1], PendingRows)
            if both_pending and rows.accept(args[1].pending, adds=func is aten.add_.Tensor):
                return rows
        return super().__torch_dispatch__(func, types, args, kwargs)


def _is_alias(func, args) -> bool:
    """Return True for an operator that returns its first argument: what autograd does with rows."""
    if func is aten.detach.default:
        return True
    if func is aten.view.default:
        return tuple(args[1]) == args[0].shape
    if func is aten.view_as.default:  # as dispatched within a custom operator
        return args[1].shape == args[0].shape
    return False


class GradientReducer:
    """The reductions of a backward."""

    def __init__(self, specs: Specs):
        self.bucket_of = {
            spec.fqn: bucket for bucket in reduce_buckets(specs) for spec in bucket.specs
        }
        self.collecting: dict[Bucket, BucketReduction] = {}  # that lack gradients
        # started, by their groups
        self.in_flight: dict[tuple[str, ...], list[BucketReduction]] = defaultdict(list)

    def add(self, gradient: Tensor, spec: ShardSpec, dtype: torch.dtype) -> Tensor:
        """Return this rank's rows of the sum over ranks, which their first use waits for."""
        bucket = self.bucket_of[spec.fqn]
        reduction = self.collecting.get(bucket)
        if reduction is not None:
            read_twice = spec.fqn in reduction.sums
            used_already = not reduction.gradients
            if read_twice or used_already:
                self._start(bucket)
                reduction = None
        if reduction is None:
            reduction = BucketReduction(bucket, dtype)
            self.collecting[bucket] = reduction
        pending = PendingSum(reduction)
        reduction.gradients[spec.fqn] = gradient
        reduction.sums[spec.fqn] = pending
        rows = PendingRows(pending, (spec.own_rows, *spec.row_shape), dtype, gradient.device)
        if len(reduction.sums) == sum(parameter.requires_grad for parameter in bucket.parameters):
            self._start(bucket)
        return rows

    def _start(self, bucket: Bucket) -> None:
        """Start the sum of a bucket.

        Those of the same groups that are in flight go on to their next collective, or end.
        """
        reduction = self.collecting.pop(bucket)
        earlier = [other for other in self.in_flight[reduction.groups] if other.remaining]
        for other in earlier:
            other.advance()
        reduction.start()
        self.in_flight[reduction.groups] = [
            other for other in (*earlier, reduction) if other.remaining
        ]

    def finish_backward(self) -> None:
        """Start all remaining collectives, so that reading a gradient on one rank alone starts
        none. The optimizer or the next microbatch waits for them.
        """
        for bucket in list(self.collecting):
            self._start(bucket)
        started = [reduction for group in self.in_flight.values() for reduction in group]
        while unfinished := [reduction for reduction in started if reduction.remaining > 1]:
            for reduction in unfinished:
                reduction.advance()

    def reset(self) -> None:
        """Forget all reductions. Those that have started end when their results are used."""
        self.collecting.clear()
        self.in_flight.clear()
