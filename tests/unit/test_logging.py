"""Which rank prints what, by LOG_RANK; what libraries warn of; and what becomes an event."""

import ast
import inspect
import json
import logging
import os
import subprocess
import sys
import threading
import warnings
from contextlib import suppress
from datetime import datetime, timezone

import pytest
import torch.distributed as dist
from torch import profiler

from titan_lite import logging as module
from titan_lite.logging import (
    OF_GROUP,
    console,
    events,
    init_logging,
    log_ranks,
    logger,
    telling_if_slow,
)


@pytest.fixture(autouse=True)
def restored_logger():
    handlers, propagate, level = logger.handlers[:], logger.propagate, logger.level
    with warnings.catch_warnings():
        yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)
    console.setLevel(logging.NOTSET)
    console.to, console.is_lost = None, False
    console.is_of_first, console.held = True, None
    events.setLevel(logging.NOTSET)
    events.path, events.step = None, 0


def warn_twice():
    logger.warning("of the run")
    logger.warning("of the group", extra=OF_GROUP)
    logger.error("an error")


@pytest.mark.parametrize("is_first", [True, False])
def test_a_warning_of_the_run_is_printed_by_the_first_group(is_first, capsys):
    init_logging(rank=0, world_size=1, group=1)
    warn_twice()
    told = capsys.readouterr().out
    assert "of the run" not in told
    assert "[group 1] of the group" in told
    assert "[group 1] an error" in told
    console.show(is_first)  # once the group knows what it is
    assert ("[group 1] of the run" in capsys.readouterr().out) == is_first
    warn_twice()
    assert ("[group 1] of the run" in capsys.readouterr().out) == is_first
    console.show(True)  # others are lost
    assert capsys.readouterr().out == ""


def test_the_first_group_prints_at_once(capsys):
    init_logging(rank=0, world_size=1, group=0)
    warn_twice()
    assert "[group 0] of the run" in capsys.readouterr().out


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
def test_chosen_ranks_say_everything_and_the_others_warnings_and_errors(
    log_rank, rank, says, begins, monkeypatch, capsys
):
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
    assert words == [
        f"{begins}{text}" for text in (["step 1"] if says else []) + ["slow", "stopped"]
    ]
    assert printed.err == ""


def test_a_program_that_is_no_run_prints_whatever_log_rank_a_run_would_have(monkeypatch, capsys):
    for value in ("1", "all"):
        monkeypatch.setenv("LOG_RANK", value)
        init_logging()
        logger.info("told")
    assert [line.partition(" ")[2] for line in capsys.readouterr().out.splitlines()] == [
        "told",
        "told",
    ]


def test_a_line_is_printed_once_however_often_logging_is_set_up(monkeypatch, capsys):
    monkeypatch.delenv("LOG_RANK", raising=False)
    root, another = (
        logging.getLogger(),
        logging.StreamHandler(sys.stdout),
    )  # a library that set up the root logger
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


# What libraries warn of


def warn_of(*texts):
    for text in texts:
        for _ in range(2):
            warnings.warn(text, UserWarning, stacklevel=1)


@pytest.fixture(autouse=True)
def _no_choice_of_torchs_logs(monkeypatch):
    monkeypatch.setenv("TORCH_LOGS", "none")  # which is undone
    monkeypatch.delenv("TORCH_LOGS")


def test_torchs_own_log_has_errors_alone_on_a_rank_that_does_not_print():
    code = """
import logging, os
from titan_lite.logging import init_logging
for rank in 0, 1:
    init_logging(rank, world_size=2, all_warnings=False)
    print("TORCH_LOGS" in os.environ)
import torch
logging.getLogger("torch._inductor.utils").warning("too few SMs")
logging.getLogger("torch._inductor.utils").error("no compiler")
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout.split() == ["False", "True"]
    assert "no compiler" in found.stderr
    assert "too few SMs" not in found.stderr


@pytest.mark.parametrize(("rank", "said"), [(0, ["UserWarning: new"]), (1, [])])
def test_a_warning_is_a_line_once_on_the_ranks_that_print_and_what_is_harmless_is_none(
    rank, said, monkeypatch, capsys
):
    monkeypatch.delenv("LOG_RANK", raising=False)
    monkeypatch.setattr(module, "HARMLESS", ("UserWarning: known",))
    warnings.simplefilter("always")
    init_logging(rank, world_size=2, all_warnings=False)
    warn_of("new", "known")
    printed = capsys.readouterr()
    assert [line.split(" ", 1)[1].partition(" (")[0] for line in printed.out.splitlines()] == said
    assert printed.err == ""
    assert len(printed.out.splitlines()) == len(said)


def test_a_harmless_warning_with_one_more_word_is_shown(monkeypatch, capsys):
    monkeypatch.setattr(module, "HARMLESS", ("UserWarning: known", "FutureWarning: other"))
    warnings.simplefilter("always")
    init_logging(0, world_size=1, all_warnings=False)
    warn_of("known too", "other")
    assert capsys.readouterr().out.count("UserWarning: ") == 2


@pytest.mark.skipif(
    not hasattr(dist, "all_gather_single"), reason="these are the words of torch 2.13"
)
def test_the_harmless_warnings_are_those_of_torch():
    trees = [
        ast.parse(inspect.getsource(source))
        for source in (profiler.profiler, dist.distributed_c10d)
    ]
    texts = {
        node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)
    }
    assert {text.removeprefix("UserWarning: ") for text in module.HARMLESS} <= texts


@pytest.mark.parametrize("rank", [0, 1])
def test_all_warnings_can_be_seen_as_they_are(rank, monkeypatch, capsys):
    monkeypatch.setattr(module, "HARMLESS", ("UserWarning: known",))
    shown = []
    monkeypatch.setattr(
        warnings, "showwarning", lambda message, *rest, **more: shown.append(str(message))
    )
    warnings.simplefilter("always")
    init_logging(rank, world_size=2, all_warnings=True)
    warn_of("known")
    assert shown == ["known", "known"]


# events.jsonl


def kept(folder):
    path = folder / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_events_are_kept_with_time_and_step(tmp_path, capsys):
    init_logging(0, world_size=2)
    logger.warning("before there is a folder")
    events.keep(tmp_path, all_events=True)
    events.step = 7
    before = datetime.now(timezone.utc).replace(microsecond=0)  # the file has whole seconds
    logger.info("step 7  loss 1.0")
    logger.info("saved", extra={"event": "checkpoint", "step": 5})
    logger.info("on its way", extra={"event": "start"})
    logger.warning("a slow disk")
    found = kept(tmp_path)
    assert [(each["event"], each["step"], each["text"]) for each in found] == [
        ("checkpoint", 5, "saved"),
        ("start", 7, "on its way"),
        ("warning", 7, "a slow disk"),
    ]
    for each in found:
        assert before <= datetime.fromisoformat(each["time"]) <= datetime.now(timezone.utc)
    assert len(capsys.readouterr().out.splitlines()) == 5


def test_other_ranks_keep_errors_alone_and_whoever_prints_the_log(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LOG_RANK", "1")
    for rank in (0, 1):
        init_logging(rank, world_size=2)
        events.keep(tmp_path, all_events=rank == 0)
        logger.info("saved", extra={"event": "checkpoint"})
        logger.warning("slow")
        logger.error("hang")
    assert [each["event"] for each in kept(tmp_path)] == ["checkpoint", "warning", "error", "error"]
    words = [line.partition(" ")[2] for line in capsys.readouterr().out.splitlines()]
    assert words == [
        *(f"[rank 0] {word}" for word in ("slow", "hang")),
        *(f"[rank 1] {word}" for word in ("saved", "slow", "hang")),
    ]


def test_a_failure_is_an_event_of_the_first_rank(tmp_path):
    for rank in (0, 1):
        events.keep(tmp_path, all_events=rank == 0)
        events.step = 12
        with pytest.raises(ValueError, match="no such file"), events.failures():
            raise ValueError("no such file")
    (found,) = kept(tmp_path)
    assert (found["event"], found["step"], found["text"]) == (
        "failed",
        12,
        "ValueError: no such file",
    )


def test_without_a_folder_the_run_goes_on(tmp_path, capsys):
    init_logging(0, world_size=1)
    events.keep(tmp_path / "absent", all_events=True)
    logger.warning("slow")
    assert kept(tmp_path / "absent") == []
    assert "slow" in capsys.readouterr().out


def test_a_line_stands_above_what_else_is_drawn(capsys):
    init_logging(0, world_size=1)
    order = []

    class Around:
        def __enter__(self):
            order.append(capsys.readouterr().out)

        def __exit__(self, *_):
            order.append(capsys.readouterr().out)

    console.around = Around
    try:
        logger.info("saved")
    finally:
        del console.around
    assert order[0] == ""
    assert order[1].endswith(" saved\n")


# Streams that cannot be written


@pytest.mark.parametrize("place", ["full", "unread"])
def test_a_stream_that_cannot_be_written_costs_lines_of_the_log_and_is_told_once(place, capfd):
    reading, writing = os.pipe()
    os.close(reading)
    with suppress(OSError), open("/dev/full" if place == "full" else writing, "w") as stream:
        init_logging(0, world_size=1, stream=stream)
        for step in (1, 2):
            logger.info(f"step {step}")
    told = capfd.readouterr().err
    assert told.count("Logging error") == 1
    assert ("No space left on device" if place == "full" else "Broken pipe") in told


def test_what_takes_long_is_told_on_the_first_rank_until_it_ends(monkeypatch, capfd):
    lines = threading.Semaphore(0)
    write_line = module.write_line
    monkeypatch.setattr(module, "write_line", lambda line: (write_line(line), lines.release()))

    def telling():
        return [thread for thread in threading.enumerate() if thread.name == "slow"]

    with telling_if_slow("reading http://me:SECRET@host/a", seconds=(0.01, 0.02)):
        (thread,) = telling()
        for _ in range(4):
            assert lines.acquire(timeout=60)
    thread.join(60)
    assert not thread.is_alive()
    assert capfd.readouterr().err.splitlines()[:4] == [
        f"titan_lite: reading http://***@host/a has taken {seconds} s so far"
        for seconds in (0.01, 0.02, 0.04, 0.06)
    ]
    monkeypatch.setenv("RANK", "1")
    with telling_if_slow("reading", seconds=(0.01,)):
        assert telling() == []
