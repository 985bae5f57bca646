"""Shampoo: its equations in float64, what AdamW keeps, and blocks. A skipped step, and state that
goes on where it was, are in tests/unit/optim/test_elementwise.py.
"""

from unittest import mock

import numpy as np
import pytest
import torch
from test_muon import set_gradients
from tiny import DEBUG, UNTIED

from titan_lite.config import Config, Optimizer, load_config
from titan_lite.config.families import LLAMA3
from titan_lite.distributed.layout import Layout
from titan_lite.features.matrix_optimizers import shampoo
from titan_lite.features.matrix_optimizers.feature import FEATURE
from titan_lite.features.matrix_optimizers.shampoo import (
    inverse_fourth_root,
    sides_of,
    turns_of,
)
from titan_lite.models.fqns import is_matrix
from titan_lite.models.transformer import Transformer
from titan_lite.optim.build import build_optimizer
from titan_lite.sharding import share_out

SHAMPOO = Optimizer(name="Shampoo", lr=0.02, beta2=0.9, weight_decay=0.5)
SHAMPOO = SHAMPOO.replace(
    max_preconditioner_dim=16, precondition_frequency=2, start_preconditioning_step=2
)


def build(config=SHAMPOO):
    model = Transformer(UNTIED)
    model.init_weights(0)
    parameters = dict(model.named_parameters())
    return parameters, build_optimizer(Config(optimizer=config), parameters)


def take_steps(parameters, optimizer, steps=range(1, 6)):
    for step in steps:
        set_gradients(parameters, step)
        optimizer.set_lr(0.02 / step)
        optimizer.step()


def root_of(factor, eps):
    """The inverse fourth root by singular values, which a positive matrix has in place of
    eigenvalues.
    """
    u, values, _ = np.linalg.svd(factor)
    return u @ np.diag((values + eps * values.max()) ** -0.25) @ u.T


def equations(weight, gradients, config, turns):
    """The matrix after steps with these gradients, in float64, written out from the paper.

    turns: of each block's L and R, the rest of the division by 2 of the steps with their roots; the
    second step has them all.
    """
    rows, columns = (
        [(at, min(at + 16, size)) for at in range(0, size, 16)] for size in weight.shape
    )
    places = [(slice(*a), slice(*b)) for a in rows for b in columns]
    mean, square = np.zeros_like(weight), np.zeros_like(weight)
    left, right = ([0.0] * len(places) for _ in range(2))
    roots = [[None, None] for _ in places]
    for step, gradient in enumerate(gradients, 1):
        mean = config.beta1 * mean + (1 - config.beta1) * gradient
        square = config.beta2 * square + (1 - config.beta2) * gradient**2
        change = (
            mean
            / (1 - config.beta1**step)
            / (np.sqrt(square / (1 - config.beta2**step)) + config.eps)
        )
        preconditioned = np.zeros_like(weight)
        for n, place in enumerate(places):
            block, correction = gradient[place], 1 - config.beta2**step
            left[n] = config.beta2 * left[n] + (1 - config.beta2) * block @ block.T
            right[n] = config.beta2 * right[n] + (1 - config.beta2) * block.T @ block
            for side, each in enumerate((left, right)):
                if step == 2 or (step > 2 and step % 2 == turns[2 * n + side]):
                    roots[n][side] = root_of(each[n] / correction, config.preconditioner_eps)
            if step >= 2:
                preconditioned[place] = (
                    roots[n][0] @ (mean[place] / (1 - config.beta1**step)) @ roots[n][1]
                )
        if step >= 2:
            change = preconditioned * np.sqrt((change**2).sum() / (preconditioned**2).sum())
        weight = weight - 0.02 / step * (config.weight_decay * weight + change)
    return weight


@pytest.mark.parametrize(("shape", "eps"), [((40, 24), 1e-6), ((7, 5), 1e-5), ((16, 33), 1e-3)])
def test_steps_are_those_of_the_equations(shape, eps):
    """A block of one column has too few gradients for a factor of full rank: rounding there is
    small beside a larger eps.
    """
    config = SHAMPOO.replace(preconditioner_eps=eps)
    generator = torch.Generator().manual_seed(1)
    start, *gradients = (torch.randn(shape, generator=generator) for _ in range(8))
    weight = torch.nn.Parameter(start.clone())
    norm = torch.nn.Parameter(torch.ones(3))
    optimizer = build_optimizer(
        Config(optimizer=config), {"layers.0.attention.wq.weight": weight, "norm.weight": norm}
    )
    for step, gradient in enumerate(gradients, 1):
        weight.grad, norm.grad = gradient.clone(), torch.ones(3)
        optimizer.set_lr(0.02 / step)
        optimizer.step()
    (turns,) = optimizer.optimizers[1].turns
    assert set(turns) == {0, 1}
    expected = equations(
        start.double().numpy(), [gradient.double().numpy() for gradient in gradients], config, turns
    )
    np.testing.assert_allclose(weight.detach().double().numpy(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("seen", [3, 60])
def test_a_root_is_that_of_the_damped_matrix(seen):
    """Of fewer gradients than rows, most eigenvalues are zero."""
    gradients = torch.randn(
        40, seen, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    factor = gradients @ gradients.T
    root = inverse_fourth_root(factor, 1e-6)
    damped = factor + 1e-6 * torch.linalg.matrix_norm(factor, 2) * torch.eye(
        40, dtype=torch.float64
    )
    torch.testing.assert_close(
        torch.linalg.matrix_power(root, 4) @ damped,
        torch.eye(40, dtype=torch.float64),
        atol=1e-8,
        rtol=0,
    )


def test_verify_has_roots_from_the_first_step_on():
    config = load_config(DEBUG, ["--optimizer.name=Shampoo"])
    checked, without = FEATURE.for_verify(config)
    assert (checked.optimizer.start_preconditioning_step, without) == (1, "")


def test_embedding_output_and_norms_have_the_steps_of_adamw_and_so_have_matrices_before_the_start():
    parameters, optimizer = build(SHAMPOO.replace(start_preconditioning_step=4))
    expected, adamw = build(SHAMPOO.replace(name="AdamW"))
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
    optimizer = build_optimizer(
        Config(optimizer=SHAMPOO), {"layers.0.attention.wq.weight": weight, "norm.weight": norm}
    )
    for _ in range(4):
        weight.grad, norm.grad = torch.zeros(20, 20), torch.zeros(3)
        optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full((20, 20), 0.99**4))


def test_the_state_is_there_before_the_first_step():
    parameters, optimizer = build()
    state = optimizer.state_tensors()
    moments = ("exp_avg", "exp_avg_sq")
    names = {True: (*moments, "factor_matrices", "inv_factor_matrices"), False: moments}
    assert state.keys() == {
        f"{fqn}.{name}" for fqn in parameters for name in ("step", *names[is_matrix(fqn)])
    }
    shapes = {
        fqn: tuple(parameter.shape) for fqn, parameter in parameters.items() if is_matrix(fqn)
    }
    kept = sum(state[f"{fqn}.{name}"].numel() for fqn in shapes for name in names[True])
    assert 4 * kept == sum(
        map(FEATURE.owner_costs(Config(optimizer=SHAMPOO)).kept_bytes, shapes.values())
    )


def computed_roots(parameters, optimizer, step):
    with mock.patch.object(shampoo, "inverse_fourth_root", wraps=inverse_fourth_root) as root:
        take_steps(parameters, optimizer, [step])
    return sorted(len(each.args[0]) for each in root.call_args_list)


def test_every_root_has_one_turn_in_a_period_after_the_step_that_computes_them_all():
    parameters, optimizer = build(SHAMPOO.replace(precondition_frequency=5))
    each = [computed_roots(parameters, optimizer, step) for step in range(1, 13)]
    every = sorted(side for shape in optimizer.optimizers[1].shapes for side in sides_of(shape, 16))
    assert (each[0], each[1]) == ([], every)
    for period in (each[2:7], each[7:12]):
        assert sorted(side for step in period for side in step) == every
        assert max(map(len, period)) < len(every) / 3


@pytest.mark.parametrize(
    ("flavor", "ranks", "most"), [("debug", 2, 1.2), ("8B", 8, 1.05), ("8B", 64, 1.16)]
)
def test_owners_have_alike_roots_in_every_step(flavor, ranks, most):
    """The busiest owner in its busiest step, beside the mean of all."""
    config, model = Optimizer(name="Shampoo"), LLAMA3.flavors[flavor]
    heads = model.dim // model.n_heads * model.n_kv_heads
    of_block = {
        name: (rows, model.dim)
        for name, rows in dict(wq=model.dim, wk=heads, wv=heads, wo=model.dim).items()
    }
    of_block |= dict(
        w1=(model.hidden_dim, model.dim),
        w2=(model.dim, model.hidden_dim),
        w3=(model.hidden_dim, model.dim),
    )
    shapes = {
        f"layers.{number}.{name}.weight": shape
        for number in range(model.n_layers)
        for name, shape in of_block.items()
    }
    work, turns = np.zeros((ranks, config.precondition_frequency)), turns_of(config, shapes)
    costs = FEATURE.owner_costs(Config(optimizer=config))
    for bucket in share_out([costs.flops(shape) for shape in shapes.values()], ranks):
        for owner, number in bucket.items():
            sides = sides_of([*shapes.values()][number], config.max_preconditioner_dim)
            np.add.at(work[owner], turns[number], np.array(sides, dtype=float) ** 3)
    assert 1 < work.max() / work.mean() < most


def test_the_start_says_the_first_step_with_roots():
    options = ["--optimizer.name=Shampoo", "--optimizer.start_preconditioning_step=5"]
    config = load_config(DEBUG, options)
    (line,) = FEATURE.start_lines(config, Layout.from_config(config, 2))
    assert "with roots from step 5 on" in line
