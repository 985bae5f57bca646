"""torchrun as launch.py calls it, with ranks that do not train: what they get, whether they start
again, the exit code.
"""

import json
import os
import pty
import re
import signal
import time

import pytest
from commands import ENVIRONMENT, Job, launcher, ranks_of
from descendants import until_ended

RANK = """
import os, sys, time
from pathlib import Path
from titan_lite.resilience import exit_code
from titan_lite.resilience import signals

# signals.write_line writes a line at once: print of two ranks may mix theirs
def train(rank, how, seconds):
    signals.listen()
    signals.write_line("listening")
    if how == "start":
        time.sleep(60)
    signals.end_start()
    exit_code.record(exit_code.FAILED)
    signals.write_line("training")
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    Path(__file__).with_name(f"{attempt}-{rank}").touch()
    while how in ("stop", "fail to save") and not signals.received():
        time.sleep(0.05)
    if how == "stop":
        time.sleep(seconds)  # saves
        signals.write_line(f"saved after {signals.received()}")
        return exit_code.STOPPED
    if how == "kill" and rank == 1:
        while not Path(__file__).with_name(f"{attempt}-0").exists():  # until the other trains, too
            time.sleep(0.05)
        os.kill(os.getpid(), 9)
    if how == "kill":
        while not signals.received():  # torchrun's, after the death of the other
            time.sleep(0.05)
        return exit_code.FAILED
    return exit_code.FAILED if how == "fail to save" else int(how)

def main():
    if exit_code.has_ended():
        signals.write_line("nothing to do")
        return 0
    return exit_code.record_and_translate(train(int(os.environ["RANK"]), sys.argv[1], float(sys.argv[2])))

exit_code.end_with(main)
"""
SIGNALS = ["SIGTERM", "SIGUSR1", "SIGHUP"]  # which change nothing after the first one


@pytest.fixture
def launch(tmp_path):
    """Start two ranks that do as RANK says."""
    (tmp_path / "rank.py").write_text(RANK)

    def start(how, seconds=0, **environment):
        command = launcher(2, tmp_path / "rank.py", how, seconds, restarts=1)
        return Job(tmp_path / "log", *command, **environment)

    return start


def test_signals_reach_the_ranks_once_which_save_and_are_not_restarted(launch):
    job = launch("stop", seconds=1)
    job.until(r"(?s)training.*training")
    while job.process.poll() is None:  # hundreds, until it has ended
        for name in SIGNALS:
            job.process.send_signal(getattr(signal, name))
        time.sleep(0.001)
    assert job.ended() == 75
    first, second = re.findall(r"saved after (\w+)\n", job.output)
    assert first == second
    assert first in SIGNALS
    assert job.output.count("stopping") == job.output.count("listening") // 2 == 1
    assert "Traceback" not in job.output


@pytest.mark.parametrize(
    "names", [["SIGINT", "SIGINT"], ["SIGTERM", "SIGINT"], ["SIGTERM", "SIGQUIT"], ["SIGQUIT"]]
)
def test_who_does_not_wait_for_the_save_ends_all_ranks_at_once(names, launch):
    job = launch("stop", seconds=10_000)
    job.until(r"(?s)training.*training")
    *first, last = names
    ranks = ranks_of(job.process)
    for name in first:
        job.process.send_signal(getattr(signal, name))
        job.until(
            f"{name}: stopping; SIGINT \\(Ctrl-C\\) from now on, or SIGQUIT, ends the run at once"
        )
    job.process.send_signal(getattr(signal, last))
    assert job.ended() == 75
    assert f"titan_lite: {last}: ended at once, without a save\n" in job.output
    assert "saved after" not in job.output
    assert len(ranks) == 2
    until_ended(ranks)


def test_a_terminal_that_closes_stops_the_run_saved(tmp_path):
    """Its processes get SIGHUP, and can write no more to where they were started."""
    (tmp_path / "rank.py").write_text(RANK)
    command = launcher(2, tmp_path / "rank.py", "stop", 1)
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe(command[0], list(map(str, command)), {**os.environ, **ENVIRONMENT})
    output = b""
    while output.count(b"training") < 2:
        output += os.read(terminal, 10_000)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 75


@pytest.mark.release
def test_a_signal_before_a_step_has_nothing_to_save(launch):
    job = launch("start")
    job.until("(?s)listening.*listening")
    job.process.send_signal(signal.SIGTERM)
    assert job.ended() == 75
    assert job.output.count("stopped at the start, with nothing to save") == 2


@pytest.mark.release
def test_a_save_that_fails_is_not_told_as_saved(launch):
    job = launch("fail to save")
    job.until(r"(?s)training.*training")
    job.process.send_signal(signal.SIGTERM)
    assert job.ended() == 1


@pytest.mark.parametrize(
    ("seconds", "limit", "code"),
    [
        (600, 1, 1),  # longer than it may take to kill the ranks
        pytest.param(35, None, 75, marks=pytest.mark.release),  # longer than torchrun's default
    ],
)
def test_a_save_has_an_hour_where_the_user_sets_no_limit(seconds, limit, code, launch):
    job = launch("stop", seconds, TORCH_ELASTIC_SHUTDOWN_TIMEOUT=limit)
    job.until(r"(?s)training.*training")
    job.process.send_signal(signal.SIGTERM)
    assert job.ended() == code
    assert job.output.count("saved after SIGTERM") == (2 if code == 75 else 0)


def test_a_rank_that_is_killed_is_named_and_all_start_again_as_often_as_asked_for(launch, tmp_path):
    job = launch("kill", EVENTS_OF=tmp_path)
    assert job.ended() == 1
    assert job.output.count("training") == 4
    error = "error: rank 1 was killed by SIGKILL; rank 0 ended with exit code 1\n"
    assert job.output.count("error: ") == job.output.count(error) == 1
    assert "failed (exitcode" not in job.output  # torchrun's line
    kept = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    of_attempt = ("killed", 0, "rank 1 was killed by SIGKILL")
    assert [(each["event"], each["step"], each["text"]) for each in kept] == 2 * [of_attempt]


def test_what_would_end_there_again_is_not_started_again(launch):
    job = launch("2")
    assert job.ended() == 2
    assert job.output.count("training") in (1, 2)
    assert job.output.count("nothing to do") in (
        2,
        3,
    )  # also a rank of the first attempt that is late
    assert "error: " not in job.output
