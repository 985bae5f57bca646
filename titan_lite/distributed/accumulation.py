"""Gradient accumulation with one round of communication a step, of one collective a transformer block.

    with gathered_for_step(model):                  # all weights are gathered
        for input, label in microbatches:
            loss(model(input), label).backward()    # gradients add up, unreduced
    parameter.grad                                  # reduced, on leaving

So was Llama 3 trained (arXiv 2407.21783, section 3.3.2): weights stay gathered after forward. Buckets are those of the manual
wrapping of SimpleFSDP (arXiv 2411.00284, section 4.1).
"""

import functools
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

from titan_lite.compiler.fqns import block_of, last_block
from titan_lite.distributed.gather import Bucket, GatherPlan, local
from titan_lite.distributed.simple_fsdp import as_shard_of, model_of

IN_FLIGHT = 2  # buckets that exist at once, beside the weights or gradients: one travels while another is copied
Plans = Mapping[nn.Parameter, GatherPlan]
StepBuckets = list[tuple[list[nn.Parameter], Bucket]]
Started = TypeVar("Started")


@contextmanager
def gathered_for_step(root: nn.Module) -> Iterator[None]:
    """Within: all weights stay gathered and gradients accumulate unreduced, in reduce_dtype; on leaving, they are reduced once
    into `parameter.grad`. k microbatches cost the communication of one, and the memory of the rank's whole weights and gradients.

    Two ranks have one sum; of more, a library may add up numbers in an order that depends on where they lie in a bucket.
    """
    model = model_of(root)
    model.gathered = _gather(model.plans)  # which modules read from now on
    _sum_in_reduce_dtype(root)
    try:
        yield
    finally:
        sums, model.sums = model.sums, {}
        wholes, model.gathered = model.gathered, {}
    found = ((parameter, sums.pop(plan.fqn, wholes.pop(plan.fqn).grad)) for parameter, plan in model.plans.items())
    _reduce({parameter: gradient for parameter, gradient in found if gradient is not None}, model.plans)


@torch.no_grad()
def _gather(plans: Plans) -> dict[str, Tensor]:
    """The whole weights by FQN, as leaves of autograd."""
    wholes: dict[str, Tensor] = {}
    buckets = gather_buckets(plans)
    started = ((members, bucket, bucket.start_gather([*map(local, members)])) for members, bucket in buckets)
    for members, bucket, in_flight in _few_at_a_time(started):
        for parameter, whole in zip(members, bucket.finish_gather(in_flight), strict=True):
            wholes[plans[parameter].fqn] = whole.detach().requires_grad_(parameter.requires_grad)
        del in_flight, whole  # before the next bucket needs memory
    return wholes


def _reduce(gradients: dict[nn.Parameter, Tensor], plans: Plans) -> None:
    """Gradients of the wholes, which are taken out -> `parameter.grad`."""
    buckets = reduce_buckets({parameter: plans[parameter] for parameter in gradients})
    started = ((members, bucket, bucket.start_reduce([*map(gradients.pop, members)])) for members, bucket in buckets)
    for members, bucket, in_flight in _few_at_a_time(started):
        for parameter, rows in zip(members, bucket.finish_reduce(in_flight), strict=True):
            parameter.grad = as_shard_of(parameter, rows.to(parameter.dtype))
        del in_flight, rows


def gather_buckets(plans: Plans) -> StepBuckets:
    """Weights that are gathered together; one that all ranks have is alone."""
    last = last_block(plan.fqn for plan in plans.values())

    def travels_with(plan: GatherPlan) -> Hashable:
        return (block_of(plan.fqn, last), plan.shard_group, plan.param_dtype) if plan.shard_degree > 1 else plan

    return _buckets(plans, travels_with)


def reduce_buckets(plans: Plans) -> StepBuckets:
    """Gradients that are reduced together."""
    last = last_block(plan.fqn for plan in plans.values())
    return _buckets(plans, lambda plan: (block_of(plan.fqn, last), plan.shard_group, plan.sum_groups, plan.reduce_dtype))


def _buckets(plans: Plans, travels_with: Callable[[GatherPlan], Hashable]) -> StepBuckets:
    """Parameters that travel together, in the order of the first ones."""
    together: dict[Hashable, list[nn.Parameter]] = defaultdict(list)
    for parameter, plan in plans.items():
        together[travels_with(plan)].append(parameter)
    return [(members, Bucket(tuple(map(plans.__getitem__, members)))) for members in together.values()]


def _few_at_a_time(started: Iterable[Started]) -> Iterator[Started]:
    """Each in its order, once IN_FLIGHT are started and not yet finished; what is yielded is not kept."""
    under_way: deque[Started] = deque()
    for each in started:
        under_way.append(each)
        del each
        if len(under_way) == IN_FLIGHT:
            yield under_way.popleft()
    while under_way:
        yield under_way.popleft()


def gradient_leaves(root: nn.Module) -> list[Tensor]:
    """The tensors that autograd accumulates into: the gathered weights within `gathered_for_step`, else the parameters."""
    model = model_of(root)
    return [model.gathered.get(plan.fqn, parameter) for parameter, plan in model.plans.items()]


def fold_gradients(root: nn.Module) -> None:
    """Within `gathered_for_step`, after a backward that ran no hooks: what is in `.grad` joins the sums in reduce_dtype."""
    model = model_of(root)
    for plan in model.plans.values():
        whole = model.gathered.get(plan.fqn)
        if whole is not None and whole.grad is not None and whole.dtype != plan.reduce_dtype:
            _fold(model.sums, plan, whole)


def _sum_in_reduce_dtype(root: nn.Module) -> None:
    """Every backward's gradients, where it is another dtype than they are computed in."""
    model = model_of(root)
    for plan in model.plans.values():
        whole = model.gathered[plan.fqn]
        if whole.requires_grad and plan.param_dtype != plan.reduce_dtype:
            whole.register_post_accumulate_grad_hook(functools.partial(_fold, model.sums, plan))


def _fold(sums: dict[str, Tensor], plan: GatherPlan, whole: Tensor) -> None:
    """Add a microbatch's gradient to the sum in reduce_dtype, which is not the dtype it was computed in."""
    assert whole.grad is not None
    if plan.fqn in sums:
        sums[plan.fqn] += whole.grad
    else:
        sums[plan.fqn] = whole.grad.to(plan.reduce_dtype)
    whole.grad = None
