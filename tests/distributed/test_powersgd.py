"""PowerSGD between copies: the sums against numpy in float64, at full rank, with a skipped step,
and on ranks of few rows.
"""

import functools
import math
from contextlib import nullcontext
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from parity import batch, build, make_mesh, my_microbatches, step
from ranks import run_ranks
from tiny import HEADS
from torch import nn

from titan_lite.distributed.mesh import parameter_mesh
from titan_lite.distributed.param_collectives import started_last
from titan_lite.distributed.simple_fsdp import FSDPOptions, apply_simple_fsdp
from titan_lite.distributed.stage import Stage
from titan_lite.dtensor import as_shard_of
from titan_lite.features.powersgd import compression as powersgd
from titan_lite.features.powersgd.compression import PowerSGD, orthogonalize
from titan_lite.features.powersgd.keys import PowerSGDKeys
from titan_lite.features.replica_check.comparison import compare_replicas

F32 = torch.float32
ANY_SIZE = functools.partial(
    mock.patch.object, powersgd, "MAX_FACTOR_SHARE", math.inf
)  # compress what would not pay


def test_columns_become_orthonormal_also_those_that_depend_on_others():
    torch.manual_seed(0)
    matrices = torch.randn(3, 40, 6)
    matrices[1, :, 4] = matrices[1, :, 0] + matrices[1, :, 1]
    matrices[2] *= 1e-8
    made = orthogonalize(matrices)
    torch.testing.assert_close(made.mT @ made, torch.eye(6).expand(3, 6, 6), atol=2e-6, rtol=0)
    torch.testing.assert_close(
        made[0] @ (made[0].T @ matrices[0]), matrices[0], atol=1e-5, rtol=0
    )  # the same span
    assert not orthogonalize(torch.zeros(1, 5, 2)).any()


@pytest.mark.parametrize("rows", [2, 3, 7])
def test_fewer_rows_than_columns_give_fewer_columns_and_no_oblique_ones(rows):
    """Such as the rows of an embedding that few distinct tokens have read."""
    matrices = torch.zeros(1, 256, 8)
    matrices[0, torch.randperm(256)[:rows]] = torch.randn(
        rows, 8, generator=torch.Generator().manual_seed(rows)
    )
    made = orthogonalize(matrices)
    assert torch.linalg.eigvalsh(made[0].T @ made[0]).max() < 1 + 1e-5
    torch.testing.assert_close(made[0] @ (made[0].T @ matrices[0]), matrices[0], atol=1e-5, rtol=0)


# One matrix


class Two(nn.Module):
    """A stacked weight of 4 x 3 x 5, a matrix of 12 x 20, and a norm."""

    def __init__(self):
        super().__init__()
        self.stacked, self.matrix = (
            nn.Parameter(torch.zeros(4, 3, 5)),
            nn.Parameter(torch.zeros(12, 20)),
        )
        self.norm = nn.Parameter(torch.zeros(7))


def between(rank, mesh=None):
    model = Two()
    mesh = mesh or make_mesh(2, 1)
    options = FSDPOptions(keep_gathered=None, reduce_over_replicas=False)
    stage = Stage(model, apply_simple_fsdp(model, parameter_mesh(mesh), options))
    how = PowerSGDKeys(
        replicate_compression="powersgd", replicate_rank=rank, replicate_uncompressed_steps=1
    )
    return model, PowerSGD([stage], how, seed=0)


def put(model, seed):
    """Give this rank's gradients; return those of both ranks."""
    both = [{}, {}]
    for rank, found in enumerate(both):
        random = torch.Generator().manual_seed(2 * seed + rank)
        for fqn, parameter in model.named_parameters():
            found[fqn] = torch.randn(parameter.shape, generator=random)
    for fqn, parameter in model.named_parameters():
        parameter.grad = as_shard_of(parameter, both[dist.get_rank()][fqn].clone())
    return both


def gradients(model):
    return {fqn: parameter.grad.to_local().clone() for fqn, parameter in model.named_parameters()}


def beside_numpy():
    with ANY_SIZE():
        model, sums = between(rank=2)
        no = torch.zeros(())
        both = put(model, 0)
        sums.after_backward(1)  # uncompressed
        torch.testing.assert_close(
            gradients(model), {fqn: both[0][fqn] + both[1][fqn] for fqn in both[0]}
        )
        sums.before_update(no)
        assert not any(error.any() for error in sums.errors.values())
        shapes = {"stacked": (4, 15), "matrix": (12, 20)}
        q = {fqn: sums.qs[fqn].double().numpy().copy() for fqn in shapes}
        errors = {fqn: np.zeros((2, *shape)) for fqn, shape in shapes.items()}
        for step in (2, 3, 4):
            both = put(model, step)
            sums.after_backward(step)
            found = gradients(model)
            torch.testing.assert_close(found["norm"], both[0]["norm"] + both[1]["norm"])
            for fqn, shape in shapes.items():
                mine = errors[fqn] + np.stack(
                    [each[fqn].double().numpy().reshape(shape) for each in both]
                )
                p = np.linalg.qr(mine.sum(0) @ q[fqn])[0]
                q[fqn] = mine.sum(0).T @ p
                errors[fqn] = mine - p @ p.T @ mine
                np.testing.assert_allclose(
                    found[fqn].numpy().reshape(shape), p @ q[fqn].T, atol=2e-4
                )
            before = {fqn: (sums.errors[fqn].clone(), sums.qs[fqn].clone()) for fqn in shapes}
            sums.before_update(no)
            assert not any(torch.equal(sums.errors[fqn], before[fqn][0]) for fqn in shapes)
            for fqn, shape in shapes.items():
                own = errors[fqn][dist.get_rank()]
                np.testing.assert_allclose(sums.errors[fqn].numpy().reshape(shape), own, atol=2e-4)
        return found, sums.errors, sums.qs


def test_three_steps_are_those_of_numpy_in_float64():
    (found, errors, qs), (others, other_errors, other_qs) = run_ranks(2, beside_numpy)
    for fqn in ("stacked", "matrix"):
        assert torch.equal(found[fqn], others[fqn])
        assert torch.equal(qs[fqn], other_qs[fqn])
        assert not torch.equal(errors[fqn], other_errors[fqn])


def at_full_rank():
    with ANY_SIZE():
        model, sums = between(rank=12)
        for step in (2, 3, 4):
            both = put(model, step)
            sums.after_backward(step)
            torch.testing.assert_close(
                gradients(model),
                {fqn: both[0][fqn] + both[1][fqn] for fqn in both[0]},
                atol=1e-4,
                rtol=0,
            )
            sums.before_update(torch.zeros(()))
            assert all(error.abs().max() < 1e-4 for error in sums.errors.values())


def test_full_rank_is_no_compression():
    run_ranks(2, at_full_rank)


def skipped():
    with ANY_SIZE():
        model, sums = between(rank=2)
        put(model, 2)
        sums.after_backward(2)
        sums.before_update(torch.zeros(()))
        before = {name: tensor.to_local().clone() for name, tensor in sums.state_tensors().items()}
        put(model, 3)
        if dist.get_rank() == 0:
            model._parameters["matrix"].grad.to_local()[0, 0] = math.nan
        sums.after_backward(3)
        assert gradients(model)["matrix"].isnan().any()  # on both copies, which both skip
        sums.before_update(torch.ones(()))
        assert all(
            torch.equal(tensor.to_local(), before[name])
            for name, tensor in sums.state_tensors().items()
        )
        put(model, 4)
        model._parameters["stacked"].grad.to_local().zero_()
        sums.errors["stacked"].zero_()
        sums.after_backward(4)
        sums.before_update(torch.zeros(()))
        assert all(tensor.to_local().isfinite().all() for tensor in sums.state_tensors().values())
        assert sums.qs["stacked"].any(0).all()  # a gradient of zeros does not end the compression
        assert (
            compare_replicas(sums.state_tensors()) is None
        )  # errors are not compared between copies
        sums.qs["matrix"][0, 0] += dist.get_rank()
        assert compare_replicas(sums.state_tensors())  # and Q is
        return {
            name: (tensor.shape, tensor.to_local().shape)
            for name, tensor in sums.state_tensors().items()
        }


def test_a_skipped_step_leaves_the_state_and_errors_are_saved_with_a_dimension_for_the_copy():
    shapes, _ = run_ranks(2, skipped)
    assert shapes["between.matrix.error"] == ((2, 12, 20), (1, 12, 20))
    assert shapes["between.matrix.q"] == ((1, 1, 20, 2), (1, 1, 20, 2))
    assert shapes["between.stacked.error"] == ((2, 4, 3, 5), (1, 4, 3, 5))


def uneven():
    with ANY_SIZE():
        model, sums = between(
            rank=2, mesh=make_mesh(2, 3)
        )  # of 4 rows, the last of three ranks has none; of 7, one
        for step in (2, 3):
            for parameter in model.parameters():
                parameter.grad = as_shard_of(
                    parameter, torch.randn_like(parameter.detach().to_local())
                )
            sums.after_backward(step)
            sums.before_update(torch.zeros(()))
        assert compare_replicas(sums.state_tensors()) is None
        return gradients(model)


def test_ranks_with_fewer_rows_and_without_rows():
    found = run_ranks(6, uneven)
    for rank in range(3):
        assert all(torch.equal(found[rank][fqn], found[rank + 3][fqn]) for fqn in found[rank])
    assert found[2]["stacked"].shape == (0, 3, 5)


# In a model


def three_steps(layout, once, compiled):
    """[gradients and state] of three steps of two microbatches; the second step is skipped."""
    with ANY_SIZE():
        mesh = make_mesh(*layout)
        stage = build(replace(HEADS, n_layers=3), mesh, powersgd=2, compiled=compiled)
        how = PowerSGDKeys(
            replicate_compression="powersgd", replicate_rank=2, replicate_uncompressed_steps=1
        )
        sums, group = PowerSGD([stage], how, seed=0), mesh.get_group("dp_replicate").group_name
        tokens, labels = batch()
        mine, found = my_microbatches(mesh, tokens, labels, count=2), []
        for number in (1, 2, 3):
            with stage.gathered_for_step(2) if once else nullcontext():
                step(stage, mesh, mine, (labels != -100).sum(), gradient=False)
            started_last.clear()
            sums.after_backward(number)
            sent = [fqns.split() for _, name, fqns in started_last if name == group]
            if number > 1:  # the norms, all P, all Q
                norms = [fqn for fqn in sums.errors if "norm" in fqn]
                assert not norms
                assert all("norm" in fqn for fqn in sent[0])
                assert sent[1] == sent[2]
                assert set(sent[1]) == set(sums.errors)
                assert len(sent) == 3
            found.append(gradients(stage.model))
            found[-1] |= {
                name: part.to_local().clone() for name, part in sums.state_tensors().items()
            }
            sums.before_update(torch.tensor(float(number == 2)))
            stage.model.zero_grad()
        return found


@pytest.mark.parametrize(
    ("layout", "compiled"),
    [((2, 1), None), pytest.param((2, 2), "aot_eager", marks=pytest.mark.release)],
)
def test_sums_are_alike_however_often_weights_are_gathered(layout, compiled):
    """Gradients of microbatches add up in shards, or unsharded: they differ by rounding."""
    ranks = math.prod(layout)
    each, once = (run_ranks(ranks, three_steps, layout, way, compiled) for way in (False, True))
    for found, expected in zip(each, once, strict=True):
        for one, other in zip(found, expected, strict=True):
            assert one.keys() == other.keys()
            for name, tensor in one.items():
                torch.testing.assert_close(tensor, other[name], atol=1e-4, rtol=1e-3)
