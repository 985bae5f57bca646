"""The share of a run's time in productive steps, from the files of the run."""

import json

import pytest

from titan_lite.metrics.goodput import COUNTED, goodput_line, time_spent


def write(folder, metrics, events=()):
    for name, lines in (("metrics.jsonl", metrics), ("events.jsonl", events)):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / name).write_text(text)


def line(step, seconds=1.0, **values):
    return {"step": step, "step_time": seconds, **values}


def event(second, kind="start", **values):
    time = f"2026-11-27T10:{second // 60:02}:{second % 60:02}+00:00"
    return {"time": time, "event": kind, "step": 0, "text": "", **values}


def test_of_a_run_that_nothing_has_disturbed(tmp_path):
    metrics = [line(10, 3.0), line(20), {"step": 20, "validation_loss": 1.0}, line(30)]
    metrics += [{"step": 30, "seconds_saving": 4.0, "seconds_validation": 2.0}]
    start = {"recipe": 2.0, "imports": 3.0, "first step": 20.0, "validation": 2.0}
    write(tmp_path, metrics, [event(5), event(30, "first step", seconds=start), event(65, "done")])
    spent = time_spent(tmp_path)
    assert spent == {
        COUNTED: 30.0,
        "start": 5.0 + 20.0,  # the first ten steps have taken three times as long
        "saving": 4.0,
        "validation": 2.0,
        "missing": 0.0,
        "not running": 4.0,
    }
    assert goodput_line(spent) == (
        "goodput: 46.2% of 65.0 s in productive steps; start 38.5%, saving 6.2%, not running 6.2%,"
        " validation 3.1%"
    )


def test_steps_after_the_checkpoint_are_done_again(tmp_path):
    metrics = [line(10), line(25), {"resumed_from": 20}, line(30), line(40)]
    write(tmp_path, metrics, [event(0), event(30), event(59, "done")])
    spent = time_spent(tmp_path)
    assert spent[COUNTED] == 40
    assert spent["recomputed"] == 5
    assert spent["not running"] == pytest.approx(14)


def test_a_group_that_is_missing_counts_with_its_share(tmp_path):
    metrics = [line(10, copies=2), line(20, copies=1, seconds_undone=1.5, seconds_waiting=5.0)]
    write(tmp_path, metrics)
    spent = time_spent(tmp_path, groups=2)
    assert (spent[COUNTED], spent["missing"]) == (15, 5)
    assert (spent["undone"], spent["waiting"]) == (1.5, 5)


def test_without_a_step_there_is_nothing_to_say(tmp_path):
    assert goodput_line(time_spent(tmp_path)) == ""
    write(tmp_path, [{"resumed_from": 3}], [event(1)])
    assert goodput_line(time_spent(tmp_path)) == ""
