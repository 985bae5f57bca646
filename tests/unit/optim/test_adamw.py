"""AdamW: what decays, clipping, the state by name, and the same steps as torch's plain
implementation.
"""

import functools
import math

import pytest
import torch

from titan_lite.compile.compile import compile_function
from titan_lite.config import Compile, Optimizer
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


def test_norms_do_not_decay():
    model = build_model()
    optimizer = build_optimizer(Optimizer(weight_decay=0.3), dict(model.named_parameters()))
    names = {parameter: name for name, parameter in model.named_parameters()}
    decay = {
        names[p]: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]
    }
    assert decay == {name: 0.0 if name in NORMS else 0.3 for name in names.values()}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(
        names
    )  # none of them twice


def test_settings_reach_every_group():
    optimizer = build_optimizer(CONFIG, dict(build_model().named_parameters()))
    assert len(optimizer.param_groups) == 2
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"], group["fused"]) == (
            0.02,
            (0.8, 0.9),
            1e-6,
            True,
        )
    optimizer.set_lr(0.125)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]


def test_steps_are_those_of_the_plain_algorithm():
    model, oracle = build_model(), build_model()
    optimizer = build_optimizer(CONFIG, dict(model.named_parameters()))
    theirs = [
        torch.optim.AdamW(
            [parameter],
            lr=CONFIG.lr,
            betas=(0.8, 0.9),
            eps=1e-6,
            weight_decay=0.0 if name in NORMS else 0.5,
            foreach=False,
        )
        for name, parameter in oracle.named_parameters()
    ]
    for step in range(1, 6):
        take_steps(model, optimizer, [step])
        set_gradients(oracle, step)
        for each in theirs:
            set_lr(each, CONFIG.lr * step / 4)
            each.step()
    for (name, ours), expected in zip(model.named_parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(
            ours, expected, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_in_float32_the_update_is_torchs_fused_kernel_to_the_bit():
    model, oracle = build_model(), build_model()
    optimizer = build_optimizer(CONFIG, dict(model.named_parameters()))
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


# Compiled


def compiling(backend):
    return functools.partial(
        compile_function, config=Compile(enable=True, backend=backend), component="optimizer"
    )


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_update_is_that_of_the_fused_kernel_and_compiled_once(backend):
    """aot_eager: moments bitwise, parameters but for the rounding of one multiplication (torch
    2.13, on a CPU).
    """
    torch._dynamo.reset()
    model, oracle = build_model(), build_model()
    optimizer = build_optimizer(CONFIG, dict(model.named_parameters()), compile=compiling(backend))
    fused = build_optimizer(CONFIG, dict(oracle.named_parameters()))
    graphs = []
    for step in range(1, 11):
        for each, its in ((model, optimizer), (oracle, fused)):
            set_gradients(each, step)
            its.set_lr(CONFIG.lr * step / 4)
            its.step()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert len(set(graphs)) == 1  # one a group, in the first step

    ours, theirs = (its.state_tensors() for its in (optimizer, fused))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        exact = backend == "aot_eager" or name.endswith(".step")
        torch.testing.assert_close(
            tensor, theirs[name], rtol=0 if exact else 1e-5, atol=0 if exact else 1e-7
        )
    for (name, parameter), expected in zip(
        model.named_parameters(), oracle.parameters(), strict=True
    ):
        torch.testing.assert_close(
            parameter, expected, rtol=1e-5, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_a_compiled_update_goes_on_from_the_state_of_the_fused_kernel():
    torch._dynamo.reset()
    model, resumed = build_model(), build_model()
    fused = build_optimizer(CONFIG, dict(model.named_parameters()))
    take_steps(model, fused, [1, 2, 3])
    resumed.load_state_dict(model.state_dict())
    new = build_optimizer(CONFIG, dict(resumed.named_parameters()), compile=compiling("aot_eager"))
    saved = fused.state_tensors()
    for name, tensor in new.state_tensors().items():
        assert tensor.dtype == saved[name].dtype
        tensor.copy_(saved[name])
    take_steps(model, fused, [4, 5])
    take_steps(resumed, new, [4, 5])
    for (name, ours), theirs in zip(resumed.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(
            ours, theirs, rtol=1e-5, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}"
        )


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


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_number_shows_in_the_norm_and_stays_in_the_gradients(bad):
    model = build_model()
    set_gradients(model, 1)
    model.layers["0"].attention.wk.weight.grad[1, 2] = bad
    assert not clip_grad_norm_(model.parameters(), max_norm=1.0).isfinite()
    assert not model.layers["0"].attention.wk.weight.grad.isfinite().all()


# State


@pytest.mark.parametrize("tied", [False, True])
def test_state_is_named_after_parameters_and_is_the_live_one(tied):
    model = build_model(tied)
    optimizer = build_optimizer(CONFIG, dict(model.named_parameters()))
    state = optimizer.state_tensors()
    names = [name for name, _ in model.named_parameters()]
    assert ("output.weight" in names) is not tied
    assert state.keys() == {
        f"{name}.{part}" for name in names for part in ("step", "exp_avg", "exp_avg_sq")
    }
    assert not any(tensor.any() for tensor in state.values())
    take_steps(model, optimizer, [1, 2, 3])
    for name, parameter in model.named_parameters():
        assert state[f"{name}.step"] == 3
        assert (
            state[f"{name}.exp_avg"].shape == state[f"{name}.exp_avg_sq"].shape == parameter.shape
        )
        assert state[f"{name}.exp_avg"].all()
        assert (state[f"{name}.exp_avg_sq"] > 0).all()
    again = optimizer.state_tensors()
    assert all(again[name] is tensor for name, tensor in state.items())


def test_asking_for_the_state_before_the_first_step_changes_nothing():
    model, untouched = build_model(), build_model()
    optimizers = [
        build_optimizer(CONFIG, dict(each.named_parameters())) for each in (model, untouched)
    ]
    optimizers[0].state_tensors()
    for each, optimizer in zip((model, untouched), optimizers, strict=True):
        take_steps(each, optimizer, [1, 2])
    states = [optimizer.state_tensors() for optimizer in optimizers]
    for name, tensor in states[0].items():
        assert tensor.dtype == states[1][name].dtype
        assert torch.equal(tensor, states[1][name]), name
    for ours, theirs in zip(model.parameters(), untouched.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_steps_after_loading_are_those_without_interruption():
    model, resumed = build_model(), build_model()
    optimizer = build_optimizer(CONFIG, dict(model.named_parameters()))
    take_steps(model, optimizer, [1, 2, 3])
    saved = {name: tensor.clone() for name, tensor in optimizer.state_tensors().items()}
    resumed.load_state_dict(model.state_dict())
    new = build_optimizer(CONFIG, dict(resumed.named_parameters()))
    for name, tensor in new.state_tensors().items():
        tensor.copy_(saved[name])
    take_steps(model, optimizer, [4, 5])
    take_steps(resumed, new, [4, 5])
    for (name, ours), theirs in zip(resumed.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


# Skipped steps


@pytest.mark.parametrize("compile", [None, compiling("aot_eager")], ids=["fused", "compiled"])
def test_a_step_that_is_skipped_on_the_device_changes_nothing(compile):
    torch._dynamo.reset()
    model, oracle = build_model(), build_model()
    ours, theirs = (
        build_optimizer(CONFIG, dict(each.named_parameters()), compile=compile)
        for each in (model, oracle)
    )
    names = [dict(each.named_parameters()) for each in (model, oracle)]
    for step, skipped in enumerate([True, False, False, True, False], 1):
        set_gradients(model, step)
        if skipped:
            next(model.parameters()).grad.fill_(math.nan)
        ours.step(torch.tensor(float(skipped)))
        if not skipped:
            set_gradients(oracle, step)
            theirs.step()
        for mine, other in zip(names[0].values(), names[1].values(), strict=True):
            assert torch.equal(mine, other)
        states = [its.state_tensors() for its in (ours, theirs)]
        assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
