"""Stochastic rounding on ranks: every layout rounds every parameter and moment like one process, to the bit."""

import functools

import pytest
import torch
from parity import build, make_mesh
from ranks import run_ranks
from tiny import HEADS, TIED
from torch.distributed.tensor import DTensor

from titan_lite.compiler.stage import compile_function
from titan_lite.config import Compile, Optimizer
from titan_lite.distributed.simple_fsdp import as_shard_of, shard_of
from titan_lite.models.llama3 import Transformer
from titan_lite.optimizer.build import build_optimizer, optimizer_state, set_learning_rate

AOT = functools.partial(
    compile_function, config=Compile(enable=True, backend="aot_eager"), component="optimizer"
)


def updated(model, dtype, state_dtype, compile=None):
    """{name: whole tensor} of parameters and moments after four steps, with the gradients of one process."""
    parameters = {
        fqn: torch.nn.Parameter(parameter.detach().to(dtype))
        for fqn, parameter in model.named_parameters()
    }
    config = Optimizer(lr=0.02, beta2=0.99, state_dtype=state_dtype)
    optimizer = build_optimizer(config, parameters, seed=7, compile=compile)
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 5):
        for parameter in parameters.values():
            gradient = torch.randn(parameter.shape, generator=generator).to(dtype)
            if isinstance(parameter, DTensor):
                rows, offset = shard_of(parameter.detach())
                own = tuple(
                    slice(start, start + size)
                    for start, size in zip(offset, rows.shape, strict=True)
                )
                gradient = as_shard_of(parameter, gradient[own].contiguous())
            parameter.grad = gradient
        set_learning_rate(optimizer, 0.02 / step)
        optimizer.step(torch.tensor(float(step == 3)))  # the third is skipped
    tensors = {**parameters, **optimizer_state(optimizer, parameters)}
    assert {tensor.dtype for name, tensor in tensors.items() if "exp_avg" in name} == {
        getattr(torch, state_dtype)
    }
    return {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).detach()
        for name, t in tensors.items()
    }


def one_process(config, *how):
    model = Transformer(config)
    model.init_weights(0)
    return updated(model, *how)


def on_ranks(config, layout, dtype, state_dtype):
    torch._dynamo.reset()
    return [
        updated(build(config, make_mesh(*layout)), dtype, state_dtype, compile)
        for compile in (None, AOT)
    ]


LAYOUTS = [(1, 2, 1), (2, 1, 1), (1, 1, 2), (1, 4, 1), (2, 2, 1), (1, 2, 2)]


@pytest.mark.parametrize(
    "layout", LAYOUTS, ids=["FSDP", "DDP", "TP", "FSDP of 4", "HSDP", "FSDP x TP"]
)
def test_every_layout_rounds_like_one_process(layout):
    how = (torch.bfloat16, "bfloat16")
    config = TIED if layout == (1, 2, 1) else HEADS
    expected = one_process(config, *how)
    assert any(
        tensor.shape[:1] == (61,) for tensor in expected.values()
    )  # rows that no layout divides evenly
    for rank in run_ranks(layout[0] * layout[1] * layout[2], on_ranks, config, layout, *how):
        for found in rank:
            assert found.keys() == expected.keys()
            for name, tensor in expected.items():
                assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    ("dtype", "state"), [(torch.float32, "bfloat16"), (torch.bfloat16, "float32")]
)
def test_parameters_or_moments_alone_are_rounded_alike(dtype, state):
    expected = one_process(HEADS, dtype, state)
    for rank in run_ranks(2, on_ranks, HEADS, (1, 2, 1), dtype, state):
        for found in rank:
            for name, tensor in expected.items():
                assert torch.equal(found[name], tensor), name
