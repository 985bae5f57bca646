import json
import os
import subprocess
import sys

from tiny import ROOT

from titan_lite.metrics import start_times
from titan_lite.metrics.start_times import StartTimes

IN_A_CHILD = """
import json
from titan_lite.metrics.start_times import StartTimes
times = StartTimes.of_process()
times.begin("imports")
times.end()
print(json.dumps(times.seconds))
"""


def parts_in_a_child(**environment):
    variables = {k: v for k, v in os.environ.items() if k != "TORCHELASTIC_RESTART_COUNT"}
    variables |= {"PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-c", IN_A_CHILD]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_parts_are_in_their_order_and_add_up(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(start_times, "_now", lambda: now[0])
    times = StartTimes()
    times.begin("imports")
    now[0] += 2
    times.begin("model")
    now[0] += 0.5
    times.begin("imports")
    now[0] += 3
    times.end()
    now[0] += 4
    times.end()
    assert list(times.seconds.items()) == [("imports", 5.0), ("model", 0.5)]


def test_a_description_has_the_whole_and_its_parts():
    times = StartTimes()
    times.seconds = {"imports": 2.06, "first step": 1.4}
    assert times.describe() == "3.5 s: imports 2.1, first step 1.4"


def test_a_rank_knows_when_its_launcher_was_started():
    parts = parts_in_a_child(TORCHELASTIC_RESTART_COUNT="0")
    assert list(parts) == ["launcher", "recipe", "imports"]
    assert parts["launcher"] > 0


def test_a_launcher_that_starts_ranks_again_does_not_count():
    assert list(parts_in_a_child(TORCHELASTIC_RESTART_COUNT="1")) == ["recipe", "imports"]
