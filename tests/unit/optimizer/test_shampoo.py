"""Shampoo: its equations in float64, what AdamW keeps, blocks, a skipped step, and state that goes on where it was."""

import dataclasses

import numpy as np
import pytest
import torch
from test_muon import set_gradients
from tiny import UNTIED

from titan_lite.config import Optimizer
from titan_lite.models.llama3 import Transformer
from titan_lite.optimizer.build import build_optimizer, optimizer_state, set_learning_rate
from titan_lite.optimizer.shampoo import inverse_fourth_root
from titan_lite.optimizer.state import OF_MATRIX, blocks_of, is_matrix

SHAMPOO = Optimizer("Shampoo", lr=0.02, beta2=0.9, weight_decay=0.5)
SHAMPOO = dataclasses.replace(SHAMPOO, max_preconditioner_dim=16, precondition_frequency=2, start_preconditioning_step=2)


def build(config=SHAMPOO, dtype=torch.float32):
    model = Transformer(UNTIED)
    model.init_weights(0)
    model.to(dtype)
    parameters = dict(model.named_parameters())
    return parameters, build_optimizer(config, parameters, seed=0)


def take_steps(parameters, optimizer, steps=range(1, 6)):
    for step in steps:
        set_gradients(parameters, step)
        set_learning_rate(optimizer, 0.02 / step)
        optimizer.step()


def root_of(factor, eps):
    """The inverse fourth root by singular values, which a positive matrix has in place of eigenvalues."""
    u, values, _ = np.linalg.svd(factor)
    return u @ np.diag((values + eps * values.max()) ** -0.25) @ u.T


def equations(weight, gradients, config):
    """The matrix after steps with these gradients, in float64, written out from the paper."""
    rows, columns = ([(at, min(at + 16, size)) for at in range(0, size, 16)] for size in weight.shape)
    places = [(slice(*a), slice(*b)) for a in rows for b in columns]
    mean, square = np.zeros_like(weight), np.zeros_like(weight)
    left, right, roots = ([0.0] * len(places) for _ in range(3))
    for step, gradient in enumerate(gradients, 1):
        mean = config.beta1 * mean + (1 - config.beta1) * gradient
        square = config.beta2 * square + (1 - config.beta2) * gradient**2
        change = mean / (1 - config.beta1**step) / (np.sqrt(square / (1 - config.beta2**step)) + config.eps)
        preconditioned = np.zeros_like(weight)
        for n, place in enumerate(places):
            block, correction = gradient[place], 1 - config.beta2**step
            left[n] = config.beta2 * left[n] + (1 - config.beta2) * block @ block.T
            right[n] = config.beta2 * right[n] + (1 - config.beta2) * block.T @ block
            if step in (2, 4, 6, 8):
                roots[n] = [root_of(each[n] / correction, config.preconditioner_eps) for each in (left, right)]
            if step >= 2:
                preconditioned[place] = roots[n][0] @ (mean[place] / (1 - config.beta1**step)) @ roots[n][1]
        if step >= 2:
            change = preconditioned * np.sqrt((change**2).sum() / (preconditioned**2).sum())
        weight = weight - 0.02 / step * (config.weight_decay * weight + change)
    return weight


@pytest.mark.parametrize(("shape", "eps"), [((40, 24), 1e-6), ((7, 5), 1e-5), ((16, 33), 1e-3)])
def test_steps_are_those_of_the_equations(shape, eps):
    """A block of one column has too few gradients for a factor of full rank: rounding there is small beside a larger eps."""
    config = dataclasses.replace(SHAMPOO, preconditioner_eps=eps)
    generator = torch.Generator().manual_seed(1)
    start, *gradients = (torch.randn(shape, generator=generator) for _ in range(8))
    weight = torch.nn.Parameter(start.clone())
    norm = torch.nn.Parameter(torch.ones(3))
    optimizer = build_optimizer(config, {"layers.0.attention.wq.weight": weight, "norm.weight": norm}, seed=0)
    for step, gradient in enumerate(gradients, 1):
        weight.grad, norm.grad = gradient.clone(), torch.ones(3)
        set_learning_rate(optimizer, 0.02 / step)
        optimizer.step()
    expected = equations(start.double().numpy(), [gradient.double().numpy() for gradient in gradients], config)
    np.testing.assert_allclose(weight.detach().double().numpy(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("seen", [3, 60])
def test_a_root_is_that_of_the_damped_matrix(seen):
    """Of fewer gradients than rows, most eigenvalues are zero."""
    gradients = torch.randn(40, seen, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    factor = gradients @ gradients.T
    root = inverse_fourth_root(factor, 1e-6)
    damped = factor + 1e-6 * torch.linalg.matrix_norm(factor, 2) * torch.eye(40, dtype=torch.float64)
    torch.testing.assert_close(torch.linalg.matrix_power(root, 4) @ damped, torch.eye(40, dtype=torch.float64), atol=1e-8, rtol=0)


def test_embedding_output_and_norms_have_the_steps_of_adamw_and_so_have_matrices_before_the_start():
    parameters, optimizer = build(dataclasses.replace(SHAMPOO, start_preconditioning_step=4))
    expected, adamw = build(dataclasses.replace(SHAMPOO, name="AdamW"))
    take_steps(parameters, optimizer, [1, 2, 3])
    take_steps(expected, adamw, [1, 2, 3])
    for fqn, parameter in parameters.items():
        torch.testing.assert_close(parameter, expected[fqn], atol=1e-6, rtol=0)
    take_steps(parameters, optimizer, [4])
    take_steps(expected, adamw, [4])
    for fqn, parameter in parameters.items():
        assert torch.equal(parameter, expected[fqn]) != is_matrix(fqn), fqn


def test_a_gradient_of_zeros_only_decays():
    weight, norm = torch.nn.Parameter(torch.ones(20, 20)), torch.nn.Parameter(torch.ones(3))
    optimizer = build_optimizer(SHAMPOO, {"layers.0.attention.wq.weight": weight, "norm.weight": norm}, seed=0)
    for _ in range(4):
        weight.grad, norm.grad = torch.zeros(20, 20), torch.zeros(3)
        optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full((20, 20), 0.99**4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_skipped_step_changes_nothing(dtype):
    parameters, optimizer = build(dtype=dtype)
    take_steps(parameters, optimizer, [1, 2])
    before = {name: tensor.clone() for name, tensor in (parameters | optimizer_state(optimizer, parameters)).items()}
    set_gradients(parameters, 3, scale=float("nan"))
    optimizer.step(torch.ones(()))
    after = parameters | optimizer_state(optimizer, parameters)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    for step in (3, 4):
        set_gradients(parameters, step)
        optimizer.step(torch.zeros(()))
    assert not any(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("saved", [1, 3, 4])
def test_the_state_is_there_before_the_first_step_and_goes_on_where_it_was(saved):
    parameters, optimizer = build()
    other, resumed = build()
    state = optimizer_state(resumed, other)
    names = {True: OF_MATRIX["Shampoo"].on_owner, False: ("exp_avg", "exp_avg_sq")}
    assert state.keys() == {f"{fqn}.{name}" for fqn in parameters for name in ("step", *names[is_matrix(fqn)])}
    shapes = {fqn: tuple(parameter.shape) for fqn, parameter in parameters.items() if is_matrix(fqn)}
    kept = sum(state[f"{fqn}.{name}"].numel() for fqn in shapes for name in names[True])
    assert kept == sum(OF_MATRIX["Shampoo"].kept(SHAMPOO, shape) for shape in shapes.values())
    take_steps(parameters, optimizer, range(1, saved + 1))
    with torch.no_grad():
        for name, tensor in (parameters | optimizer_state(optimizer, parameters)).items():
            (other | state)[name].copy_(tensor)
    take_steps(parameters, optimizer, range(saved + 1, 7))
    take_steps(other, resumed, range(saved + 1, 7))
    assert all(torch.equal(other[fqn], parameter) for fqn, parameter in parameters.items())


def test_blocks_cover_a_matrix_row_by_row():
    counts = torch.zeros(40, 24)
    for part in blocks_of((40, 24), 16):
        counts[part] += 1
    assert counts.eq(1).all()
    starts = [(part[0].start, part[1].start) for part in blocks_of((40, 24), 16)]
    assert starts == [(0, 0), (0, 16), (16, 0), (16, 16), (32, 0), (32, 16)]
    assert blocks_of((40, 24), 64) == [(slice(0, 40), slice(0, 24))]
