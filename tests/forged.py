"""Files as an attacker, another program or a failing disk leaves them, for readers that give the data or one line.

fuzz(100, mutated(document), lambda forged: read(written(forged)))     # Counter({"one line": 93, "read": 7})
"""

import copy
import json
import resource
import signal
from collections import Counter
from contextlib import contextmanager

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from titan_lite.config import ConfigError

MOST_SECONDS, MOST_MIB = 60, 400  # that a reader of a small file may take, and more than before


def nested(levels):
    value = []
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


ODD = [
    None,
    True,
    False,
    -5,
    -1,
    0,
    1,
    2,
    10**6,
    2**30 - 1,
    2**31,
    2**62,
    2**63,
    2**200,
    10**400,
    0.5,
    -0.5,
    1e-320,
    1e308,
    -1e308,
]
ODD += [
    float("inf"),
    float("-inf"),
    float("nan"),
    "",
    "x",
    "1",
    "..",
    ".",
    "../x",
    "/etc/passwd",
    "a\0b",
    "\ud800",
    "x" * 5000,
    "\n",
]
ODD += [[], {}, [[]], [1], ["x"], {"a": 1}, {"x": None}, nested(20), nested(200)]
VALUES = st.sampled_from(ODD) | st.integers() | st.floats() | st.text(max_size=5)


def spots(value):
    """(container, key) of every value within."""
    for key in (
        (value if isinstance(value, dict) else range(len(value)))
        if isinstance(value, dict | list)
        else ()
    ):
        yield value, key
        yield from spots(value[key])


@st.composite
def mutated(draw, value, most=2):
    """The object with one or some of its values replaced, left out, or put beside another."""
    value = {"": copy.deepcopy(value)}
    for _ in range(draw(st.integers(1, most))):
        found = list(spots(value))
        container, key = found[draw(st.integers(0, len(found) - 1))]
        how = draw(st.sampled_from(("replace", "replace", "leave out", "add")))
        if how == "replace" or container is value:
            container[key] = copy.deepcopy(draw(VALUES))
        elif how == "leave out":
            del container[key]
        elif isinstance(container, dict):
            container[
                draw(st.sampled_from(("", "x", "0", "..", "/etc/passwd", "a\0b", "\ud800")))
            ] = copy.deepcopy(draw(VALUES))
        else:
            container.append(copy.deepcopy(draw(VALUES)))
    return value[""]


@st.composite
def damaged(draw, content):
    """Bytes, cut short, grown, or with some of them replaced; or any others."""
    how = draw(st.sampled_from(("replace", "replace", "replace", "cut", "insert", "any")))
    at = draw(st.integers(0, max(0, len(content) - 1)))
    some = draw(
        st.binary(min_size=1, max_size=9)
        | st.sampled_from([b"\xff" * 8, b"\0" * 8, b"[" * 9999, b"9" * 5000, b"-1", b"1e999"])
    )
    if how == "any":
        return some
    return (
        content[:at]
        if how == "cut"
        else content[:at] + some + content[at + len(some) * (how == "replace") :]
    )


def as_json(value):
    return json.dumps(value, indent=1)


@contextmanager
def in_time():
    def late(*_):
        raise AssertionError(f"after {MOST_SECONDS} s it has not ended")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, MOST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 2**10


def fuzz(examples, strategy, read, *, error=ConfigError, lines=1):
    """Counts of what came of so many forged inputs; anything but the data or an `error` of so many lines fails the test."""
    outcomes = Counter()

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def try_one(forged):
        before = peak_mib()
        told = ""
        try:
            with in_time():
                read(forged)
        except error as wrong:
            told = str(wrong) or "nothing"
        outcomes["one line" if told else "read"] += 1
        assert told != "nothing"
        assert told.count("\n") < lines
        assert len(told) < 4000
        assert peak_mib() - before < MOST_MIB

    try_one()
    assert outcomes["one line"]
    return outcomes
