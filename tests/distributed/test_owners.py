"""Muon and Shampoo on ranks: every layout takes the steps of one process, and no rank computes what
another does.
"""

import math

import pytest
import torch
from parity import build, make_mesh
from ranks import run_ranks
from tiny import HEADS, TIED
from torch.distributed.tensor import DTensor

from titan_lite.config import Config, Optimizer
from titan_lite.dtensor import as_shard_of, shard_of
from titan_lite.models.fqns import is_matrix
from titan_lite.models.transformer import Transformer
from titan_lite.optim.build import build_optimizer

MUON, SHAMPOO = (
    Optimizer(name="Muon", ns_dtype="float32"),
    Optimizer(name="Shampoo", precondition_frequency=3),
)
SHAMPOO = SHAMPOO.replace(max_preconditioner_dim=16, start_preconditioning_step=2)

OF_OWNERS = {  # tensors that one rank has
    "Muon": (),
    "Shampoo": ("exp_avg", "exp_avg_sq", "factor_matrices", "inv_factor_matrices"),
}


def updated(model, config):
    """({name: whole tensor} of parameters and state after ten steps with the gradients of one
    process, matrices updated here).
    """
    parameters = {
        fqn: torch.nn.Parameter(parameter.detach()) for fqn, parameter in model.named_parameters()
    }
    optimizer = build_optimizer(Config(optimizer=config), parameters)
    generator, computed = torch.Generator().manual_seed(0), []

    def counting(number, whole):
        computed.append(number)
        return owner_update(number, whole)

    _, of_matrices = optimizer.optimizers
    owner_update, of_matrices.owner_update = of_matrices.owner_update, counting
    for step in range(1, 11):
        for parameter in parameters.values():
            gradient = torch.randn(parameter.shape, generator=generator)
            if isinstance(parameter, DTensor):
                rows, offset = shard_of(parameter.detach())
                own = tuple(
                    slice(start, start + size)
                    for start, size in zip(offset, rows.shape, strict=True)
                )
                gradient = as_shard_of(parameter, gradient[own].contiguous())
            parameter.grad = gradient
        optimizer.set_lr(0.02 / step)
        optimizer.step(torch.tensor(float(step == 3)))  # the third is skipped
    tensors = {**parameters, **optimizer.state_tensors()}
    return {name: whole(tensor).detach() for name, tensor in tensors.items()}, computed


def whole(tensor):
    """The whole of a tensor, which this rank may have alone."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to_local() if tensor.device_mesh.size() == 1 else tensor.full_tensor()


def on_ranks(config, layout):
    return [updated(build(config, make_mesh(*layout)).model, optimizer) for optimizer, _ in CASES]


# (optimizer, tolerance of a tensor by its norm; 0: it differs by the rounding of float32 alone)
CASES = [(MUON, 0.0), (MUON.replace(ns_dtype="bfloat16"), 1e-2), (SHAMPOO, 0.0)]
LAYOUTS = [
    (1, 2, 1),
    (1, 2, 2),
    pytest.param((1, 4, 1), marks=pytest.mark.release),
    pytest.param((2, 2, 1), marks=pytest.mark.release),
]
NAMES = ["FSDP", "FSDP x TP", "FSDP of 4", "HSDP"]


@pytest.mark.parametrize("layout", LAYOUTS, ids=NAMES)
def test_every_layout_takes_the_steps_of_one_process_and_shares_the_work(layout):
    config = TIED if layout == (1, 2, 1) else HEADS  # four ranks have 30 rows unevenly
    ranks = run_ranks(math.prod(layout), on_ranks, config, layout)
    for number, (optimizer, tolerance) in enumerate(CASES):
        model = Transformer(config)
        model.init_weights(0)
        expected, every = updated(model, optimizer)
        matrices = [fqn for fqn, _ in model.named_parameters() if is_matrix(fqn)]
        # Shampoo computes nothing in a skipped step
        assert len(every) == (10 if optimizer.name == "Muon" else 9) * len(matrices)
        found = [rank[number] for rank in ranks]
        check(found, expected, every, matrices, optimizer, tolerance)


def check(ranks, expected, every, matrices, optimizer, tolerance):
    """ranks: (whole tensors, numbers of the matrices that it computed) of each rank."""
    for found, _ in ranks:
        for name, tensor in found.items():
            if not tolerance:
                torch.testing.assert_close(tensor, expected[name], atol=1e-5, rtol=0)
            else:
                assert (tensor - expected[name]).norm() <= tolerance * expected[name].norm(), name
    kept = {f"{fqn}.{name}" for fqn in matrices for name in OF_OWNERS[optimizer.name]}
    # one rank has it
    assert sorted(name for found, _ in ranks for name in kept & found.keys()) == sorted(kept)
    assert all(found.keys() - kept == expected.keys() - kept for found, _ in ranks)
    assert sorted(number for _, computed in ranks for number in computed) == sorted(every)
    assert all(computed for _, computed in ranks)
