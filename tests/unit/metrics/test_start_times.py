from titan_lite.metrics import start_times
from titan_lite.metrics.start_times import StartTimes


def test_parts_are_in_their_order_and_add_up(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(start_times, "perf_counter", lambda: now[0])
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
