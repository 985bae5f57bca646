"""Tokens, and gradients of tokens, that tensor parallelism gathers in float8.

    apply_float8_tokens(model, "llama3", compiled=True)     # in place, before the model is split

A scale is that of the tokens of all ranks: so matmuls are those of tokens that were gathered as
they are. Sums of partial results are reduce-scattered in their own dtype.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from titan_lite.collectives import all_reduce
from titan_lite.distributed.param_collectives import stand_in
from titan_lite.distributed.specialize import specialize
from titan_lite.distributed.tensor_parallel import (
    COLUMN,
    ROW,
    Axis,
    all_gather_tokens,
    reduce_scatter_tokens,
    style_of,
)
from titan_lite.features.float8.linear import E5M2, Float8Linear, Scaled, scale_of, to_bytes


def apply_float8_tokens(model: nn.Module, family: str, *, compiled: bool) -> None:
    """Let modules exchange their tokens in float8, in place, where all matmuls of the tokens that
    they gather, or of the gradients that they gather in backward, are in float8 with one scale for
    a tensor. All float8 layers of `model` have one.

    compiled: gradients too. Their gather is then a part of the matmul's backward, which a graph
    computes once. Eagerly, full checkpointing would repeat the matmul's reduce-scatter, and a
    pipeline that halves backwards the gather.
    """
    for fqn, module in model.named_modules():
        style = style_of(fqn, family)
        if style is None:
            continue
        if style == ROW:
            if compiled and isinstance(module, Float8Linear):
                module.__class__ = _ScatteringLinear
        elif style.gathers:
            matmuls = [
                child
                for name, child in module.named_children()
                if style_of(f"{fqn}.{name}", family) == COLUMN
            ]
            if matmuls and all(isinstance(matmul, Float8Linear) for matmul in matmuls):
                specialize(module, gathering)


class _ScatteringLinear(Float8Linear):
    """A layer that reduce-scatters the tokens of its results, (B, T, K) -> (B, t, N). Its backward
    gathers their gradient in float8, and multiplies by what it has gathered.
    """

    exchanges_tokens = True

    def forward(self, x: Tensor | Scaled) -> Tensor:
        axis: Axis = self.tp_axis  # type: ignore[assignment]
        scatter = functools.partial(reduce_scatter_tokens, axis=axis)
        gather_gradient = functools.partial(_gather_gradient, axis=axis)
        return self.multiply(x, (scatter, gather_gradient))


def gathering(cls: type[nn.Module]) -> dict[str, object]:
    """Return the members of a module that gathers the tokens of its input in float8."""

    def forward(self: nn.Module, x: Tensor, *others: Tensor) -> Tensor:
        axis: Axis = self.tp_axis  # type: ignore[assignment]
        return cls.forward(self, _gather_tokens(x, axis), *others)

    return {"forward": forward, "exchanges_tokens": True}


def _gather_tokens(x: Tensor, axis: Axis) -> Scaled:
    """All-gather tokens: (B, t, C) -> (B, T, C). Backward reduce-scatters the gradient in its own
    dtype.
    """
    scale = scale_of(all_reduce(x.detach().abs().amax(), "max", axis.group))
    data, stands_in = _GatheredTokens.apply(x, scale, axis)
    return Scaled(data, scale, stands_in)


def _gather_gradient(gradient: Tensor, axis: Axis) -> Scaled:
    """All-gather gradients of tokens in e5m2: (B, t, C) -> (B, T, C)."""
    scale = scale_of(all_reduce(gradient.abs().amax(), "max", axis.group), E5M2)
    return Scaled(all_gather_tokens(to_bytes(gradient, scale, E5M2), axis), scale)


class _GatheredTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:  # noqa: ANN401 torch's
        ctx.axis = axis
        ctx.set_materialize_grads(False)  # as in GatheredWeight (param_collectives.py)
        data = all_gather_tokens(to_bytes(x, scale), axis)
        return data, stand_in(data, x.dtype)

    @staticmethod
    def backward(ctx: Any, _: None, gradient: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401 torch's
        return reduce_scatter_tokens(gradient, ctx.axis), None, None
