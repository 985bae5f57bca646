"""Compute linear layers in float8: the matmul of forward, and of both gradients in backward.

    apply_float8(model, "tensorwise", filter_fqns=("attention.wk",))   # in place
    y = layer(x)            # torch._scaled_mm; y and all gradients have the dtype of x

A tensor is cast when it is used: scaled so that its largest magnitude is the largest number of
float8, and rounded (arXiv 2209.05433). Master weights, gradients and the optimizer keep their
dtypes. The recipes are those of torchao (its float8 README):

    recipe              scale of      dtypes                          gradient of the weight
    tensorwise          a tensor      e4m3, gradients e5m2            float8
    rowwise             a row         e4m3; scales: powers of two     float8
    rowwise_with_gw_hp  a row         e4m3; scales: powers of two     dtype of x

A factor may also be given in float8 already, as `Scaled`: a weight that SimpleFSDP gathers with one
byte a number (weights.py), or tokens that tensor parallelism gathers so (tokens.py).
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from titan_lite.config import ConfigError
from titan_lite.config.errors import shown
from titan_lite.distributed.param_collectives import Transport
from titan_lite.models.fqns import is_filtered, is_router

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
MIN_AMAX = 1e-12  # a scale is computed for a largest magnitude of at least this


@dataclass(frozen=True)
class Recipe:
    """The casts of the factors of a layer's three matmuls."""

    grad_dtype: torch.dtype  # of the gradient of the layer's result; the other factors are e4m3
    scales_rows: bool  # one scale for each row of a factor, a power of two; else one for the tensor
    casts_weight_grad: bool  # compute the gradient of the weight in float8


RECIPES = {
    "tensorwise": Recipe(E5M2, scales_rows=False, casts_weight_grad=True),
    "rowwise": Recipe(E4M3, scales_rows=True, casts_weight_grad=True),
    "rowwise_with_gw_hp": Recipe(E4M3, scales_rows=True, casts_weight_grad=False),
}


# --- A tensor in float8 ---------------------------------------------------------------------------


class Scaled(NamedTuple):
    """A tensor with the scale of its cast to float8."""

    data: Tensor  # float8 as bytes (uint8), or a tensor that is not cast yet
    scale: Tensor | None = None  # float32 scalar: float8 = tensor * scale; None: as the recipe says
    gradient: Tensor | None = None  # of bytes: `stand_in` for the tensor in autograd


def scale_of(amax: Tensor, dtype: torch.dtype = E4M3, *, power_of_two: bool = False) -> Tensor:
    """Return float32 scales for tensors or rows with the largest magnitudes `amax`.

    The division is in float64, since compiled code divides float32 with another rounding.
    """
    scale = (torch.finfo(dtype).max / amax.double().clamp(min=MIN_AMAX)).float()
    return torch.exp2(torch.floor(torch.log2(scale))) if power_of_two else scale


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype = E4M3) -> Tensor:
    """Return x * scale in float8, saturated."""
    largest = torch.finfo(dtype).max
    return (x.float() * scale).clamp(-largest, largest).to(dtype)


def to_bytes(x: Tensor, scale: Tensor, dtype: torch.dtype = E4M3) -> Tensor:
    """Return x * scale in float8, as uint8: collectives and padding know no float8."""
    return cast(x, scale, dtype).view(torch.uint8)


# --- Layers ---------------------------------------------------------------------------------------


class Float8Linear(nn.Linear):
    """A linear layer without bias whose matmuls are in float8: (..., K) -> (..., N)."""

    recipe: str  # a name of RECIPES
    transport: Transport  # of the weight, if it has a scale (weights.py)

    def forward(self, x: Tensor | Scaled) -> Tensor:
        """Multiply by the weight."""
        return self.multiply(x)

    def multiply(
        self, x: Tensor | Scaled, moves: tuple[Callable, Callable] | None = None
    ) -> Tensor:
        """Multiply by the weight.

        moves: what tensor parallelism does with the result, and with its gradient in backward,
        which then is a Scaled of e5m2.
        """
        weight: Tensor | Scaled = self.weight
        if not isinstance(x, Scaled):
            x = Scaled(x)
        if not isinstance(weight, Scaled):
            weight = Scaled(weight)
        return _Matmul.apply(*x, *weight, RECIPES[self.recipe], moves)


def apply_float8(model: nn.Module, recipe: str, filter_fqns: Sequence[str] = ()) -> None:
    """Compute the linear layers of blocks in float8, in place, but those of `filter_fqns`."""
    multiply_in_float32_on_cpus()
    for fqn, module in linear_layers(model).items():
        if not is_filtered(fqn, filter_fqns):
            module.__class__ = Float8Linear
            module.recipe = recipe  # type: ignore[assignment]


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers of the blocks by FQN; a subclass, which has a forward of its own, is
    none.
    """
    return {
        fqn: module
        for fqn, module in model.named_modules()
        if type(module) is nn.Linear and fqn.startswith("layers.")
    }


def check_layers(model: nn.Module, family: str, filter_fqns: Sequence[str] = ()) -> None:
    """Raise ConfigError for a matrix of a block that `apply_float8` would leave as it is, though it
    is not in `filter_fqns`.
    """
    linear = linear_layers(model)
    for fqn, parameter in model.named_parameters():
        module = fqn.removesuffix(".weight")
        is_in_block = fqn.startswith("layers.") and parameter.ndim == 2
        if (
            not is_in_block
            or is_router(fqn)
            or module in linear
            or is_filtered(module, filter_fqns)
        ):
            continue
        name = module.split(".", 2)[2]  # in its block
        kind = type(model.get_submodule(fqn.rpartition(".")[0])).__qualname__
        raise ConfigError(
            f"model.name = {shown(family)}: float8.enable = true computes a torch.nn.Linear alone,"
            f" and {fqn} is of a {kind}, which has a forward of its own; use a torch.nn.Linear, or"
            f' float8.filter_fqns = ["{name}"]'
        )


# --- Matmuls --------------------------------------------------------------------------------------


class _Factor(NamedTuple):
    """A matrix in float8. Its value is data * inverse_scale."""

    data: Tensor
    inverse_scale: Tensor  # scalar, or (rows, 1) or (1, columns)

    def t(self) -> "_Factor":
        return _Factor(self.data.t(), self.inverse_scale.t())

    def with_consecutive_columns(self) -> "_Factor":
        """Return a copy with each column in consecutive memory, as a second factor needs it."""
        return _Factor(self.data.t().contiguous().t(), self.inverse_scale)


class _Matmul(torch.autograd.Function):
    """x (..., K) @ weight (N, K) transposed -> (..., N).

    Forward saves x and the weight as they are given, and backward casts again: so resharding
    recognises a gathered weight.
    """

    @staticmethod
    def forward(  # noqa: PLR0913 - autograd sees no tensors within the two Scaled
        ctx: Any,  # noqa: ANN401 torch's
        x: Tensor,
        x_scale: Tensor | None,
        x_stand_in: Tensor | None,
        weight: Tensor,
        weight_scale: Tensor | None,
        weight_stand_in: Tensor | None,
        recipe: Recipe,
        moves: tuple[Callable, Callable] | None,
    ) -> Tensor:
        ctx.save_for_backward(x, x_scale, weight, weight_scale)
        ctx.recipe = recipe
        ctx.moves = moves
        ctx.dtype = x.dtype if x_stand_in is None else x_stand_in.dtype
        x_rows = _cast_vectors(x.flatten(0, -2), x_scale, recipe)
        weight_rows = _cast_vectors(weight, weight_scale, recipe)
        out = _multiply(x_rows, weight_rows.t(), ctx.dtype, fast_accum=True)
        out = out.unflatten(0, x.shape[:-1])
        return moves[0](out) if moves else out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401 torch's
        x, x_scale, weight, weight_scale = ctx.saved_tensors
        recipe: Recipe = ctx.recipe
        shape = x.shape
        moved: Scaled = ctx.moves[1](grad) if ctx.moves else Scaled(grad)
        x = x.flatten(0, -2)
        grad = moved.data.flatten(0, -2)

        grad_rows = _cast_vectors(grad, moved.scale, recipe, dtype=recipe.grad_dtype)
        if recipe.casts_weight_grad:
            weight_columns = _cast_vectors(weight, weight_scale, recipe, dim=0)
        else:  # as torchao does: with one scale
            weight_columns = _cast_tensor(weight, weight_scale, recipe)
        dx = _multiply(grad_rows, weight_columns.with_consecutive_columns(), ctx.dtype)

        if recipe.casts_weight_grad:
            grad_columns = grad_rows  # with one scale for all, the same numbers
            if recipe.scales_rows:
                grad_columns = _cast_vectors(grad, None, recipe, dim=0)
            transposed = grad_columns.with_consecutive_columns().t()
            x_columns = _cast_vectors(x, x_scale, recipe, dim=0)
            dw = _multiply(transposed, x_columns.with_consecutive_columns(), ctx.dtype)
        else:
            dw = grad.t() @ x

        dx = dx.unflatten(0, shape[:-1])
        return *_gradients_of(x, dx), *_gradients_of(weight, dw), None, None


def _gradients_of(given: Tensor, gradient: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
    """Return the gradients of a Scaled: of its stand-in if it was given as bytes, else its data."""
    if given.dtype == torch.uint8:
        return None, None, gradient
    return gradient, None, None


def _cast_vectors(
    x: Tensor,
    scale: Tensor | None,
    recipe: Recipe,
    *,
    dim: int = -1,
    dtype: torch.dtype = E4M3,
) -> _Factor:
    """Return a matrix in float8, with scales of its vectors along `dim` if the recipe says so.

    scale: given; None: computed. A matrix that is given as bytes is taken as it is.
    """
    if not recipe.scales_rows or scale is not None:
        return _cast_tensor(x, scale, recipe, dtype=dtype)
    amax = x.abs().amax(dim, keepdim=True)
    scale = scale_of(amax, dtype, power_of_two=True)
    return _Factor(cast(x, scale, dtype), scale.reciprocal())


def _cast_tensor(
    x: Tensor, scale: Tensor | None, recipe: Recipe, *, dtype: torch.dtype = E4M3
) -> _Factor:
    """Return a matrix in float8, with one scale. Arguments are as for `_cast_vectors`."""
    if x.dtype == torch.uint8:
        assert scale is not None
        return _Factor(x.view(dtype), scale.reciprocal())
    if scale is None:
        scale = scale_of(x.abs().amax(), dtype, power_of_two=recipe.scales_rows)
    return _Factor(cast(x, scale, dtype), scale.reciprocal())


def _multiply(a: _Factor, b: _Factor, dtype: torch.dtype, *, fast_accum: bool = False) -> Tensor:
    """Return a (M, K) @ b (K, N) in `dtype`.

    fast_accum: sum in fewer bits on GPUs, as torchao does in forward alone. GPUs have a fast kernel
    for scales of rows only with it. Otherwise the result is scaled, exactly by powers of two.
    """
    scales_rows = a.inverse_scale.dim() or b.inverse_scale.dim()
    if fast_accum or not scales_rows:
        return torch._scaled_mm(
            a.data,
            b.data,
            a.inverse_scale,
            b.inverse_scale,
            out_dtype=dtype,
            use_fast_accum=fast_accum,
        )
    ones = torch.ones((), device=a.data.device)
    out = torch._scaled_mm(a.data, b.data, ones, ones, out_dtype=dtype)
    return out * a.inverse_scale.to(dtype) * b.inverse_scale.to(dtype)


@functools.cache
def multiply_in_float32_on_cpus() -> torch.library.Library:
    """Replace the kernel of torch._scaled_mm on CPUs by a matmul in float32.

    Torch's own (2.13) takes up to 440 times as long where the processor has no matmul in float8.
    Results are the same to the bit or but for rounding. The operator stays, so that graphs and
    passes on a CPU are those of a GPU.
    """

    def multiply(  # noqa: PLR0913 - the operator's arguments
        a: Tensor,
        b: Tensor,
        scale_a: Tensor,
        scale_b: Tensor,
        bias: Tensor | None = None,
        scale_result: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        use_fast_accum: bool = False,
    ) -> Tensor:
        assert bias is None, "a bias is not used here"
        return ((a.float() * scale_a) @ (b.float() * scale_b)).to(out_dtype)

    def multiply_into(*args: Any, out: Tensor, **kwargs: Any) -> Tensor:
        return out.copy_(multiply(*args, **kwargs))

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it replaces a kernel
        library.impl("_scaled_mm", multiply, "CPU")
        library.impl("_scaled_mm.out", multiply_into, "CPU")  # Inductor calls this one
    return library  # its kernels live as long as it does
