"""The watchdog of a single process; tests/integration/test_hangs.py has several ranks."""

import json
import sys
import threading

import pytest
import torch
from plain_weights import PlainWeights
from torch import nn

from titan_lite import progress
from titan_lite.compile.compile import compile_model
from titan_lite.compile.graph_passes import GraphPasses
from titan_lite.compile.model_parts import TraceableModel
from titan_lite.compile.settings import PassSettings
from titan_lite.config import Comm, Compile, Config
from titan_lite.features.watchdog import watchdog
from titan_lite.features.watchdog.keys import WatchdogKeys
from titan_lite.features.watchdog.watchdog import NO_LIMIT, Watchdog, WatchForHangs
from titan_lite.hooks import build_hooks

COMPILE = Compile(enable=True, backend="aot_eager")


@pytest.fixture(autouse=True)
def nobody_listens_afterwards(monkeypatch):
    """faulthandler is that of conftest.py."""
    monkeypatch.setattr(watchdog.faulthandler, "dump_traceback_later", lambda *_, **__: None)
    yield
    progress.report_to(progress.Listener())


def listening(comm=None):
    """A watchdog without threads."""
    one = Watchdog(comm or Comm(), 0, 1)
    progress.report_to(one)
    return one


def test_one_rank_alone_is_not_watched(monkeypatch):
    started = []
    monkeypatch.setattr(Watchdog, "start", lambda self: started.append(self.world_size))
    monkeypatch.setenv("RANK", "0")
    for world_size in ("1", "2"):
        monkeypatch.setenv("WORLD_SIZE", world_size)
        WatchForHangs(Comm()).on_start()
    assert started == [2]


def test_a_run_without_it_has_none_of_its_hooks(tmp_path):
    with_it = {type(hook).__name__ for hook in build_hooks(Config(), 0, tmp_path)}
    without = Config(comm=WatchdogKeys.of(Config()).replace(watchdog=False))
    others = {type(hook).__name__ for hook in build_hooks(without, 0, tmp_path)}
    assert with_it - others == {"WatchForHangs", "NameStragglers"}


def test_a_step_or_microbatch_is_progress_and_without_a_limit_nothing_hangs(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    one = listening(Comm(init_timeout_seconds=5, train_timeout_seconds=3))
    progress.start_phase("start", "init_timeout_seconds")
    now[0] = 106.0
    assert one.is_hanging()
    progress.beat("step 1")
    assert not one.is_hanging()
    assert one.limit == 5
    now[0] = 110.0
    with progress.phase("step 2", "train_timeout_seconds"):
        assert not one.is_hanging()
        now[0] = 114.0
        assert one.is_hanging()
    assert one.limit == 5
    assert not one.is_hanging()
    now[0] = 120.0
    assert one.is_hanging()
    progress.end_phases()
    assert one.limit == NO_LIMIT
    assert not one.is_hanging()


def test_a_watchdog_hears_of_the_phase_that_has_begun_before_it():
    progress.start_phase("start", "init_timeout_seconds")
    assert listening(Comm(init_timeout_seconds=7)).limit == 7


def test_a_record_tells_where_the_thread_is_that_trains(monkeypatch):
    one = listening()
    place = "record (titan_lite/features/watchdog/watchdog.py:"
    assert one.record()["code"].startswith(place)
    ends = []
    monkeypatch.setattr(one, "_end", lambda reason, grace: ends.append(reason))
    progress.start_phase("step 3", "train_timeout_seconds")
    try:
        raise_here()
    except ValueError as error:
        progress.lost_rank(error)
    assert ends == [f"a collective of rank 0 failed in step 3: {sys.platform}"]
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


def test_compiling_a_model_is_progress():
    seen = []
    one = listening()

    def look(*arguments):
        seen.append(one._compiler_position())

    model = nn.Linear(2, 2)
    schedule = GraphPasses(PassSettings(COMPILE))
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
    one = listening()
    progress.end_phases()
    one._end_after("rank 1 failed: ValueError: odd")
    assert not ended  # it is disabled: the error has reached it
    monkeypatch.setattr(watchdog, "GRACE", 0.3)
    progress.start_phase("step 1", "train_timeout_seconds")
    timer = threading.Timer(1, saved.set)  # a save in the background
    timer.start()
    one._end_after("rank 1 failed: ValueError: odd")
    assert ended == [True]


def test_a_store_that_was_not_reached_is_named_with_this_ranks_record(monkeypatch, caplog, capfd):
    monkeypatch.setenv("MASTER_ADDR", "node0")
    monkeypatch.setenv("MASTER_PORT", "29500")
    one = Watchdog(Comm(), 1, 2)
    monkeypatch.setattr(one, "_exit", lambda: None)
    one._end("rank 1 has made no progress", 0.0)
    assert "the store at node0:29500 does not answer" in caplog.text
    assert "Traceback" not in capfd.readouterr().err
