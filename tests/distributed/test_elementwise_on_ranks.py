"""An elementwise optimizer on ranks: FSDP takes the steps of one process to the bit."""

import torch
from parity import build, make_mesh
from ranks import run_ranks
from tiny import TIED
from torch.distributed.tensor import DTensor

from titan_lite.config import Config, Optimizer
from titan_lite.dtensor import as_shard_of, shard_of
from titan_lite.models.transformer import Transformer
from titan_lite.optim.build import build_optimizer

LION = Optimizer(name="Lion", weight_decay=0.5)


def after_five_steps(model):
    """{name: full tensor} of parameters and state, with the gradients of one process."""
    parameters = {
        fqn: torch.nn.Parameter(parameter.detach().clone())
        for fqn, parameter in model.named_parameters()
    }
    optimizer = build_optimizer(Config(optimizer=LION), parameters)
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 6):
        for parameter in parameters.values():
            gradient = torch.randn(parameter.shape, generator=generator)
            if isinstance(parameter, DTensor):
                shard, offset = shard_of(parameter.detach())
                own = tuple(
                    slice(start, start + size)
                    for start, size in zip(offset, shard.shape, strict=True)
                )
                gradient = as_shard_of(parameter, gradient[own].contiguous())
            parameter.grad = gradient
        optimizer.set_lr(0.02 / step)
        optimizer.step(torch.tensor(float(step == 3)))  # the third is skipped
    tensors = {**parameters, **optimizer.state_tensors()}
    return {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in tensors.items()
    }


def on_ranks():
    return after_five_steps(build(TIED, make_mesh(1, 2, 1)).model)


def test_two_ranks_take_the_steps_of_one_process():
    model = Transformer(TIED)
    model.init_weights(0)
    expected = after_five_steps(model)
    assert not torch.equal(expected["norm.weight"], model.norm.weight)
    for found in run_ranks(2, on_ranks):
        assert found.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
