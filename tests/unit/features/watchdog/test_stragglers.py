"""Ranks that are ready for a step later than the others."""

import logging

import pytest

from titan_lite.features.watchdog import stragglers as module
from titan_lite.features.watchdog.stragglers import NameStragglers, describe_slowest


@pytest.mark.parametrize(
    ("seconds", "slow"),
    [
        ([0.1, 0.1, 0.1, 0.4], 3),
        ([0.4, 0.1], 0),
        ([0.1, 0.15, 0.1, 0.1], None),  # 5% of a step
        ([0.4, 0.4, 0.4, 0.4], None),
        ([0.4], None),
    ],
)
def test_a_rank_is_named_that_is_slower_by_a_noticeable_part_of_a_step(seconds, slow):
    said = describe_slowest(seconds, step_time=1.0)
    assert said.startswith(f"rank {slow} is ready for a step") if slow is not None else not said


def test_the_sentence_has_the_slowest_rank_beside_the_median():
    assert (
        describe_slowest([0.01, 0.3, 0.02], step_time=1.4)
        == "rank 1 is ready for a step of 1.40 s after 0.30 s, the median rank after 0.02 s; the"
        " others wait for its data"
    )


def test_an_interval_begins_anew_after_each_line(caplog, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module, "gather_to_rank_0", lambda own: [0.0, own])
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    caplog.set_level(logging.WARNING, logger="titan_lite")
    hook = NameStragglers(freq=2, last_step=3)
    for step, seconds in ((1, 1.0), (2, 2.0), (3, 0.0)):
        hook.on_step_start(step)
        now[0] += seconds
        hook.on_batches(step)
        if step == 1:  # does not count, and is taken again
            hook.on_step_start(step)
            now[0] += seconds
            hook.on_batches(step)
        now[0] += 0.5
        hook.on_step_end(step)
    (message,) = caplog.messages
    assert message.startswith("step 2: rank 1 is ready for a step of 2.00 s after 1.50 s")
    assert caplog.records[0].event == "slow"
