"""Accumulate gradients with one round of communication per optimizer step, in one bucket per
transformer block.

    with gathered_for_step(model, len(microbatches)):       # each weight is gathered once
        for input, label in microbatches:
            loss(model(input), label).backward()            # gradients accumulate, unreduced
    parameter.grad                                          # reduced

Llama 3 was trained this way (arXiv 2407.21783, section 3.3.2): weights stay gathered after forward.
"""

import functools
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from titan_lite.cost.collectives import collectives
from titan_lite.distributed.arriving import Arrival, register, takes
from titan_lite.distributed.buckets import Bucket, gather_buckets, reduce_buckets
from titan_lite.distributed.param_collectives import InFlight, ShardSpec
from titan_lite.distributed.simple_fsdp import as_shard_of, model_of
from titan_lite.dtensor import local
from titan_lite.models.float8 import stand_in

# buckets allocated at once, beside weights and gradients: one is communicated while another is
# copied
IN_FLIGHT = 2
Started = TypeVar("Started")


@contextmanager
def gathered_for_step(root: nn.Module, microbatches: int = 0) -> Iterator[None]:
    """Keep weights gathered and accumulate unreduced gradients in reduce_dtype; on exit, reduce
    them into `parameter.grad`.

    microbatches: of the step, if known. Weights are then gathered during the first forward, and
    gradients reduced during the last backward. Otherwise all are gathered here and reduced on exit.

    k microbatches cost the communication of one, and the memory of the rank's unsharded weights and
    gradients. With more than two ranks, a library may sum in an order that depends on the offset in
    a bucket.
    """
    model = model_of(root)
    if microbatches:
        model.step = Step(model, microbatches)
        if root._compiled_call_impl is not None:
            model.step.hold_all(root)
    else:
        _gather(model)
        _sum_in_reduce_dtype(root)
    try:
        yield
        for fqn in model.handles:
            collectives.wait_tensor(model.gathered[fqn])  # no graph may have read it
    finally:
        for fqn in model.handles:
            del takes[fqn]
        if model.step is not None:
            model.step.end()
        sums, model.sums, model.step = model.sums, {}, None
        leaves, model.gathered, model.stand_ins, model.handles = (
            model.gathered | model.stand_ins,
            {},
            {},
            {},
        )
    read = {parameter: plan for parameter, plan in model.plans.items() if plan.fqn in leaves}
    found = (
        (parameter, sums.pop(plan.fqn, leaves.pop(plan.fqn).grad))
        for parameter, plan in read.items()
    )
    _reduce({parameter: gradient for parameter, gradient in found if gradient is not None}, model)


class Step:
    """A step whose communication overlaps with its first forward and its last backward, in the
    buckets of eager mode.
    """

    def __init__(self, model: Any, microbatches: int):
        self.model, self.microbatches = model, microbatches
        self.added = Counter[str]()  # gradients so far, by FQN
        self.parts: dict[str, Tensor] = {}  # first gradients of tied weights in a microbatch
        # of a compiled model
        self.arrivals: list[Arrival] = []
        self.later = deque[tuple[list[nn.Parameter], Bucket, list[Tensor]]]()
        self.in_flight = deque[tuple[Bucket, list[Tensor], InFlight]]()
        self.finished = 0  # buckets that have been gathered
        self.parameters = {plan.fqn: parameter for parameter, plan in model.plans.items()}

    @_disable_current_modes()
    @torch.no_grad()
    def gather(self, read: ShardSpec) -> None:
        """Hold the weights of the block that is read.

        The next block is then in flight (eager.py).
        """
        eager = self.model.eager
        for members, bucket in eager.blocks[eager.block_of[read.fqn]]:
            for parameter, plan in zip(members, bucket.plans, strict=True):
                weight = eager.gather(local(parameter), plan, self.model.scales.of(plan.fqn))
                hold(self.model, plan, weight.detach(), parameter.requires_grad)
                if parameter.requires_grad:
                    leaf_of(self.model, plan).register_post_accumulate_grad_hook(
                        functools.partial(self.add, plan)
                    )

    @torch.no_grad()
    def hold_all(self, root: nn.Module) -> None:
        """Hold the weights of a compiled model in tensors that its graph waits for (arriving.py).

        Gather the first ones.
        """
        reads = Counter(
            plan.fqn
            for module in root.modules()
            for plan in module.__dict__["_fsdp"].plans.values()
        )
        for members, bucket in gather_buckets(self.model.plans):
            if bucket.plans[0].shard_degree > 1:
                tables = bucket.tables(local(members[0]))
                weights, finish = (
                    bucket.weights_of(tables),
                    functools.partial(self.finish_gathers, len(self.later)),
                )
                self.arrivals += [register(weight, finish) for weight in weights]
                self.later.append((members, bucket, tables))
            else:
                weights = bucket.finish_gather(_start_gather(self.model, members, bucket))
            for parameter, plan, weight in zip(members, bucket.plans, weights, strict=True):
                hold(self.model, plan, weight.detach(), trains=False)
                handle = weight.new_empty(0, dtype=plan.param_dtype).requires_grad_(
                    parameter.requires_grad
                )
                self.model.handles[plan.fqn] = handle
                assert plan.fqn not in takes, "two models with the same FQNs in a step"
                takes[plan.fqn] = functools.partial(
                    self.take_part if reads[plan.fqn] > 1 else self.take, plan, copy=True
                )
        self.start_next()

    def start_next(self) -> None:
        if self.later:
            members, bucket, tables = self.later.popleft()
            self.in_flight.append(
                (bucket, tables, _start_gather(self.model, members, bucket, tables))
            )

    @_disable_current_modes()
    @torch.no_grad()
    def finish_gathers(self, last: int) -> None:
        """Wait for the buckets up to number `last`, in the same order on all ranks.

        The next one is then in flight.
        """
        while self.finished <= last:
            self.start_next()
            bucket, tables, started = self.in_flight.popleft()
            bucket.finish_gather(started, tables)
            del started  # before the next bucket needs memory
            self.finished += 1

    def end(self) -> None:
        """Drop the weights.

        Otherwise, cycles of references keep them until Python collects garbage.
        """
        for state in (self.arrivals, self.later, self.in_flight):
            state.clear()

    def add(self, plan: ShardSpec, leaf: Tensor) -> None:
        """Take the gradient of a leaf."""
        assert leaf.grad is not None
        gradient, leaf.grad = leaf.grad, None
        self.take(plan, gradient)

    def take(self, plan: ShardSpec, gradient: Tensor, copy: bool = False) -> None:
        """Add a microbatch's gradient to the sum. The bucket of the last one starts to be reduced.

        copy: keep no gradient.
        """
        _add(self.model.sums, plan, gradient, copy)
        self.added[plan.fqn] += 1
        if self.added[plan.fqn] == self.microbatches:
            parameter, gradient = self.parameters[plan.fqn], self.model.sums.pop(plan.fqn)
            parameter.grad = as_shard_of(
                parameter, self.model.eager.reduce(gradient, plan, parameter.dtype)
            )
        assert self.added[plan.fqn] <= self.microbatches

    def take_part(self, plan: ShardSpec, gradient: Tensor, copy: bool) -> None:
        """Add up the two gradients of a tied weight in a microbatch, as autograd does, and take
        their sum.
        """
        first = self.parts.pop(plan.fqn, None)
        if first is None:
            self.parts[plan.fqn] = gradient.clone()
        else:
            self.take(plan, first.add_(gradient))


@torch.no_grad()
def _gather(model: Any) -> None:
    """Gather the unsharded weights, which modules read from now on.

    They, or their stand-ins, are leaves of autograd.
    """
    buckets = gather_buckets(model.plans)
    started = (
        (members, bucket, _start_gather(model, members, bucket)) for members, bucket in buckets
    )
    for members, bucket, in_flight in _prefetch(started):
        for parameter, weight in zip(members, bucket.finish_gather(in_flight), strict=True):
            hold(model, model.plans[parameter], weight.detach(), parameter.requires_grad)
        del in_flight, weight  # before the next bucket needs memory


def _start_gather(
    model: Any, members: Sequence[nn.Parameter], bucket: Bucket, tables: Sequence[Tensor] = ()
) -> InFlight:
    return bucket.start_gather(
        [*map(local, members)], [model.scales.of(plan.fqn) for plan in bucket.plans], tables
    )


def hold(model: Any, plan: ShardSpec, weight: Tensor, trains: bool = True) -> None:
    """Make modules read a gathered weight. It, or its stand-in, is a leaf of autograd."""
    leaf = stand_in(weight, plan.param_dtype) if plan.float8 else weight
    model.gathered[plan.fqn] = weight
    (model.stand_ins if plan.float8 else model.gathered)[plan.fqn] = leaf.requires_grad_(trains)


def leaf_of(model: Any, plan: ShardSpec) -> Tensor:
    """Return the tensor that autograd accumulates the gradient of a gathered weight into."""
    return model.stand_ins.get(plan.fqn, model.gathered[plan.fqn])


def _reduce(gradients: dict[nn.Parameter, Tensor], model: Any) -> None:
    """Reduce gradients of unsharded weights into `parameter.grad`.

    Empties `gradients`, to free each one early.
    """
    buckets = reduce_buckets({parameter: model.plans[parameter] for parameter in gradients})
    started = (
        (members, bucket, bucket.start_reduce([*map(gradients.pop, members)]))
        for members, bucket in buckets
    )
    for members, bucket, in_flight in _prefetch(started):
        for parameter, rows in zip(members, bucket.finish_reduce(in_flight), strict=True):
            parameter.grad = as_shard_of(parameter, rows.to(parameter.dtype))
        del in_flight, rows


def _prefetch(started: Iterable[Started]) -> Iterator[Started]:
    """Yield items in order, each after IN_FLIGHT - 1 later ones have been started.

    Keeps no reference to a yielded item.
    """
    under_way: deque[Started] = deque()
    for each in started:
        under_way.append(each)
        del each
        if len(under_way) == IN_FLIGHT:
            yield under_way.popleft()
    while under_way:
        yield under_way.popleft()


def gradient_leaves(root: nn.Module) -> list[Tensor]:
    """Return the tensors that autograd accumulates into: the gathered weights within
    `gathered_for_step`, else the parameters.
    """
    model = model_of(root)
    return [
        leaf_of(model, plan) if plan.fqn in model.gathered else parameter
        for parameter, plan in model.plans.items()
    ]


def fold_gradients(root: nn.Module) -> None:
    """Add each `.grad` to the sums in reduce_dtype, as hooks do, after a backward within
    `gathered_for_step` that ran none.
    """
    model = model_of(root)
    for plan, leaf in zip(model.plans.values(), gradient_leaves(root), strict=True):
        if plan.fqn not in model.gathered or leaf.grad is None:
            continue
        if model.step is not None:
            model.step.add(plan, leaf)
        elif leaf.dtype != plan.reduce_dtype:
            _fold(model.sums, plan, leaf)


def _sum_in_reduce_dtype(root: nn.Module) -> None:
    """Register hooks that sum the gradients of every backward in reduce_dtype, where they are
    computed in another dtype.
    """
    model = model_of(root)
    for plan in model.plans.values():
        leaf = leaf_of(model, plan)
        if leaf.requires_grad and plan.param_dtype != plan.reduce_dtype:
            leaf.register_post_accumulate_grad_hook(functools.partial(_fold, model.sums, plan))


def _fold(sums: dict[str, Tensor], plan: ShardSpec, leaf: Tensor) -> None:
    """Add a microbatch's gradient to the sum in reduce_dtype, and free it."""
    assert leaf.grad is not None
    _add(sums, plan, leaf.grad)
    leaf.grad = None


def _add(sums: dict[str, Tensor], plan: ShardSpec, gradient: Tensor, copy: bool = False) -> None:
    if plan.fqn in sums:
        sums[plan.fqn] += gradient
    else:
        sums[plan.fqn] = gradient.to(plan.reduce_dtype, copy=copy)
