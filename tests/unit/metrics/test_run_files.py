"""Readers of metrics.jsonl and events.jsonl; that of a whole run is tested in report/test_page.py."""

import json

import pytest

from titan_lite.metrics.run_files import (
    Window,
    read_events,
    read_metrics,
    read_rows,
    timed_windows,
)


@pytest.fixture
def written(tmp_path):
    """A function: objects, and lines that are none -> a file of them."""

    def write(*lines):
        path = tmp_path / "lines.jsonl"
        path.write_text(
            "".join(line if type(line) is str else json.dumps(line) + "\n" for line in lines)
        )
        return path

    return write


def test_a_step_may_be_told_in_two_lines_and_steps_come_in_order(written):
    lines = [
        {"step": 20, "loss": 2.0},
        {"step": 10, "loss": 1.0},
        {"step": 20, "validation_loss": 2.5},
        {"step": 10, "loss": 0.5},
    ]
    assert list(read_metrics(written(*lines)).items()) == [
        (10, {"step": 10, "loss": 0.5}),
        (20, {"step": 20, "loss": 2.0, "validation_loss": 2.5}),
    ]


def test_rows_carry_tokens_and_hours_so_far(written):
    rows, resumes, notes = read_rows(
        written({"step": 10, "step_time": 360.0, "tokens_seen": 50}, {"step": 15, "loss": 1.0})
    )
    assert [(row["step"], row["tokens"], row["hours"]) for row in rows] == [
        (10, 50, 1.0),
        (15, 50, 1.0),
    ]
    assert (resumes, notes) == ([], [])


def window(step, seconds):
    return {
        "step": step,
        "step_time": seconds,
        "tps": 8.0,
        "tokens_seen": 32 * step,
        "memory_gib": 2.0,
    }


def test_windows_are_those_of_the_last_start_without_its_first_one(written):
    windows = [window(step, float(step)) for step in (10, 20, 30)]
    assert timed_windows(written(*windows)) == [
        Window(10, 200.0, 320, 8.0, 2.0),
        Window(10, 300.0, 320, 8.0, 2.0),
    ]
    later = [
        {"resumed_from": 20},
        *windows[1:],
        {"step": 30, "loss": 1.0},
        "[1]\n",
        window(40, 4.0),
        '{"st',
    ]
    for started_again in ([], ["\n", {"resumed_from": 40}]):
        found = timed_windows(written(*windows, *later, *started_again))
        assert [each.seconds for each in found] == [300.0, 40.0]


def event(name, step):
    return {"time": "2026-11-21T20:15:30+00:00", "event": name, "step": step, "text": ""}


def test_an_attempt_that_ended_without_a_word_is_told(written):
    lines = [
        event("start", 0),
        event("checkpoint", 20),
        event("start", 20),
        event("stop", 30),
        event("start", 30),
    ]
    lines += [
        event("slow", 33),
        event("restart", 37),
        event("restart", 37),
        event("start", 30),
        event("error", 38),
    ]
    events, notes = read_events(written(*lines, event("start", 30), '{"torn\n'))
    assert [(each["event"], each["step"]) for each in events] == [
        ("start", 0),
        ("checkpoint", 20),
        ("failed", 20),  # between
        ("start", 20),
        ("stop", 30),
        ("start", 30),
        ("slow", 33),
        ("failed", 37),  # as the restart knows
        ("restart", 37),
        ("restart", 37),
        ("start", 30),
        ("error", 38),
        ("start", 30),
    ]
    assert events[2]["text"].startswith("ended without a message")
    assert notes == ["lines.jsonl, line 12, is not an event, and is skipped"]
