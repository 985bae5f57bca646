"""Lines about a search that goes on, and durations in words."""

import sys

import pytest

from titan_lite.plan import progress
from titan_lite.plan.progress import Progress, in_units


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_elsewhere_a_plain_line_now_and_then(clock, capsys):
    one = Progress()
    one.show("planned 0 of 4", 0.0)
    clock[0] += 1
    one.show("planned 0 of 4", 0.1)
    clock[0] += 59
    one.show("planned 2 of 4", 0.5, "5 tokens/s per GPU: tp 8")
    one.close()
    out, err = capsys.readouterr()
    assert (out, err.splitlines()) == (
        "",
        [
            "planned 0 of 4, 0 seconds",
            "planned 2 of 4, 60 seconds of about 2 minutes; best so far 5 tokens/s per GPU: tp 8",
        ],
    )


def test_on_a_terminal_one_line_is_rewritten(clock, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "20")
    one = Progress()
    one.show("planned 0 of 4", 0.0)
    one.show("planned 1 of 4", 0.25, "something that is too long")
    one.close()
    assert (
        capsys.readouterr().err == "\r\033[Kplanned 0 of 4, 0 s\r\033[Kplanned 1 of 4, 0 s\r\033[K"
    )


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        ((0.545, 0.577), "0.545 to 0.577 seconds"),
        ((119.0,), "119 seconds"),
        ((1365.0, 1814.4), "22.8 to 30.2 minutes"),
        ((51926.0, 67133.0), "14.4 to 18.6 hours"),
        ((86400 * 2.0,), "2 days"),
        ((86400 * 900.0, 86400 * 1234.0), "900 to 1,234 days"),
    ],
)
def test_a_duration_has_the_unit_that_fits(seconds, words):
    assert in_units(*seconds) == words
