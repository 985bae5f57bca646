"""AdamW: what decays, clipping, and the same steps as torch's plain implementation; what it has in
common with other elementwise optimizers is in test_elementwise.py.
"""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from titan_lite.config import Config, Optimizer
from titan_lite.config.families import ModelConfig
from titan_lite.models.transformer import Transformer
from titan_lite.optim.build import build_optimizer
from titan_lite.optim.clipping import clip_grad_norm_

CONFIG = Optimizer(lr=0.02, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.5)
NORMS = {"layers.0.attention_norm.weight", "layers.0.ffn_norm.weight", "norm.weight"}


def build_model(tied=False):
    model = Transformer(
        ModelConfig(
            dim=8,
            n_layers=1,
            n_heads=2,
            n_kv_heads=1,
            hidden_dim=12,
            vocab_size=20,
            tied_embeddings=tied,
            max_seq_len=4,
        )
    )
    model.init_weights(0)
    return model


def set_gradients(model, step):
    """The same for every model of a kind, other ones each step."""
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def set_lr(optimizer, lr):
    """Set the learning rate of an optimizer of ours or of torch's."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def take_steps(model, optimizer, steps):
    for step in steps:
        set_gradients(model, step)
        set_lr(optimizer, CONFIG.lr * step / 4)
        optimizer.step()


# Groups and steps


def test_in_float32_the_update_is_torchs_fused_kernel_to_the_bit():
    model, oracle = build_model(), build_model()
    optimizer = build_optimizer(Config(optimizer=CONFIG), dict(model.named_parameters()))
    theirs = torch.optim.AdamW(
        optimizer_groups(oracle), lr=CONFIG.lr, betas=(0.8, 0.9), eps=1e-6, fused=True
    )
    for step in (1, 2, 3):
        take_steps(model, optimizer, [step])
        take_steps(oracle, theirs, [step])
    assert all(
        torch.equal(*pair) for pair in zip(model.parameters(), oracle.parameters(), strict=True)
    )


def optimizer_groups(model):
    by_decay = {0.5: [], 0.0: []}
    for name, parameter in model.named_parameters():
        by_decay[0.0 if name in NORMS else 0.5].append(parameter)
    return [{"params": parameters, "weight_decay": decay} for decay, parameters in by_decay.items()]


# Clipping


@pytest.mark.parametrize(
    "max_norm", [1e-3, 1.0, 1e3], ids=["far above", "above", "below the limit"]
)
def test_clipping_is_that_of_torch(max_norm):
    model, oracle = build_model(), build_model()
    for each in (model, oracle):
        set_gradients(each, 1)
        each.output.weight.grad = None  # as of a parameter that took no part
    norm = clip_grad_norm_(model.parameters(), max_norm)
    expected = torch.nn.utils.clip_grad_norm_(oracle.parameters(), max_norm)
    assert norm.shape == ()
    assert 20 < expected < 30  # neither all limits above it, nor all below
    torch.testing.assert_close(norm, expected)
    assert model.output.weight.grad is None
    for ours, theirs in zip(model.parameters(), oracle.parameters(), strict=True):
        if ours.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad)


def test_the_norm_of_bfloat16_gradients_is_summed_in_float32():
    parameters = [torch.nn.Parameter(torch.zeros(300, 301, dtype=torch.bfloat16)) for _ in range(2)]
    for seed, parameter in enumerate(parameters):
        parameter.grad = torch.randn(
            300, 301, generator=torch.Generator().manual_seed(seed)
        ).bfloat16()
    before = torch.stack([parameter.grad for parameter in parameters])
    norm = clip_grad_norm_(iter(parameters), max_norm=1.0)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(
        before.double().norm().item(), rel=1e-5
    )  # bfloat16 has 3 digits
    for parameter, gradient in zip(parameters, before, strict=True):
        assert parameter.grad.dtype == torch.bfloat16
        torch.testing.assert_close(
            parameter.grad.float(), gradient.float() / norm, rtol=2**-8, atol=0
        )


@pytest.mark.parametrize(
    ("placements", "copies"),
    [
        ([_StridedShard(0, split_factor=2), Shard(0)], 1),  # as FSDP divides tensor-parallel rows
        ([Shard(0), Shard(1)], 1),
        ([Replicate(), Shard(0)], 2),
        ([Replicate(), Replicate()], 4),
    ],
)
def test_a_gradient_counts_once_however_many_ranks_have_it(placements, copies):
    dist.init_process_group(
        "fake", store=FakeStore(), rank=0, world_size=4
    )  # which adds nothing up
    try:
        mesh = init_device_mesh("cpu", (2, 2))
        part = torch.ones(3, 3)
        parameter = torch.nn.Parameter(DTensor.from_local(part, mesh, placements, run_check=False))
        parameter.grad = DTensor.from_local(2 * part, mesh, placements, run_check=False)
        norm = clip_grad_norm_([parameter], max_norm=1e3)
    finally:
        dist.destroy_process_group()
    assert norm.item() == pytest.approx(6 / math.sqrt(copies))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_number_shows_in_the_norm_and_stays_in_the_gradients(bad):
    model = build_model()
    set_gradients(model, 1)
    model.layers["0"].attention.wk.weight.grad[1, 2] = bad
    assert not clip_grad_norm_(model.parameters(), max_norm=1.0).isfinite()
    assert not model.layers["0"].attention.wk.weight.grad.isfinite().all()
