"""Environment variables of a run: each wrong one is named with its value, all of them in one line."""

import os

import pytest

from titan_lite import environment as module
from titan_lite.config import ConfigError
from titan_lite.environment import (
    ALONE,
    WORLD,
    check_environment,
    number,
)

LAUNCHED = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


@pytest.fixture
def environment(monkeypatch):
    """A function that sets these variables and no other one of a run's."""

    def set_to(**variables):
        for name in list(os.environ):
            if name in WORLD or name == "LOG_RANK" or name.startswith("TORCHELASTIC_"):
                monkeypatch.delenv(name)
        for name in WORLD:
            monkeypatch.setenv(
                name, variables.get(name, "")
            )  # to be restored after the check has set it
            monkeypatch.delenv(name) if name not in variables else None
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_to


def test_a_launchers(environment):
    environment(
        **LAUNCHED, LOG_RANK="0,3", TORCHELASTIC_RESTART_COUNT="1", TORCHELASTIC_MAX_RESTARTS="20"
    )
    assert check_environment() == (3, 4)
    assert os.environ["MASTER_ADDR"] == "127.0.0.1"


@pytest.mark.parametrize(
    "left",
    [{}, {"MASTER_ADDR": "elsewhere"}, {"RANK": "0"}, {"WORLD_SIZE": "1", "LOCAL_RANK": "0"}],
)
def test_a_process_alone_gets_what_a_launcher_sets(left, environment):
    environment(**left)
    assert check_environment() == (0, 1)
    assert {name: os.environ[name] for name in ALONE} == ALONE
    assert os.environ["MASTER_ADDR"] == "127.0.0.1"
    assert int(os.environ["MASTER_PORT"]) > 0


def test_one_that_lacks_some_is_told_which(environment):
    environment(RANK="1", WORLD_SIZE="2")
    with pytest.raises(ConfigError) as error:
        check_environment()
    told = (
        "environment: RANK=1 WORLD_SIZE=2 without LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,"
        " MASTER_PORT: use torchrun or "
    )
    assert str(error.value).startswith(told)
    environment(WORLD_SIZE="2")
    with pytest.raises(ConfigError, match=r"WORLD_SIZE=2 without RANK, LOCAL_RANK"):
        check_environment()


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("RANK", "abc", "expected an integer"),
        ("RANK", "-1", "expected an integer"),
        ("RANK", "4", "expected less than WORLD_SIZE=4"),
        ("RANK", "³", "expected an integer"),
        ("WORLD_SIZE", "2.0", "expected an integer"),
        ("WORLD_SIZE", "9" * 5000, "expected an integer"),
        ("LOCAL_RANK", "2", "LOCAL_WORLD_SIZE=2"),
        ("LOCAL_WORLD_SIZE", "8", "at most WORLD_SIZE=4"),
        ("MASTER_PORT", "http", "expected an integer"),
        ("MASTER_PORT", "65536", "expected a port"),
        ("TORCHELASTIC_RESTART_COUNT", "once", "expected an integer"),
        ("TORCHELASTIC_MAX_RESTARTS", "x", "expected an integer"),
        ("LOG_RANK", "7", "use ranks below 4"),
        ("LOG_RANK", "³", "use ranks below 4"),
        ("LOG_RANK", "9" * 5000, "use ranks below 4"),
    ],
)
def test_a_wrong_one_is_named_with_its_value(name, value, why, environment):
    environment(**{**LAUNCHED, name: value})
    with pytest.raises(ConfigError) as error:
        check_environment()
    assert f"{name}={value}" in str(error.value)
    assert why in str(error.value)
    assert "\n" not in str(error.value)


def test_one_that_alone_counts(environment):
    environment(WORLD_SIZE="8")
    assert (number("WORLD_SIZE", 1), number("RANK", 0)) == (8, 0)
    environment(RANK="abc")
    with pytest.raises(ConfigError, match="RANK=abc: expected an integer"):
        number("RANK", 0)


def test_several_are_told_together(environment):
    environment(**{**LAUNCHED, "RANK": "a", "LOCAL_RANK": "b", "LOG_RANK": "c"})
    with pytest.raises(ConfigError) as error:
        check_environment()
    assert all(part in str(error.value) for part in ("RANK=a: ", "LOCAL_RANK=b: ", "LOG_RANK=c: "))


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 300, "a..b", "[::1"])
def test_a_host_of_rank_0_that_is_not_known(host, environment):
    environment(**{**LAUNCHED, "MASTER_ADDR": host})
    with pytest.raises(ConfigError) as error:
        check_environment()
    assert str(error.value).startswith(f"MASTER_ADDR={host}: this node knows no such host")


def test_a_machine_without_a_loopback_is_told_in_one_line(monkeypatch):
    monkeypatch.setattr(module, "LOOPBACK", "192.0.2.1")  # of no machine
    with pytest.raises(ConfigError, match=r"no loopback: 192\.0\.2\.1 cannot be used .* lo up"):
        module.loopback_port()
