"""Phases of a run, and what the trainer tells of them."""

from types import SimpleNamespace

import pytest
from tiny import DEBUG, NO_CHECKPOINT

from titan_lite import progress
from titan_lite.config import load_config
from titan_lite.trainer import Trainer


class Recorder(progress.Listener):
    def __init__(self):
        self.heard = []

    def on_phase(self, phase):
        self.heard.append((phase.name, phase.limit_key))

    def on_beat(self):
        self.heard.append("beat")

    def on_lost_rank(self, error):
        self.heard.append(str(error))


@pytest.fixture(autouse=True)
def recorder():
    progress.start_phase("start", "init_timeout_seconds")
    recorder = Recorder()
    progress.report_to(recorder)
    yield recorder
    progress.report_to(progress.Listener())


def test_a_listener_hears_of_phases_and_beats_and_the_one_before_goes_on(recorder):
    progress.beat("step 1")
    with progress.phase(progress.COMPILING):
        progress.beat()
        with progress.phase("save", "compile_timeout_seconds"):
            pass
    progress.lost_rank(ValueError("lost"))
    progress.end_phases()
    assert recorder.heard == [
        ("start", "init_timeout_seconds"),
        "beat",
        ("compiling", "init_timeout_seconds"),
        "beat",
        ("save", "compile_timeout_seconds"),
        ("compiling", "init_timeout_seconds"),
        ("step 1", "init_timeout_seconds"),
        "lost",
        ("step 1", ""),
    ]


def test_after_an_error_reports_name_its_phase():
    with pytest.raises(ValueError, match="full"), progress.phase("save"):
        raise ValueError("full")
    assert progress.current.name == "save"


def test_a_run_that_waits_for_its_first_batch_says_what_is_packed():
    trainer = SimpleNamespace(
        layout=SimpleNamespace(seq_len=8192, sequences_per_step=120_000),
        dp_degree=2,
        compile_limit="init_timeout_seconds",
        replica_groups=SimpleNamespace(next_batches=lambda: progress.current.name),
    )
    assert Trainer.first_batches(trainer) == "packing 60,000 sequences of 8,192 tokens"
    assert progress.current.name == "start"


@pytest.mark.parametrize(("option", "key"), [("no-enable", "init"), ("enable", "compile")])
def test_what_may_compile_has_a_limit_of_its_own(option, key):
    trainer = SimpleNamespace(config=load_config(DEBUG, [f"--compile.{option}"]))
    assert Trainer.compile_limit.fget(trainer) == f"{key}_timeout_seconds"


def test_a_signal_in_a_long_step_waits_for_that_step(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    progress.start_phase("the first step", "init_timeout_seconds")
    progress.beat("step 7")
    now[0] = 112.0
    progress.beat("step 7")  # such as a microbatch
    with progress.phase("validation"):
        pass
    trainer = SimpleNamespace(config=load_config(DEBUG, []))
    describe = Trainer.before_stop
    assert describe(trainer) == "step 7, which began 12 s ago, and a save"
    trainer.config = load_config(DEBUG, [*NO_CHECKPOINT])
    assert describe(trainer) == "step 7, which began 12 s ago"
