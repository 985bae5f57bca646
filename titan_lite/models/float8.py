"""Linear layers with matrix products in float8, in forward and for both gradients in backward
(arXiv 2209.05433).

    apply_float8(model, "tensorwise", filter_fqns=("attention.wk",))            # in place: replaces the class of nn.Linear
    y = layer(x)                                                                # torch._scaled_mm; y and all gradients: x.dtype

A tensor is cast when it is used: scaled so that its largest magnitude is the largest number of
float8, and rounded. Master weights, gradients and the optimizer keep their dtypes. The recipes are
those of torchao (its float8 README):

    recipe                scale of                         dtypes                            gradient of the weight
    tensorwise            a tensor                         e4m3, gradients e5m2              float8
    rowwise               a row of each factor             e4m3; scales are powers of two    float8
    rowwise_with_gw_hp    a row of each factor             e4m3; scales are powers of two    dtype of x

A factor may also be given in float8 already, as `Scaled`: a weight that SimpleFSDP gathers with one
byte a number, or tokens that tensor parallelism gathers so.
"""

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from titan_lite.config import ConfigError, Float8

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # of which each dimension of a float8 product is one (torch._scaled_mm on GPUs)
SMALLEST = 1e-12  # largest magnitude that a scale is computed for, at least


class Scaled(NamedTuple):
    """A tensor with the scale of its cast to float8.

    data: float8 as bytes (uint8), or a tensor that is not cast yet. scale: float32 scalar; float8 =
    tensor * scale; None: as the recipe says. gradient: stands for the tensor in autograd if data
    are bytes. It has the shape and dtype of the tensor but no storage, and its value is never read.
    """

    data: Tensor
    scale: Tensor | None = None
    gradient: Tensor | None = None


def scale_of(amax: Tensor, dtype: torch.dtype = E4M3, *, power_of_two: bool = False) -> Tensor:
    """Return float32 scales for tensors or rows with the largest magnitudes `amax`.

    The division is in float64, since compiled code divides float32 with another rounding.
    """
    scale = (torch.finfo(dtype).max / amax.double().clamp(min=SMALLEST)).float()
    return torch.exp2(torch.floor(torch.log2(scale))) if power_of_two else scale


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype = E4M3) -> Tensor:
    """Return x * scale in float8, saturated."""
    most = torch.finfo(dtype).max
    return (x.float() * scale).clamp(-most, most).to(dtype)


def to_bytes(x: Tensor, scale: Tensor, dtype: torch.dtype = E4M3) -> Tensor:
    """Return x * scale in float8, as uint8: collectives and padding know no float8."""
    return cast(x, scale, dtype).view(torch.uint8)


def stand_in(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `Scaled.gradient` of the bytes `data`."""
    return data.new_empty((), dtype=dtype).expand(data.shape)


@functools.cache
def multiply_in_float32_on_cpus() -> torch.library.Library:
    """Replace the kernel of torch._scaled_mm on CPUs by a product in float32.

    Torch's own (2.13) takes up to 440 times as long where the processor has no product in float8.
    Results are the same to the bit or but for rounding. The operator stays, so that graphs and
    passes on a CPU are those of a GPU.
    """

    def multiply(
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


class Float8Linear(nn.Linear):
    """A linear layer without bias whose products are in float8: (..., K) -> (..., N).

    moves: what tensor parallelism does with the result, and with its gradient in backward, which
    gives a Scaled of e5m2.
    """

    recipe: str

    def forward(self, x: Tensor | Scaled, moves: tuple[Callable, Callable] | None = None) -> Tensor:
        weight: Tensor | Scaled = self.weight
        x, weight = (each if isinstance(each, Scaled) else Scaled(each) for each in (x, weight))
        return _Product.apply(*x, *weight, self.recipe, moves)


def apply_float8(model: nn.Module, recipe: str, filter_fqns: Sequence[str] = ()) -> None:
    """Replace the class of the blocks' linear layers, in place, except of those that `is_filtered`
    by their names.
    """
    multiply_in_float32_on_cpus()
    for fqn, module in linear_layers(model):
        if not is_filtered(fqn, filter_fqns):
            module.__class__ = Float8Linear
            module.recipe = recipe  # type: ignore[assignment]


def linear_layers(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    """Return the linear layers of the blocks, with their FQNs."""
    modules = model.named_modules()
    return [
        (fqn, module)
        for fqn, module in modules
        if isinstance(module, nn.Linear) and fqn.startswith("layers.")
    ]


def check_sizes(float8: Float8, sizes: Mapping[str, Sequence[float]], tokens: int) -> None:
    """Raise ConfigError for products with dimensions other than multiples of 16, or for a recipe
    that has none.

    sizes: of a rank's weight of each linear layer, by FQN; tokens: of a rank's microbatch.
    """
    if float8.all_gather and float8.recipe != "tensorwise":
        wrong = (
            "float8.all_gather = true: backward multiplies by the columns of a weight, and"
            f' float8.recipe = "{float8.recipe}"'
        )
        raise ConfigError(
            f'{wrong} has scales of its rows; use recipe = "tensorwise" or all_gather = false'
        )
    for name in float8.filter_fqns:
        if not any(is_filtered(fqn, [name]) for fqn in sizes):
            wrong = (
                f'float8.filter_fqns: "{name}" is no part of the name of a linear layer in a block'
            )
            raise ConfigError(
                f'{wrong}; use such as "attention.wk" or "layers.0" (embedding and output never are'
                " in float8)"
            )
    left = [fqn for fqn in sizes if not is_filtered(fqn, float8.filter_fqns)]
    if not left:
        raise ConfigError(
            "float8.enable = true: float8.filter_fqns leaves no layer to compute in float8; use"
            " false"
        )
    need = f"and dimensions of float8 products are multiples of {MULTIPLE}"
    if tokens % MULTIPLE:
        wrong = f"float8.enable = true: a microbatch has {tokens} tokens on a rank, {need}"
        raise ConfigError(f"{wrong}; use another training.seq_len or training.local_batch_size")
    for fqn in left:
        rows, columns = sizes[fqn]
        if rows % MULTIPLE or columns % MULTIPLE:
            wrong = (
                f"float8.enable = true: {fqn}.weight is {rows:g} x {columns:g} on a rank, {need}"
            )
            raise ConfigError(
                f'{wrong}; use float8.filter_fqns = ["{fqn.split(".", 2)[2]}"] or a lower'
                " tensor_parallel_degree"
            )


def is_filtered(fqn: str, filter_fqns: Sequence[str]) -> bool:
    """Return True if a name is a part of `fqn`: "attention.wk" of "layers.3.attention.wk"."""
    return any(f".{name}." in f".{fqn}." for name in filter_fqns)


class _Factor(NamedTuple):
    """A matrix in float8. Its value is data * inverse."""

    data: Tensor
    inverse: Tensor  # scalar, or (rows, 1) or (1, columns)

    def t(self) -> "_Factor":
        return _Factor(self.data.t(), self.inverse.t())

    def copy(self) -> "_Factor":
        """Return the same matrix with its columns in consecutive memory, as a second factor needs
        it.
        """
        return _Factor(self.data.t().contiguous().t(), self.inverse)


class _Product(torch.autograd.Function):
    """x (..., K) @ weight (N, K) transposed -> (..., N).

    Forward saves x and the weight as they are given, and backward casts again: so resharding
    recognises a gathered weight.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        x_scale: Tensor | None,
        x_gradient: Tensor | None,
        weight: Tensor,
        weight_scale: Tensor | None,
        weight_gradient: Tensor | None,
        recipe: str,
        moves: tuple[Callable, Callable] | None,
    ) -> Tensor:
        ctx.save_for_backward(x, x_scale, weight, weight_scale)
        ctx.recipe, ctx.moves, ctx.dtype = (
            recipe,
            moves,
            (x if x_gradient is None else x_gradient).dtype,
        )
        rows, columns = (
            _factor(*each, recipe) for each in ((x.flatten(0, -2), x_scale), (weight, weight_scale))
        )
        out = _multiply(rows, columns.t(), ctx.dtype, fast_accum=True).unflatten(0, x.shape[:-1])
        return moves[0](out) if moves else out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, x_scale, weight, weight_scale = ctx.saved_tensors
        recipe, dtype, shape = ctx.recipe, ctx.dtype, x.shape
        moved = ctx.moves[1](grad) if ctx.moves else Scaled(grad)
        x, grad = x.flatten(0, -2), moved.data.flatten(0, -2)
        high = recipe == "rowwise_with_gw_hp"
        rows = _factor(grad, moved.scale, recipe, E5M2 if recipe == "tensorwise" else E4M3)
        dx = _multiply(
            rows, _factor(weight, weight_scale, recipe, dim=None if high else 0).copy(), dtype
        )
        if high:
            dw = grad.t() @ x
        else:
            columns = rows if recipe == "tensorwise" else _factor(grad, None, recipe, dim=0)
            dw = _multiply(columns.copy().t(), _factor(x, x_scale, recipe, dim=0).copy(), dtype)
        dx = dx.unflatten(0, shape[:-1])
        of_x = (None, None, dx) if x.dtype == torch.uint8 else (dx, None, None)
        of_weight = (None, None, dw) if weight.dtype == torch.uint8 else (dw, None, None)
        return *of_x, *of_weight, None, None


def _factor(
    x: Tensor, scale: Tensor | None, recipe: str, dtype: torch.dtype = E4M3, dim: int | None = -1
) -> _Factor:
    """Return a matrix in float8.

    scale: given; else of the matrix (tensorwise or dim None), or of its vectors along `dim`.
    """
    if x.dtype == torch.uint8:
        assert scale is not None
        return _Factor(x.view(dtype), scale.reciprocal())
    if scale is None:
        amax = (
            x.abs().amax()
            if recipe == "tensorwise" or dim is None
            else x.abs().amax(dim, keepdim=True)
        )
        scale = scale_of(amax, dtype, power_of_two=recipe != "tensorwise")
    return _Factor(cast(x, scale, dtype), scale.reciprocal())


def _multiply(a: _Factor, b: _Factor, dtype: torch.dtype, *, fast_accum: bool = False) -> Tensor:
    """Return a (M, K) @ b (K, N) in `dtype`.

    fast_accum: sum in fewer bits on GPUs, as torchao does in forward alone.

    GPUs have a fast kernel for scales of rows only with fast_accum. Otherwise the result is scaled,
    exactly by powers of two.
    """
    by_rows = a.inverse.dim() or b.inverse.dim()
    if fast_accum or not by_rows:
        return torch._scaled_mm(
            a.data, b.data, a.inverse, b.inverse, out_dtype=dtype, use_fast_accum=fast_accum
        )
    ones = torch.ones((), device=a.data.device)
    out = torch._scaled_mm(a.data, b.data, ones, ones, out_dtype=dtype)
    return out * a.inverse.to(dtype) * b.inverse.to(dtype)
