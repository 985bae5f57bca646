"""The learning rate as a function of the step: a table, and what holds for every schedule."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_lite.config import LRScheduler
from titan_lite.optim.lr_scheduler import lr_factor

WSD = dict(warmup_steps=10, decay_ratio=0.2)  # of 100 steps: up to 10, stable to 80, down to 100
WHOLE = dict(warmup_steps=10, decay_ratio=1.0)  # decay starts when warm-up ends
LATE = 1 - 1 / 29


@pytest.mark.parametrize(
    ("settings", "factors"),
    [
        pytest.param(
            WSD,
            {1: 0.1, 5: 0.5, 9: 0.9, 10: 1.0},
            id="warm-up is linear and its last step is the peak",
        ),
        pytest.param(WSD, {11: 1.0, 50: 1.0, 80: 1.0}, id="stable"),
        pytest.param(WSD, {81: 0.95, 85: 0.75, 90: 0.5, 100: 0.0}, id="linear"),
        pytest.param(
            WSD | dict(decay_type="cosine"),
            {80: 1.0, 85: 0.8535534, 90: 0.5, 95: 0.1464466, 100: 0.0},
            id="cosine",
        ),
        pytest.param(
            WSD | dict(decay_type="sqrt"), {80: 1.0, 85: 0.5, 90: 0.2928932, 100: 0.0}, id="sqrt"
        ),
        pytest.param(
            WSD | dict(min_lr_factor=0.1),
            {5: 0.5, 80: 1.0, 90: 0.55, 100: 0.1},
            id="a floor under the decay alone",
        ),
        pytest.param(
            WSD | dict(min_lr_factor=0.1, decay_type="cosine"),
            {85: 0.8681981, 100: 0.1},
            id="cosine to a floor",
        ),
        pytest.param(
            WSD | dict(min_lr_factor=0.1, decay_type="sqrt"),
            {85: 0.55, 100: 0.1},
            id="sqrt to a floor",
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
            WHOLE, {10: 1.0, 11: 1 - 1 / 90, 55: 0.5, 100: 0.0}, id="decay takes what warm-up left"
        ),
        pytest.param(
            dict(warmup_steps=0, decay_ratio=0.2), {1: 1.0, 80: 1.0, 90: 0.5}, id="no warm-up"
        ),
        pytest.param(
            dict(warmup_steps=0, decay_ratio=1.0),
            {1: 0.99, 50: 0.5, 100: 0.0},
            id="no warm-up, decay throughout",
        ),
        pytest.param(
            dict(warmup_steps=10, decay_ratio=0.0),
            {5: 0.5, 11: 1.0, 99: 1.0, 100: 1.0},
            id="no decay",
        ),
        pytest.param(
            dict(warmup_steps=400, decay_ratio=1.0),
            {1: 0.0025, 100: 0.25},
            id="shorter than the warm-up",
        ),
        pytest.param(
            dict(warmup_steps=100, decay_ratio=1.0),
            {50: 0.5, 100: 1.0},
            id="as long as the warm-up",
        ),
        pytest.param(
            dict(warmup_steps=99, decay_ratio=1.0, min_lr_factor=0.1),
            {99: 1.0, 100: 0.1},
            id="one step of decay",
        ),
        # 0.29 * 100 is 28.999999999999996
        pytest.param(
            dict(warmup_steps=0, decay_ratio=0.29),
            {71: 1.0, 72: LATE},
            id="a share of steps is rounded, not cut",
        ),
    ],
)
def test_factor_by_step(settings, factors):
    config = LRScheduler(**settings)
    assert {step: lr_factor(step, config, total_steps=100) for step in factors} == pytest.approx(
        factors, abs=1e-7
    )


@given(
    st.builds(
        LRScheduler,
        warmup_steps=st.integers(0, 60),
        decay_ratio=st.floats(0, 1),
        decay_type=st.sampled_from(["linear", "cosine", "sqrt"]),
        min_lr_factor=st.floats(0, 1),
    ),
    st.integers(1, 60),
)
def test_every_schedule_rises_to_the_peak_and_then_falls_to_its_floor(config, total_steps):
    factors = [lr_factor(step, config, total_steps) for step in range(1, total_steps + 1)]
    warmup, rest = factors[: config.warmup_steps], factors[config.warmup_steps :]
    assert all(0 < factor <= 1 for factor in warmup)
    assert warmup == sorted(warmup)
    assert all(config.min_lr_factor <= factor <= 1 for factor in rest)
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(rest))
    if rest and round(config.decay_ratio * total_steps) > 0:
        assert math.isclose(rest[-1], config.min_lr_factor, abs_tol=1e-12)
