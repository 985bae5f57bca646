"""The watchdog of a single rank; tests/integration/test_hangs.py has several."""

import json
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from plain_weights import PlainWeights
from tiny import DEBUG, NO_CHECKPOINT
from torch import nn

from titan_lite.compile.compile import compile_model
from titan_lite.compile.model_parts import TraceableModel
from titan_lite.compile.schedule import Schedule
from titan_lite.compile.settings import PassSettings
from titan_lite.config import Comm, Compile, load_config
from titan_lite.distributed.process_group import first_line
from titan_lite.resilience import TrainingError, watchdog
from titan_lite.resilience.watchdog import NO_LIMIT, Watchdog
from titan_lite.trainer import Trainer

GLOO = (
    "[/build/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:10673. This is"
    " typically caused by a remote worker crashing. Check the logs.\nand more"
)


def test_one_rank_alone_has_no_threads_and_tells_nobody():
    before = set(threading.enumerate())
    alone = Watchdog(Comm(), 0, 1)
    alone.start_phase("step 1", "train_timeout_seconds")
    assert set(threading.enumerate()) <= before
    assert alone._share(ValueError()) is None


def test_a_run_that_waits_for_its_first_batch_says_what_is_packed():
    alone = Watchdog(Comm(), 0, 1)
    alone.start_phase("step 1", "init_timeout_seconds")
    trainer = SimpleNamespace(
        layout=SimpleNamespace(seq_len=8192, sequences_at=lambda step: 120_000),
        step=1,
        dp_degree=2,
        watchdog=alone,
        compile_limit="init_timeout_seconds",
        next_batches=lambda: alone.phase_name,
    )
    assert Trainer.first_batches(trainer) == "packing 60,000 sequences of 8,192 tokens"
    assert alone.phase_name == "step 1"


def test_a_signal_in_a_long_step_waits_for_that_step(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    alone = Watchdog(Comm(), 0, 1)
    alone.start_phase("the first step", "init_timeout_seconds")
    alone.progress("step 7")
    now[0] = 112.0
    alone.progress("step 7")  # such as a microbatch
    trainer = SimpleNamespace(watchdog=alone, config=load_config(DEBUG, []))
    describe = Trainer.before_stop
    assert describe(trainer) == "step 7, which began 12 s ago, and a save"
    trainer.config = load_config(DEBUG, [*NO_CHECKPOINT])
    assert describe(trainer) == "step 7, which began 12 s ago"


def test_of_an_error_the_line_that_tells_is_kept():
    assert first_line(RuntimeError(GLOO)) == "Connection closed by peer [127.0.0.1]:10673"
    assert (
        first_line(ValueError("[1, 2] is no list of three\nof numbers"))
        == "[1, 2] is no list of three"
    )


def test_a_step_or_microbatch_is_progress_and_without_a_limit_nothing_hangs(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    one = Watchdog(Comm(init_timeout_seconds=5, train_timeout_seconds=3), 0, 1)
    one.start_phase("start", "init_timeout_seconds")
    now[0] = 106.0
    assert one.is_hanging()
    one.progress("step 1")
    assert not one.is_hanging()
    assert (one.phase_name, one.limit) == ("step 1", 5)
    now[0] = 110.0
    with one.phase("step 2", "train_timeout_seconds"):
        assert not one.is_hanging()
        now[0] = 114.0
        assert one.is_hanging()
    assert (one.phase_name, one.limit) == ("step 1", 5)
    assert not one.is_hanging()
    now[0] = 120.0
    assert one.is_hanging()
    one.disable()
    assert one.limit == NO_LIMIT
    assert not one.is_hanging()


def test_what_ends_a_rank_is_reported_in_words_and_the_rest_is_left_as_it_is(monkeypatch):
    one = Watchdog(Comm(), 0, 1)
    one.start_phase("start", "init_timeout_seconds")
    with pytest.raises(TrainingError, match=r"^no more disk$"), one.share_errors(OSError, KeyError):
        raise OSError("no more disk")
    assert one.limit == NO_LIMIT
    with pytest.raises(ValueError, match=r"^odd$"), one.share_errors(OSError):
        raise ValueError("odd")
    monkeypatch.setattr(one, "_share", lambda error: "stopped, since rank 1 failed")
    with pytest.raises(TrainingError, match=r"^stopped, since rank 1 failed$"), one.share_errors():
        raise RuntimeError(GLOO)


def test_what_cannot_be_known_in_time_is_not_waited_for():
    assert watchdog._call_within(60, lambda: 3) == 3
    ended = threading.Event()
    assert watchdog._call_within(0.01, ended.wait) is None
    ended.set()  # else the thread outlives the test

    def fails():
        raise dist.DistNetworkError("gone")

    assert watchdog._call_within(60, fails) is None


def test_a_record_tells_where_the_thread_is_that_trains(monkeypatch):
    one = Watchdog(Comm(), 0, 1)
    assert one.record()["code"].startswith("record (titan_lite/resilience/watchdog.py:")
    try:
        raise_here()
    except ValueError as error:
        one.store = SimpleNamespace(check=lambda keys: False)
        monkeypatch.setattr(watchdog, "is_communication_error", lambda error: True)
        monkeypatch.setattr(watchdog, "GRACE_AFTER_LOST_CONNECTION", 0.0)
        monkeypatch.setattr(one, "_end", lambda why, grace: None)
        one._share(error)
    assert one.record()["code"].startswith("raise_here (")


def raise_here():
    raise ValueError(sys.platform)


def test_collectives_over_gloo_count_beside_those_of_nccl(monkeypatch):
    traces = {"_dump_fr_trace_json": "gloo:barrier", "_dump_nccl_trace_json": "nccl:all_reduce"}
    for name, operation in traces.items():
        trace = json.dumps(
            {"pg_status": {"0": {"last_completed": operation}}, "entries": [operation]}
        )
        monkeypatch.setattr(
            watchdog.c10d, name, lambda entries, stacks, trace=trace: trace, raising=False
        )
    assert watchdog.read_flight_recorders(entries=True) == [
        {"pg_status": {"0": {"last_completed": operation}}, "entries": [operation]}
        for operation in traces.values()
    ]


def test_torch_compiling_is_progress_and_what_it_compiled_is_not():
    seen = []

    def backend(graph, inputs):
        seen.append(watchdog.compiler_position(sys._getframe()))
        seen.append(watchdog.compiler_position(sys._getframe()))
        return lambda *args: (
            seen.append(watchdog.compiler_position(sys._getframe())) or graph(*args)
        )

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    first, second, running = seen
    assert first is not None
    assert second not in (None, first)
    assert running is None


def test_compiling_a_model_is_progress():
    seen = []

    def look(*arguments):
        seen.append(watchdog.compiler_position(sys._getframe()))

    model = nn.Linear(2, 2)
    schedule = Schedule(PassSettings(Compile(enable=True, backend="aot_eager")))
    schedule.run = look
    compiled = compile_model(TraceableModel(model, PlainWeights(model)), schedule)
    compiled(torch.ones(2))
    look()
    *compiling, running = seen
    assert len(compiling) == 2
    assert None not in compiling
    assert running is None


def test_a_rank_that_does_not_notice_the_failure_of_another_ends(monkeypatch, caplog):
    ended = []
    monkeypatch.setattr(watchdog.Watchdog, "_exit", lambda self: ended.append(saved.is_set()))
    saved = threading.Event()
    one = Watchdog(Comm(), 0, 1)
    one._end_after("rank 1 failed: ValueError: odd")
    assert not ended  # it is disabled: the error has reached it
    monkeypatch.setattr(watchdog, "GRACE", 0.3)
    one.start_phase("step 1", "train_timeout_seconds")
    timer = threading.Timer(1, saved.set)  # a save in the background
    timer.start()
    one._end_after("rank 1 failed: ValueError: odd")
    assert ended == [True]


def refuse():
    raise dist.DistStoreError("refused")


def test_a_store_that_was_not_reached_is_named_with_this_ranks_record(monkeypatch, caplog, capfd):
    monkeypatch.setenv("MASTER_ADDR", "node0")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setattr(watchdog.faulthandler, "dump_traceback_later", lambda *_, **__: None)
    # else threads try, and outlive the test; one would cancel the stacks of conftest.py
    monkeypatch.setattr(watchdog, "_connect", refuse)
    monkeypatch.setattr(Watchdog, "_watch", lambda self: None)
    one = Watchdog(Comm(), 1, 2)
    monkeypatch.setattr(one, "_exit", lambda: None)
    one._end("rank 1 has made no progress", 0.0)
    assert "the store at node0:29500 does not answer" in caplog.text
    assert "Traceback" not in capfd.readouterr().err
