"""Muon: the steps of torch.optim.Muon, what AdamW keeps, and how owners share the matrices. A skipped
step, and state that goes on where it was, are in tests/unit/optim/test_elementwise.py.
"""

import numpy as np
import pytest
import torch
from tiny import UNTIED
from torch import nn

from titan_lite.config import Config, ConfigError, Optimizer
from titan_lite.config.families import LLAMA3
from titan_lite.features.matrix_optimizers.muon import (
    COEFFICIENTS,
    newton_schulz_flops,
    orthogonalize,
)
from titan_lite.models.fqns import is_matrix
from titan_lite.models.transformer import Transformer
from titan_lite.optim.build import build_optimizer
from titan_lite.sharding import share_out

MUON = Optimizer(name="Muon", lr=0.02, beta2=0.9, weight_decay=0.5, momentum=0.8)


def build(config=MUON, **how):
    model = Transformer(UNTIED)
    model.init_weights(0)
    parameters = dict(model.named_parameters())
    return parameters, build_optimizer(Config(optimizer=config), parameters, **how)


def set_gradients(parameters, step):
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def take_steps(parameters, optimizer, steps=range(1, 6)):
    for step in steps:
        set_gradients(parameters, step)
        optimizer.set_lr(0.02 / step)
        optimizer.step()


@pytest.mark.parametrize("nesterov", [True, False])
def test_steps_are_those_of_torchs_muon_to_the_bit_and_of_adamw(nesterov):
    parameters, optimizer = build(Optimizer(**{**vars(MUON), "nesterov": nesterov}))
    take_steps(parameters, optimizer)
    expected, adamw = build(Optimizer(**{**vars(MUON), "name": "AdamW"}))
    matrices = {fqn: parameter for fqn, parameter in expected.items() if is_matrix(fqn)}
    same = dict(weight_decay=0.5, momentum=0.8, nesterov=nesterov, adjust_lr_fn="match_rms_adamw")
    oracle = torch.optim.Muon(list(matrices.values()), **same)
    copies = {fqn: matrix.detach().clone() for fqn, matrix in matrices.items()}
    for step in range(1, 6):
        set_gradients(expected, step)
        oracle.param_groups[0]["lr"] = 0.02 / step
        adamw.set_lr(0.02 / step)
        oracle.step()
        for matrix in matrices.values():
            matrix.grad = None
        adamw.step()
    for fqn, parameter in parameters.items():
        assert torch.equal(parameter, expected[fqn]), fqn
        assert fqn not in copies or not torch.equal(parameter, copies[fqn]), fqn


def test_gradients_of_both_are_dropped():
    parameters, optimizer = build()
    set_gradients(parameters, 1)
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in parameters.values())


@pytest.mark.parametrize("name", ["Muon", "Shampoo"])
def test_a_matrix_that_no_forward_uses_is_named(name):
    parameters, optimizer = build(Optimizer(name=name))
    set_gradients(parameters, 1)
    parameters["layers.1.attention.wk.weight"].grad = None
    with pytest.raises(ConfigError, match=r"layers\.1\.attention\.wk\.weight has no gradient"):
        optimizer.step()


@pytest.mark.parametrize("shape", [(40, 24), (24, 40), (30, 30)])
def test_the_iteration_is_its_polynomial_of_the_singular_values(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    u, singular, v = np.linalg.svd(matrix.double().numpy(), full_matrices=False)
    singular /= np.linalg.norm(singular)
    a, b, c = COEFFICIENTS
    for _ in range(5):
        singular = a * singular + b * singular**3 + c * singular**5
    expected = torch.from_numpy((u * singular) @ v)
    torch.testing.assert_close(orthogonalize(matrix, 5).double(), expected, atol=2e-5, rtol=0)
    rounded = orthogonalize(matrix.bfloat16(), 5)
    assert rounded.dtype == torch.bfloat16
    assert (rounded.double() - expected).norm() < 0.03 * expected.norm()


# Owners


@pytest.mark.parametrize(("ranks", "most"), [(1, 1.0), (8, 1.01), (32, 1.02), (64, 1.06)])
def test_owners_of_the_matrices_of_8b_have_alike_work(ranks, most):
    with torch.device("meta"):
        model = Transformer(LLAMA3.flavors["8B"])
    shapes = [
        tuple(parameter.shape) for fqn, parameter in model.named_parameters() if is_matrix(fqn)
    ]
    assert len(shapes) == 32 * 7
    costs = [newton_schulz_flops(shape) for shape in shapes]
    buckets = share_out(costs, ranks)
    assert sorted(number for bucket in buckets for number in bucket.values()) == list(
        range(len(shapes))
    )
    loads = [
        sum(costs[bucket[rank]] for bucket in buckets if rank in bucket) for rank in range(ranks)
    ]
    assert max(loads) <= most * sum(loads) / ranks
    for bucket in buckets[:1]:
        assert {shapes[number] for number in bucket.values()} <= {(14336, 4096), (4096, 14336)}


def test_more_ranks_than_matrices_leave_some_without():
    assert share_out([1.0, 3.0, 2.0], 5) == [{0: 1, 1: 2, 2: 0}]


# Experts


def test_each_experts_matrix_moves_by_itself_as_one_of_a_dense_model():
    """By its own norm: that of one does not depend on how large the gradients of others are."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(3, 24, 16, generator=generator)
    config = Optimizer(name="Muon", ns_dtype="float32")
    experts = nn.Parameter(start.clone())
    fqn = "layers.0.moe.experts.w1"
    optimizer = build_optimizer(
        Config(optimizer=config), {fqn: experts, "norm.weight": nn.Parameter(torch.ones(4))}
    )
    alone = [nn.Parameter(matrix.clone()) for matrix in start]
    names = [f"layers.{number}.feed_forward.w1.weight" for number in range(3)]
    dense = build_optimizer(
        Config(optimizer=config),
        {**dict(zip(names, alone, strict=True)), "norm.weight": nn.Parameter(torch.ones(4))},
    )
    for _ in range(3):
        gradients = torch.randn(3, 24, 16, generator=generator)
        gradients[1] *= 1e4
        gradients[2] = 0
        experts.grad = gradients
        for parameter, gradient in zip(alone, gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
        dense.step()
    assert optimizer.state_of(experts).keys() == {"step", "momentum_buffer"}
    assert not torch.equal(experts.detach(), start)
    for matrix, expected in zip(experts.detach(), alone, strict=True):
        torch.testing.assert_close(matrix, expected.detach(), rtol=1e-5, atol=1e-6)


def test_a_router_is_adamws():
    fqn = "layers.0.moe.router.weight"
    assert not is_matrix(fqn)
    router = nn.Parameter(torch.randn(4, 8))
    optimizer = build_optimizer(Config(optimizer=Optimizer(name="Muon")), {fqn: router})
    assert optimizer.state_of(router).keys() == {"step", "exp_avg", "exp_avg_sq"}
