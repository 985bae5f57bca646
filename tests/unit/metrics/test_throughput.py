"""Figures of a window: a clock that is set by hand."""

import pytest

from titan_lite.metrics import throughput
from titan_lite.metrics.throughput import Throughput


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: now[0])
    return now


def made(peak_flops=1e6):
    return Throughput(
        4000,
        ranks=2,
        flops_per_token=500.0,
        flops_per_token_full_attention=600.0,
        peak_flops=peak_flops,
    )


def test_a_window_is_of_its_steps_alone(clock):
    one = made()
    clock[0] += 50  # until training begins
    one.start(10)
    with one.waiting():
        clock[0] += 1
    clock[0] += 4
    with one.exclude("saving"):
        clock[0] += 30
    clock[0] += 3
    expected = {
        "tps": 1000.0,
        "tflops": 5e-7,
        "data_wait": 12.5,
        "step_time": 2.0,
        "mfu": 50.0,
        "mfu_full_attention": 60.0,
    }
    assert one.values(14) == {**expected, "seconds_saving": 30.0}
    clock[0] += 7  # to log them
    one.start(14)
    clock[0] += 2
    assert one.values(15) == {**expected, "data_wait": 0.0}


def test_without_a_peak_there_is_no_mfu(clock):
    one = made(None)
    clock[0] += 1
    assert "mfu" not in one.values(1)
