"""Which rank prints what, by LOG_RANK."""

import logging
import sys

import pytest

from titan_lite.logging import init_logging, log_ranks, logger


@pytest.fixture(autouse=True)
def restored_logger():
    handlers, propagate, level = logger.handlers[:], logger.propagate, logger.level
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)


@pytest.mark.parametrize(
    ("log_rank", "rank", "says", "begins"),
    [
        (None, 0, True, ""),
        (None, 1, False, "[rank 1] "),
        ("0", 0, True, ""),
        ("1", 0, False, "[rank 0] "),
        ("1", 1, True, "[rank 1] "),
        ("0,3", 0, True, "[rank 0] "),
        (" 0, 3", 3, True, "[rank 3] "),
        ("0,3", 13, False, "[rank 13] "),
    ],
)
def test_chosen_ranks_say_everything_and_the_others_warnings_and_errors(log_rank, rank, says, begins, monkeypatch, capsys):
    monkeypatch.delenv("LOG_RANK", raising=False)
    if log_rank is not None:
        monkeypatch.setenv("LOG_RANK", log_rank)
    init_logging(rank, world_size=16)
    logger.debug("too much")
    logger.info("step 1")
    logger.warning("slow")
    logger.error("stopped")
    printed = capsys.readouterr()
    words = [line.partition(" ")[2] for line in printed.out.splitlines()]  # without the time of day
    assert words == [f"{begins}{text}" for text in (["step 1"] if says else []) + ["slow", "stopped"]]
    assert printed.err == ""


def test_a_line_is_printed_once_however_often_logging_is_set_up(monkeypatch, capsys):
    monkeypatch.delenv("LOG_RANK", raising=False)
    root, another = logging.getLogger(), logging.StreamHandler(sys.stdout)  # a library that set up the root logger
    root.addHandler(another)
    try:
        init_logging(0, 2)
        init_logging(0, 2)
        logger.info("step 1")
    finally:
        root.removeHandler(another)
    assert capsys.readouterr().out.count("step 1") == 1


@pytest.mark.parametrize("value", ["", "all", "0,", "0;3", "0-3", "1.0", "-1", "0,2"])
def test_log_rank_that_is_no_list_of_ranks(value, monkeypatch):
    monkeypatch.setenv("LOG_RANK", value)
    for refuse in (lambda: log_ranks(2), lambda: init_logging(0, 2)):
        with pytest.raises(ValueError) as error:
            refuse()
        assert f"LOG_RANK={value}:" in str(error.value)
        assert "such as LOG_RANK=0" in str(error.value)
