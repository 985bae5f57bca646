"""The learning rate as a function of the step: a table, and what holds for every schedule."""

import itertools
import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import DEBUG

from titan_lite.config import LRScheduler, load_config
from titan_lite.config.errors import ConfigError
from titan_lite.distributed.layout import Layout
from titan_lite.optim.lr_scheduler import Decay, decay_of, lr_factor
from titan_lite.rules import check


def factor_at(step, schedule, steps):
    """The factor in a run of so many steps, of 1,000 tokens each."""
    return lr_factor(step, schedule, decay_of(schedule, steps, 1000))


# of 100 steps: up to 10, stable to 81, down to 100, and zero would be step 101
WSD = dict(warmup_steps=10, decay_length="19%")
WHOLE = dict(warmup_steps=11, decay_length="")  # decay starts when warm-up ends


@pytest.mark.parametrize(
    ("settings", "factors"),
    [
        pytest.param(
            WSD,
            {1: 0.1, 5: 0.5, 9: 0.9, 10: 1.0},
            id="warm-up is linear and its last step is the peak",
        ),
        pytest.param(WSD, {11: 1.0, 50: 1.0, 81: 1.0}, id="stable"),
        pytest.param(WSD, {82: 0.95, 86: 0.75, 91: 0.5, 100: 0.05}, id="linear"),
        pytest.param(
            WSD | dict(min_lr_factor=0.1),
            {5: 0.5, 81: 1.0, 91: 0.55, 100: 0.145},
            id="a floor under the decay alone",
        ),
        pytest.param(
            WSD | dict(min_lr_factor=1.0), {5: 0.5, 90: 1.0, 100: 1.0}, id="a floor at the peak"
        ),
        pytest.param(
            WSD | dict(min_lr_factor=0.1),
            {101: 0.1, 1000: 0.1},
            id="the floor is kept after the end",
        ),
        pytest.param(
            WHOLE,
            {11: 1.0, 12: 1 - 1 / 90, 56: 0.5, 100: 1 / 90},
            id="decay takes what warm-up left",
        ),
        pytest.param(
            dict(warmup_steps=0, decay_length="19%"), {1: 1.0, 81: 1.0, 91: 0.5}, id="no warm-up"
        ),
        pytest.param(
            dict(warmup_steps=0, decay_length=""),
            {1: 100 / 101, 100: 1 / 101},
            id="no warm-up, decay throughout",
        ),
        pytest.param(
            dict(warmup_steps=10, decay_length=0),
            {5: 0.5, 11: 1.0, 99: 1.0, 100: 1.0},
            id="no decay",
        ),
        pytest.param(
            dict(warmup_steps=400, decay_length=""),
            {1: 0.0025, 100: 0.25},
            id="shorter than the warm-up",
        ),
        pytest.param(
            dict(warmup_steps=100, decay_length=""),
            {50: 0.5, 100: 1.0},
            id="as long as the warm-up",
        ),
        pytest.param(
            dict(warmup_steps=99, decay_length="", min_lr_factor=0.1),
            {99: 1.0, 100: 0.55, 101: 0.1},
            id="one step of decay",
        ),
        # 0.29 * 100 is 28.999999999999996
        pytest.param(
            dict(warmup_steps=0, decay_length="29%"),
            {71: 1.0, 72: 1 - 1 / 30, 100: 1 / 30},
            id="a share of steps is rounded, not cut",
        ),
    ],
)
def test_factor_by_step(settings, factors):
    config = LRScheduler(**settings)
    assert {step: factor_at(step, config, 100) for step in factors} == pytest.approx(
        factors, abs=1e-7
    )


@given(
    st.builds(
        LRScheduler,
        warmup_steps=st.integers(0, 60),
        decay_length=st.one_of(st.integers(0, 60), st.just(""), st.just("37.5%")),
        decay_type=st.sampled_from(["linear", "cosine", "sqrt"]),
        min_lr_factor=st.floats(0, 1),
    ),
    st.integers(1, 60),
)
def test_every_schedule_rises_to_the_peak_and_then_falls_to_its_floor(config, total_steps):
    factors = [factor_at(step, config, total_steps) for step in range(1, total_steps + 1)]
    warmup, rest = factors[: config.warmup_steps], factors[config.warmup_steps :]
    assert all(0 < factor <= 1 for factor in warmup)
    assert warmup == sorted(warmup)
    assert all(config.min_lr_factor <= factor <= 1 for factor in rest)
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(rest))
    if rest and decay_of(config, total_steps, 1).steps:
        assert math.isclose(
            factor_at(total_steps + 1, config, total_steps), config.min_lr_factor, abs_tol=1e-12
        )
    assert factors[-1] > 0


def transformers_schedule(config, total_steps):
    """Return torch's LambdaLR as transformers makes it, for a decay that ends one step later."""
    transformers = pytest.importorskip("transformers")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    decay_steps = decay_of(config, total_steps, 1).steps
    return transformers.get_wsd_schedule(
        optimizer,
        num_warmup_steps=config.warmup_steps,
        num_decay_steps=decay_steps + 1,
        num_stable_steps=total_steps - config.warmup_steps - decay_steps,
        decay_type="1-sqrt" if config.decay_type == "sqrt" else config.decay_type,
        min_lr_ratio=config.min_lr_factor,
    )


@pytest.mark.parametrize("min_lr_factor", [0.0, 0.1])
@pytest.mark.parametrize("decay_length", ["", "30%", 1])
@pytest.mark.parametrize("decay_type", ["linear", "cosine", "sqrt"])
def test_from_the_peak_on_each_step_has_the_learning_rate_of_transformers(
    decay_type, decay_length, min_lr_factor
):
    config = LRScheduler(
        warmup_steps=3,
        decay_type=decay_type,
        decay_length=decay_length,
        min_lr_factor=min_lr_factor,
    )
    schedule = transformers_schedule(config, total_steps=20)
    for step in range(1, 22):
        schedule.optimizer.step()
        schedule.step()
        if step >= config.warmup_steps:  # before, transformers rises from min_lr_ratio
            factor = factor_at(step, config, 20)
            assert factor == pytest.approx(schedule.get_last_lr()[0])


# of 1,000 steps with 1,000 tokens each, 200 of them warm-up
@pytest.mark.parametrize(
    ("begin", "length", "decay"),
    [
        ("", "", Decay(200, 800)),
        ("", 100, Decay(900, 100)),
        ("", "10%", Decay(900, 100)),
        ("", "0.1M tokens", Decay(900, 100)),
        ("", "100001 tokens", Decay(899, 101)),
        ("", 5000, Decay(200, 800)),
        ("", "1B tokens", Decay(200, 800)),
        ("", 0, Decay(1000, 0)),
        (600, "", Decay(600, 400)),
        ("60%", "", Decay(600, 400)),
        ("0.6M tokens", "", Decay(600, 400)),
        ("600001 tokens", 50, Decay(601, 50)),
        (600, "0.05M tokens", Decay(600, 50)),
        (600, "2 M tokens", Decay(600, 2000)),
        (5000, 100, Decay(5000, 100)),
        (5000, "", Decay(5000, 0)),
        (0, "0 tokens", Decay(0, 0)),
    ],
)
def test_a_decay_is_given_in_steps_tokens_or_a_share(begin, length, decay):
    schedule = LRScheduler(warmup_steps=200, decay_begin=begin, decay_length=length)
    assert decay_of(schedule, 1000, 1000) == decay


def test_begin_and_length_in_steps_do_not_depend_on_the_end_of_the_run():
    schedule = LRScheduler(warmup_steps=10, decay_begin=60, decay_length=40)
    short, long = (
        [factor_at(step, schedule, steps) for step in range(1, 80)] for steps in (80, 1000)
    )
    assert short == long


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["decay_begin=9"], "decay_begin = 9 comes before lr_scheduler.warmup_steps = 10; use"),
        (
            ["decay_begin=1%"],
            'decay_begin = "1%" is step 1, which comes before lr_scheduler.warmup_steps = 10; use',
        ),
        (
            ["decay_begin=50", "decay_length=20", "min_lr_factor=0"],
            "decay_length = 20 ends at step 70, and the rate is 0 up to training.steps = 100; use"
            " decay_length = 50, or min_lr_factor above 0",
        ),
    ],
)
def test_a_decay_that_cannot_be_is_refused(options, message):
    config = load_config(DEBUG, [f"--lr_scheduler.{option}" for option in options])
    with pytest.raises(ConfigError, match=re.escape(message)):
        check(config, Layout.from_config(config, 2))


@pytest.mark.parametrize("value", ["-1", "120%", "8 steps", "tokens", "2K tokens", "1.5"])
def test_an_amount_of_another_form_is_refused(value):
    with pytest.raises(ConfigError, match=r'decay_length = .*expected .*"20%", "2B tokens"'):
        load_config(DEBUG, [f"--lr_scheduler.decay_length={value}"])
