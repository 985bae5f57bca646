"""Muon on ranks: every layout takes the steps of one process, and no rank computes what another does."""

from unittest import mock

import pytest
import torch
from parity import build, make_mesh
from ranks import run_ranks
from tiny import HEADS, TIED
from torch.distributed.tensor import DTensor

from titan_lite.config import Optimizer
from titan_lite.distributed.simple_fsdp import as_shard_of, shard_of
from titan_lite.models.llama3 import Transformer
from titan_lite.optimizer import muon
from titan_lite.optimizer.build import build_optimizer, optimizer_state, set_learning_rate
from titan_lite.optimizer.state import is_matrix


def updated(model, ns_dtype, dtype):
    """({name: whole tensor} of parameters and state after ten steps with the gradients of one process, shapes computed here)."""
    parameters = {fqn: torch.nn.Parameter(parameter.detach().to(dtype)) for fqn, parameter in model.named_parameters()}
    state_dtype = str(dtype).removeprefix("torch.")
    optimizer = build_optimizer(Optimizer("Muon", lr=0.02, ns_dtype=ns_dtype, state_dtype=state_dtype), parameters, seed=7)
    generator, computed = torch.Generator().manual_seed(0), []

    def counting(matrix, steps):
        computed.append(tuple(matrix.shape))
        return orthogonalize(matrix, steps)

    orthogonalize = muon.orthogonalize
    with mock.patch.object(muon, "orthogonalize", counting):
        for step in range(1, 11):
            for parameter in parameters.values():
                gradient = torch.randn(parameter.shape, generator=generator).to(dtype)
                if isinstance(parameter, DTensor):
                    rows, offset = shard_of(parameter.detach())
                    own = tuple(slice(start, start + size) for start, size in zip(offset, rows.shape, strict=True))
                    gradient = as_shard_of(parameter, gradient[own].contiguous())
                parameter.grad = gradient
            set_learning_rate(optimizer, 0.02 / step)
            optimizer.step(torch.tensor(float(step == 3)))  # the third is skipped
    tensors = {**parameters, **optimizer_state(optimizer, parameters)}
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).detach() for name, t in tensors.items()}, computed


def on_ranks(config, layout, *how):
    return updated(build(config, make_mesh(*layout)), *how)


LAYOUTS = [(1, 2, 1), (1, 2, 2), *(pytest.param(each, marks=pytest.mark.slow) for each in ((2, 1, 1), (1, 1, 2), (1, 4, 1)))]
LAYOUTS += [pytest.param((2, 2, 1), marks=pytest.mark.slow)]
NAMES = ["FSDP", "FSDP x TP", "DDP", "TP", "FSDP of 4", "HSDP"]


@pytest.mark.parametrize("layout", LAYOUTS, ids=NAMES)
@pytest.mark.parametrize(("ns_dtype", "dtype"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_every_layout_takes_the_steps_of_one_process_and_shares_the_work(layout, ns_dtype, dtype):
    config = TIED if layout == (1, 2, 1) else HEADS  # four ranks have 30 rows unevenly
    model = Transformer(config)
    model.init_weights(0)
    expected, every = updated(model, ns_dtype, dtype)
    matrices = [fqn for fqn, _ in model.named_parameters() if is_matrix(fqn)]
    assert len(every) == 10 * len(matrices) == 140
    ranks = run_ranks(layout[0] * layout[1] * layout[2], on_ranks, config, layout, ns_dtype, dtype)
    for found, _ in ranks:
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            if dtype == torch.float32:
                torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=0)
            else:  # bits may differ, since a shard's end is not vectorized, and then a value rounds the other way
                assert (found[name] - tensor).float().norm() <= 1e-2 * tensor.float().norm(), name
    assert sorted(shape for _, computed in ranks for shape in computed) == sorted(every)
    assert all(computed for _, computed in ranks)
