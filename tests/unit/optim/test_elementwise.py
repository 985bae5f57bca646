"""Every elementwise optimizer: state by name, shards, and the bytes that its row has; of every
optimizer, skipped and resumed steps.
"""

import math

import pytest
import torch
from tiny import TIED, UNTIED
from torch.utils._python_dispatch import TorchDispatchMode

from titan_lite.config import Config, Optimizer
from titan_lite.config.optimizers import OPTIMIZERS
from titan_lite.models.transformer import Transformer
from titan_lite.optim.build import build_optimizer

NAMES = [name for name, row in OPTIMIZERS.items() if row.is_elementwise]
LR = 0.02


DTYPES = ("float32", "bfloat16")  # of moments
ALL = [(name, dtype) for name in NAMES for dtype in DTYPES]
ALL += [("Muon", "float32"), ("Shampoo", "float32")]


def config_of(name, dtype="float32"):
    return Optimizer(
        name=name,
        lr=LR,
        beta1=0.8,
        beta2=0.9,
        eps=1e-6,
        weight_decay=0.5,
        state_dtype=dtype,
        # of Shampoo
        max_preconditioner_dim=16,
        precondition_frequency=2,
        start_preconditioning_step=2,
    )


def build(name, model_config=UNTIED, dtype="float32"):
    model = Transformer(model_config)
    model.init_weights(0)
    parameters = dict(model.named_parameters())
    return parameters, build_optimizer(Config(optimizer=config_of(name, dtype)), parameters)


def set_gradients(parameters, step):
    """The same for every model, other ones each step."""
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def take_steps(parameters, optimizer, steps):
    for step in steps:
        set_gradients(parameters, step)
        optimizer.set_lr(LR * step / 4)
        optimizer.step()


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


# State


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_state_is_named_after_parameters_and_is_the_live_one(name, tied):
    parameters, optimizer = build(name, TIED if tied else UNTIED)
    assert ("output.weight" in parameters) is not tied
    moments = OPTIMIZERS[name].moments
    state = optimizer.state_tensors()
    assert state.keys() == {f"{fqn}.{part}" for fqn in parameters for part in ("step", *moments)}
    assert not any(tensor.any() for tensor in state.values())
    take_steps(parameters, optimizer, [1, 2, 3])
    for fqn, parameter in parameters.items():
        assert state[f"{fqn}.step"] == 3
        for moment in moments:
            assert state[f"{fqn}.{moment}"].shape == parameter.shape
            assert state[f"{fqn}.{moment}"].all()
    again = optimizer.state_tensors()
    assert all(again[name] is tensor for name, tensor in state.items())


@pytest.mark.parametrize("name", NAMES)
def test_the_settings_of_a_parameter_are_the_keys_of_its_row(name):
    _, optimizer = build(name)
    settings = optimizer.settings()
    assert settings["output.weight.lr"] == LR
    assert settings["output.weight.weight_decay"] == 0.5
    assert settings["norm.weight.weight_decay"] == 0.0
    betas = settings.get("output.weight.betas")  # of torch's AdamW
    for key in set(OPTIMIZERS[name].keys) - {"state_dtype"}:
        number = {"beta1": 0, "beta2": 1}.get(key)
        value = betas[number] if betas and number is not None else settings[f"output.weight.{key}"]
        assert value == getattr(config_of(name), key)


@pytest.mark.parametrize(("name", "dtype"), ALL)
def test_steps_after_loading_are_those_without_interruption(name, dtype):
    parameters, optimizer = build(name, dtype=dtype)
    take_steps(parameters, optimizer, [1, 2, 3])
    others, resumed = build(name, dtype=dtype)
    with torch.no_grad():
        for fqn, parameter in others.items():
            parameter.copy_(parameters[fqn])
    saved = optimizer.state_tensors()
    for fqn, tensor in resumed.state_tensors().items():
        assert tensor.dtype == saved[fqn].dtype
        tensor.copy_(saved[fqn])
    take_steps(parameters, optimizer, [4, 5])
    take_steps(others, resumed, [4, 5])
    assert_equal(others, parameters)
    assert_equal(resumed.state_tensors(), optimizer.state_tensors())


@pytest.mark.parametrize(("name", "dtype"), ALL)
def test_a_step_that_is_skipped_on_the_device_changes_nothing(name, dtype):
    parameters, skipping = build(name, dtype=dtype)
    others, without = build(name, dtype=dtype)
    for step, skipped in enumerate([True, False, False, True, False], 1):
        set_gradients(parameters, step)
        if skipped:
            parameters["tok_embeddings.weight"].grad.fill_(math.nan)
        skipping.step(torch.tensor(float(skipped)))
        if not skipped:
            set_gradients(others, step)
            without.step()
        assert_equal(parameters, others)
        assert_equal(skipping.state_tensors(), without.state_tensors())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_a_shard_takes_the_steps_of_its_part_of_the_parameter(name, dtype):
    """So the layout changes nothing. The cuts are not those of any kernel's vectors."""
    generator = torch.Generator().manual_seed(0)
    initial = torch.randn(7, 11, generator=generator)
    gradients = [torch.randn(7, 11, generator=generator) for _ in range(4)]

    def after_steps(rows):
        shard = torch.nn.Parameter(initial[rows].clone())
        optimizer = build_optimizer(
            Config(optimizer=config_of(name, dtype)), {"output.weight": shard}
        )
        for gradient in gradients:
            shard.grad = gradient[rows].clone()
            optimizer.step()
        return shard.detach()

    parts = [after_steps(slice(0, 3)), after_steps(slice(3, 7))]
    # of elements at the ends of rows, AdamW's kernel rounds some otherwise than its vectors
    torch.testing.assert_close(torch.cat(parts), after_steps(slice(0, 7)), rtol=2e-7, atol=0)


# Its row


class CountBytes(TorchDispatchMode):
    """Counts the bytes of tensors of a size that operators read and write."""

    def __init__(self, numel):
        super().__init__()
        self.numel = numel
        self.nbytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in (*args, result):
            if isinstance(tensor, torch.Tensor) and tensor.numel() == self.numel:
                self.nbytes += tensor.nbytes
        return result


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for name in NAMES for dtype in DTYPES if (name, dtype) != ("AdamW", "float32")],
)
def test_the_row_has_the_bytes_that_an_update_of_plain_operations_moves(name, dtype):
    parameter = torch.nn.Parameter(torch.ones(50))
    config = Config(optimizer=config_of(name, dtype))
    optimizer = build_optimizer(config, {"norm.weight": parameter})
    optimizer.state_tensors()
    parameter.grad = torch.ones(50)
    with CountBytes(50) as count:
        optimizer.step()
    row = OPTIMIZERS[name]
    found = row.update_bytes if dtype == "float32" else row.update_bytes_bfloat16
    moved = count.nbytes / 50
    assert found == moved, f"the row of {name} has {found} bytes ({dtype}), and it moves {moved}"


# Moments in bfloat16


@pytest.mark.parametrize("name", NAMES)
def test_moments_in_bfloat16_are_those_in_float32_rounded(name):
    """The first step has the same moments before it, and so is the same but for rounding."""
    parameters, exact = build(name)
    others, rounded = build(name, dtype="bfloat16")
    take_steps(parameters, exact, [1])
    take_steps(others, rounded, [1])
    for fqn, parameter in parameters.items():
        torch.testing.assert_close(others[fqn], parameter, rtol=1e-6, atol=1e-7)
    state = rounded.state_tensors()
    for fqn, expected in exact.state_tensors().items():
        if not fqn.endswith(".step"):
            assert state[fqn].dtype == torch.bfloat16
            torch.testing.assert_close(state[fqn].float(), expected, rtol=2**-8, atol=0)
