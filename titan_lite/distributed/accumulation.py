"""Gradient accumulation with one round of communication a step.

    with gathered_for_step(model):                  # all weights are gathered
        for input, label in microbatches:
            loss(model(input), label).backward()    # gradients add up, unreduced
    parameter.grad                                  # reduced, on leaving

So was Llama 3 trained (arXiv 2407.21783, section 3.3.2): weights stay gathered after forward.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from titan_lite.distributed.gather import local
from titan_lite.distributed.simple_fsdp import as_shard_of, model_of


@contextmanager
def gathered_for_step(root: nn.Module) -> Iterator[None]:
    """Within: all weights stay gathered and gradients accumulate unreduced, in reduce_dtype; on leaving, they are reduced once
    into `parameter.grad`. For gradient accumulation (as Llama 3 did): k microbatches cost the communication of one, and the
    memory of the rank's whole weights and gradients.
    """
    model = model_of(root)
    with torch.no_grad():
        started = {parameter: plan.start_gather(local(parameter)) for parameter, plan in model.plans.items()}
        wholes = {parameter: started.pop(parameter).wait().detach() for parameter in model.plans}
    model.gathered, model.sums = wholes, {}
    for parameter, whole in wholes.items():
        whole.requires_grad_(parameter.requires_grad)
        plan = model.plans[parameter]
        if plan.param_dtype != plan.reduce_dtype:
            whole.register_post_accumulate_grad_hook(functools.partial(_fold, model.sums, parameter, plan.reduce_dtype))
    modules = [module for module in root.modules() if module._fsdp.plans]  # type: ignore[union-attr]
    for module in modules:
        names: list[str] = list(module._fsdp.plans)  # type: ignore[union-attr, arg-type]
        module._fsdp.wholes.update({name: wholes[module._parameters[name]] for name in names})  # type: ignore
    try:
        yield
    finally:
        sums, model.gathered, model.sums = model.sums, {}, {}
        for module in modules:
            module._fsdp.wholes.clear()  # type: ignore[union-attr, operator]
    reducing = {}
    for parameter, plan in model.plans.items():
        gradient = sums.pop(parameter, wholes.pop(parameter).grad)
        if gradient is not None:
            reducing[parameter] = plan.start_reduce(gradient)
    for parameter, gradient in reducing.items():
        own = model.plans[parameter].finish_reduce(gradient).to(parameter.dtype)
        parameter.grad = as_shard_of(parameter, own)


def gradient_leaves(root: nn.Module) -> list[Tensor]:
    """What autograd accumulates into: the gathered weights within `gathered_for_step`, else the parameters."""
    model = model_of(root)
    return [model.gathered.get(parameter, parameter) for parameter in model.plans]


def fold_gradients(root: nn.Module) -> None:
    """Within `gathered_for_step`, after a backward that ran no hooks: what is in `.grad` joins the sums in reduce_dtype."""
    model = model_of(root)
    for parameter, whole in model.gathered.items():
        dtype = model.plans[parameter].reduce_dtype
        if whole.grad is not None and whole.dtype != dtype:
            _fold(model.sums, parameter, dtype, whole)


def _fold(sums: dict[nn.Parameter, Tensor], parameter: nn.Parameter, dtype: torch.dtype, whole: Tensor) -> None:
    """Add a microbatch's gradient to the sum in `dtype`, which is not the one it was computed in."""
    assert whole.grad is not None
    if parameter in sums:
        sums[parameter] += whole.grad
    else:
        sums[parameter] = whole.grad.to(dtype)
    whole.grad = None
