"""Accumulate gradients with one round of communication per optimizer step, in one bucket per transformer block.

    with gathered_for_step(model):                  # all weights are gathered
        for input, label in microbatches:
            loss(model(input), label).backward()    # gradients accumulate, unreduced
    parameter.grad                                  # reduced, on exit

Llama 3 was trained this way (arXiv 2407.21783, section 3.3.2): weights stay gathered after forward. Buckets are those of
SimpleFSDP's manual wrapping (arXiv 2411.00284, section 4.1).
"""

import functools
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from titan_lite.compiler.fqns import block_of, last_block
from titan_lite.distributed.gather import Bucket, GatherPlan, local
from titan_lite.distributed.simple_fsdp import as_shard_of, model_of
from titan_lite.float8 import stand_in

IN_FLIGHT = 2  # buckets allocated at once, beside weights and gradients: one is communicated while another is copied
Plans = Mapping[nn.Parameter, GatherPlan]
StepBuckets = list[tuple[list[nn.Parameter], Bucket]]
Started = TypeVar("Started")


@contextmanager
def gathered_for_step(root: nn.Module) -> Iterator[None]:
    """Keep weights gathered and accumulate unreduced gradients in reduce_dtype; on exit, reduce them into `parameter.grad`.

    k microbatches cost the communication of one, and the memory of the rank's unsharded weights and gradients. With more than
    two ranks, a library may sum in an order that depends on the offset in a bucket.
    """
    model = model_of(root)
    _gather(model)
    _sum_in_reduce_dtype(root)
    try:
        yield
    finally:
        sums, model.sums = model.sums, {}
        leaves, model.gathered, model.stand_ins = model.gathered | model.stand_ins, {}, {}
    found = ((parameter, sums.pop(plan.fqn, leaves.pop(plan.fqn).grad)) for parameter, plan in model.plans.items())
    _reduce({parameter: gradient for parameter, gradient in found if gradient is not None}, model)


@torch.no_grad()
def _gather(model: Any) -> None:
    """Gather the unsharded weights, which modules read from now on. They, or their stand-ins, are leaves of autograd."""
    buckets = gather_buckets(model.plans)
    started = (
        (members, bucket, bucket.start_gather([*map(local, members)], [model.scales.of(plan.fqn) for plan in bucket.plans]))
        for members, bucket in buckets
    )
    for members, bucket, in_flight in _prefetch(started):
        for parameter, weight in zip(members, bucket.finish_gather(in_flight), strict=True):
            hold(model, model.plans[parameter], weight.detach(), parameter.requires_grad)
        del in_flight, weight  # before the next bucket needs memory


def hold(model: Any, plan: GatherPlan, weight: Tensor, trains: bool = True) -> None:
    """Make modules read a gathered weight. It, or its stand-in, is a leaf of autograd."""
    leaf = stand_in(weight, plan.param_dtype) if plan.float8 else weight
    model.gathered[plan.fqn] = weight
    (model.stand_ins if plan.float8 else model.gathered)[plan.fqn] = leaf.requires_grad_(trains)


def leaf_of(model: Any, plan: GatherPlan) -> Tensor:
    """Return the tensor that autograd accumulates the gradient of a gathered weight into."""
    return model.stand_ins.get(plan.fqn, model.gathered[plan.fqn])


def _reduce(gradients: dict[nn.Parameter, Tensor], model: Any) -> None:
    """Reduce gradients of unsharded weights into `parameter.grad`. Empties `gradients`, to free each one early."""
    buckets = reduce_buckets({parameter: model.plans[parameter] for parameter in gradients})
    started = ((members, bucket, bucket.start_reduce([*map(gradients.pop, members)])) for members, bucket in buckets)
    for members, bucket, in_flight in _prefetch(started):
        for parameter, rows in zip(members, bucket.finish_reduce(in_flight), strict=True):
            rows = rows.to(parameter.dtype)
            if model.put is None:
                parameter.grad = as_shard_of(parameter, rows)
            else:
                model.put(parameter, rows)
        del in_flight, rows


def gather_buckets(plans: Plans) -> StepBuckets:
    """Return the buckets that weights are gathered in. A weight that is not sharded has its own."""
    last = last_block(plan.fqn for plan in plans.values())

    def key(plan: GatherPlan) -> Hashable:
        return (block_of(plan.fqn, last), plan.shard_group, plan.gather_dtype) if plan.shard_degree > 1 else plan

    return _buckets(plans, key)


def reduce_buckets(plans: Plans) -> StepBuckets:
    """Return the buckets that gradients are reduced in."""
    last = last_block(plan.fqn for plan in plans.values())
    return _buckets(plans, lambda plan: (block_of(plan.fqn, last), plan.shard_group, plan.sum_groups, plan.reduce_dtype))


def _buckets(plans: Plans, key: Callable[[GatherPlan], Hashable]) -> StepBuckets:
    """Return one bucket for each value of `key`, in the order of their first parameters."""
    together: dict[Hashable, list[nn.Parameter]] = defaultdict(list)
    for parameter, plan in plans.items():
        together[key(plan)].append(parameter)
    return [(members, Bucket(tuple(map(plans.__getitem__, members)))) for members in together.values()]


def _prefetch(started: Iterable[Started]) -> Iterator[Started]:
    """Yield items in order, each after IN_FLIGHT - 1 later ones have been started. Keeps no reference to a yielded item."""
    under_way: deque[Started] = deque()
    for each in started:
        under_way.append(each)
        del each
        if len(under_way) == IN_FLIGHT:
            yield under_way.popleft()
    while under_way:
        yield under_way.popleft()


def gradient_leaves(root: nn.Module) -> list[Tensor]:
    """Return the tensors that autograd accumulates into: the gathered weights within `gathered_for_step`, else the parameters, or
    what stands for those in host memory."""
    model = model_of(root)
    if model.gathered:
        return [leaf_of(model, plan) for plan in model.plans.values()]
    return [model.leaves.get(plan.fqn, parameter) for parameter, plan in model.plans.items()]


def fold_gradients(root: nn.Module) -> None:
    """Do what hooks do, after a backward that ran none: within `gathered_for_step` add each `.grad` to the sums in reduce_dtype,
    else give away gradients of shards in host memory."""
    model = model_of(root)
    for (parameter, plan), leaf in zip(model.plans.items(), gradient_leaves(root), strict=True):
        if model.gathered and leaf.grad is not None and leaf.dtype != plan.reduce_dtype:
            _fold(model.sums, plan, leaf)
        elif not model.gathered and leaf.grad is not None and model.put is not None:
            model.put(parameter, leaf.grad)
            leaf.grad = None


def _sum_in_reduce_dtype(root: nn.Module) -> None:
    """Register hooks that sum the gradients of every backward in reduce_dtype, where they are computed in another dtype."""
    model = model_of(root)
    for plan in model.plans.values():
        leaf = leaf_of(model, plan)
        if leaf.requires_grad and plan.param_dtype != plan.reduce_dtype:
            leaf.register_post_accumulate_grad_hook(functools.partial(_fold, model.sums, plan))


def _fold(sums: dict[str, Tensor], plan: GatherPlan, leaf: Tensor) -> None:
    """Add a microbatch's gradient to the sum in reduce_dtype, and free it."""
    assert leaf.grad is not None
    if plan.fqn in sums:
        sums[plan.fqn] += leaf.grad
    else:
        sums[plan.fqn] = leaf.grad.to(plan.reduce_dtype)
    leaf.grad = None
