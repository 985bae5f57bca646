"""Environment variables of a run: a wrong one is named with its value."""

import os

import pytest

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
    told = "environment: LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set: use torchrun or "
    assert str(error.value).startswith(told)
    environment(WORLD_SIZE="2")
    with pytest.raises(ConfigError, match=r": RANK, LOCAL_RANK, .* not set"):
        check_environment()


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("RANK", "abc", "expected an integer"),
        ("RANK", "-1", "expected an integer"),
        ("RANK", "³", "expected an integer"),
        ("WORLD_SIZE", "2.0", "expected an integer"),
        ("WORLD_SIZE", "9" * 5000, "expected an integer"),
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
