"""Float8 matmuls: equal to torchao's to the bit, and near the matmuls of the numbers that they
round.
"""

import inspect
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

from titan_lite.distributed.param_collectives import stand_in
from titan_lite.features.float8.linear import (
    E4M3,
    E5M2,
    Float8Linear,
    Scaled,
    apply_float8,
    cast,
    multiply_in_float32_on_cpus,
    scale_of,
    to_bytes,
)

RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]


class Blocks(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        layer = nn.Linear(64, 48, bias=False, dtype=dtype)
        layer.weight = nn.Parameter(torch.randn(48, 64, generator=generator).to(dtype))
        self.layers = nn.ModuleDict({"0": nn.ModuleDict({"wq": layer})})
        self.output = nn.Linear(64, 16, bias=False, dtype=dtype)

    @property
    def layer(self):
        return self.layers["0"]["wq"]


def inputs(dtype):
    """x (B, T, K) and a gradient of the result (B, T, N), with rows of different sizes."""
    generator = torch.Generator().manual_seed(1)
    sizes = torch.logspace(-3, 3, 16)[:, None]
    return (sizes * torch.randn(2, 16, 64, generator=generator)).to(dtype), torch.randn(
        2, 16, 48, generator=generator
    ).to(dtype)


def results(layer, x, gradient):
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(gradient)
    return y.detach(), x.grad, layer.weight.grad


@pytest.mark.parametrize("recipe", RECIPES)
def test_matmuls_are_torchaos_to_the_bit(recipe):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torchao = pytest.importorskip("torchao.float8")
    ours, theirs = Blocks(torch.bfloat16), Blocks(torch.bfloat16)
    apply_float8(ours, recipe)
    torchao.convert_to_float8_training(
        theirs.layers, config=torchao.Float8LinearConfig.from_recipe_name(recipe)
    )
    assert type(theirs.layer).__name__ == "Float8Linear"
    for mine, other in zip(
        results(ours.layer, *inputs(torch.bfloat16)),
        results(theirs.layer, *inputs(torch.bfloat16)),
        strict=True,
    ):
        assert torch.equal(mine, other)


def matmuls():
    """Matmuls of torch._scaled_mm with scales of tensors and of rows, on matrices with which each
    kernel is done at once.
    """
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(32, 64, generator=generator) for _ in range(2))
    whole = (torch.tensor(0.37), torch.tensor(1.7))
    rows = tuple(torch.rand(shape, generator=generator) for shape in ((32, 1), (1, 32)))
    found = []
    for kind in (torch.float8_e4m3fn, torch.float8_e5m2):
        left, right = a.to(kind), b.to(torch.float8_e4m3fn).t()
        for scales in (whole, rows) if torch.__version__ >= "2.13" else (whole,):
            for dtype in (torch.bfloat16, torch.float32):
                found.append(torch._scaled_mm(left, right, *scales, out_dtype=dtype))
    return found


def test_matmuls_on_cpus_are_those_of_torchs_kernel(tmp_path):
    """Torch's own in a process of its own, where nothing has replaced it."""
    source = f"import torch\n\n\n{inspect.getsource(matmuls)}\n\n"
    source += f"torch.save(matmuls(), {str(tmp_path / 'torch.pt')!r})\n"
    subprocess.run([sys.executable, "-c", source], check=True)
    multiply_in_float32_on_cpus()
    theirs = torch.load(tmp_path / "torch.pt")
    assert len(theirs) in (4, 8)  # torch 2.11 has no scales of rows on CPUs
    for mine, other in zip(matmuls(), theirs, strict=True):
        assert mine.dtype == other.dtype
        close = dict(rtol=2**-7 if mine.dtype == torch.bfloat16 else 1e-5, atol=1e-5)
        torch.testing.assert_close(mine, other, **close)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_the_largest_number_is_the_largest_of_float8(dtype):
    x = torch.tensor([-3.0, 0.1, 1.0])
    most = torch.finfo(dtype).max
    assert cast(x, scale_of(x.abs().amax(), dtype), dtype).float()[0] == -most
    assert cast(x, torch.tensor(1e30), dtype).float().tolist() == [-most, most, most]
    scale = scale_of(x.abs().amax(), dtype, power_of_two=True)
    assert scale.log2() == scale.log2().floor()
    assert most / 2 < 3 * scale <= most
    assert torch.isfinite(scale_of(torch.zeros(()), dtype))


def test_factors_may_be_cast_before():
    """A weight and an input in float8: the same result, and gradients at what stands for them."""
    model = Blocks(torch.bfloat16)
    apply_float8(model, "tensorwise")
    x, gradient = inputs(torch.bfloat16)
    expected = results(model.layer, x, gradient)

    def given(tensor):
        scale = scale_of(tensor.abs().amax())
        data = to_bytes(tensor, scale)
        return Scaled(data, scale, stand_in(data, tensor.dtype).requires_grad_())

    given_x, given_weight = given(x), given(model.layer.weight.detach())
    assert given_weight.data.nbytes * 2 == model.layer.weight.nbytes
    assert given_weight.gradient.untyped_storage().nbytes() == 2
    del model.layer._parameters["weight"]
    model.layer.weight = given_weight
    y = model.layer(given_x)
    y.backward(gradient)
    for mine, other in zip(
        (y.detach(), given_x.gradient.grad, given_weight.gradient.grad), expected, strict=True
    ):
        assert torch.equal(mine, other)


def test_filtered_layers_stay():
    model = Blocks(torch.float32)
    apply_float8(model, "rowwise", ("w", "layers.1", "wq"))
    assert type(model.layer) is nn.Linear
    apply_float8(model, "rowwise", ("w", "layers.1"))
    assert type(model.layer) is Float8Linear
