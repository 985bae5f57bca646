"""Lion: the steps of the paper's algorithm, its keys, and what a plan says of it."""

import pytest
import torch
from tiny import UNTIED

from titan_lite.config import Config, Optimizer
from titan_lite.models.transformer import Transformer
from titan_lite.optim.build import build_optimizer

LION = Optimizer(name="Lion", lr=0.02, beta1=0.7, beta2=0.9, weight_decay=0.5)


def test_steps_are_those_of_the_paper():
    """Algorithm 2 of arXiv 2302.06675, in float64."""
    model = Transformer(UNTIED)
    model.init_weights(0)
    parameters = dict(model.named_parameters())
    optimizer = build_optimizer(Config(optimizer=LION), parameters)
    expected = {fqn: parameter.detach().double() for fqn, parameter in parameters.items()}
    m = {fqn: torch.zeros_like(parameter) for fqn, parameter in expected.items()}
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 21):
        lr = 0.02 / step
        optimizer.set_lr(lr)
        for fqn, parameter in parameters.items():
            decay = 0.0 if parameter.dim() == 1 else 0.5
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            g = parameter.grad.double()
            c = 0.7 * m[fqn] + 0.3 * g
            expected[fqn] -= lr * (torch.sign(c) + decay * expected[fqn])
            m[fqn] = 0.9 * m[fqn] + 0.1 * g
        optimizer.step()
    for fqn, parameter in parameters.items():
        torch.testing.assert_close(parameter.double(), expected[fqn], rtol=1e-5, atol=1e-6)
        exp_avg = optimizer.state_of(parameter)["exp_avg"].double()
        torch.testing.assert_close(exp_avg, m[fqn], rtol=1e-5, atol=1e-6)


def test_an_element_without_a_gradient_stays_but_for_its_decay():
    """As the rows of tokens that no batch has had."""
    parameter = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = build_optimizer(Config(optimizer=LION), {"tok_embeddings.weight": parameter})
    parameter.grad = torch.tensor([[0.0, 0.0], [1e-20, -1e-20], [5.0, -5.0]])
    optimizer.step()
    decayed = 1 - 0.02 * 0.5
    moved = [[decayed, decayed], [decayed - 0.02, decayed + 0.02], [decayed - 0.02, decayed + 0.02]]
    assert parameter.tolist() == [pytest.approx(row) for row in moved]
