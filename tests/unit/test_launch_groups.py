"""Groups that fail are started again, as long as the run goes on."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from commands import Job
from descendants import runs, until_ended
from tiny import DEBUG

from titan_lite import launch_groups as module
from titan_lite.config import load_config
from titan_lite.launch_groups import GroupProcesses
from titan_lite.resilience.exit_code import FAILED, STOPPED, TRAINED, WRONG_INPUT


class Programs(GroupProcesses):
    """Groups that are programs of Python instead of ranks, without a lighthouse.

    programs: of each group those that it runs one after another, the last one again and again.
    """

    def __init__(self, folder, programs):
        options = [
            f"--job.dump_folder={folder}",
            "--fault_tolerance.replica_groups=2",
            "--fault_tolerance.lighthouse=http://127.0.0.1:1",
        ]
        super().__init__(options, load_config(DEBUG, options), [()] * len(programs))
        self.programs = programs
        self.started = []

    def start_due(self):
        for group, when in list(self.starts_at.items()):
            if time.monotonic() < when:
                continue
            del self.starts_at[group]
            self.started.append(group)
            code, *others = self.programs[group]
            self.programs[group] = others or [code]
            self.running[group] = subprocess.Popen([sys.executable, "-c", code])


WAITS = "import time; time.sleep(600)"
TRAINS = "pass"
CODE = "raise SystemExit({})"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(module, "MAX_DELAY", 0.0)
    monkeypatch.setattr(module, "CHECK_INTERVAL", 0.02)
    handlers = {number: signal.getsignal(number) for number in module.STOPPING}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def ended(folder, *programs):
    groups = Programs(folder, [list(each) for each in programs])
    return groups.run(), groups


def until_there(path):
    """The program of a group that waits for a file."""
    return f"import os, time\nwhile not os.path.exists({str(path)!r}): time.sleep(0.02)"


def step_of(folder, group, step):
    """The program of a group that begins a step, and fails."""
    path = (folder / f"copy-{group}" if group else folder) / "restarts.json"
    path.parent.mkdir(exist_ok=True, parents=True)
    text = json.dumps({"0": step})
    return f"open({str(path)!r}, 'w').write({text!r}); raise SystemExit(1)"


def test_a_group_that_fails_is_started_again(tmp_path, capfd):
    back = tmp_path / "back"
    trains = [until_there(back)]
    code, groups = ended(tmp_path, trains, [CODE.format(1), f"open({str(back)!r}, 'w')"])
    assert code == TRAINED
    assert sorted(groups.started) == [0, 1, 1]
    assert (
        "titan_lite: group 1 has failed (exit code 1): started again in 0 s"
        in capfd.readouterr().err
    )


def test_groups_that_fail_without_a_step_end_the_run(tmp_path, capfd):
    code, groups = ended(tmp_path, [WAITS], [CODE.format(1)])
    assert code == FAILED
    assert groups.started.count(1) == 3 * 2 + 1
    assert "error: groups have failed 7 times without a further step" in capfd.readouterr().err


def test_groups_that_fail_while_the_run_goes_on_are_started_again(tmp_path):
    steps = [step_of(tmp_path, 1, step) for step in range(1, 12)]
    back = tmp_path / "back"
    trains = [until_there(back)]
    code, groups = ended(tmp_path, trains, [*steps, f"open({str(back)!r}, 'w')"])
    assert code == TRAINED
    assert groups.started.count(1) == 12


def test_steps_that_are_taken_again_from_a_checkpoint_are_no_progress(tmp_path):
    """Such as those before a save that fails on every group."""
    programs = [step_of(tmp_path, 1, step) for step in (13, 10, 12, 13) * 3]
    code, groups = ended(tmp_path, [WAITS], programs)
    assert code == FAILED
    assert groups.started.count(1) == 3 * 2 + 1


def test_when_one_group_has_trained_none_is_started_again(tmp_path):
    waits = f"{until_there(tmp_path / 'trained')}\nraise SystemExit(1)"
    groups = Programs(tmp_path, [[TRAINS], [waits]])
    collect = groups.collect

    def note():
        collect()
        if 0 in groups.codes:
            (tmp_path / "trained").touch()

    groups.collect = note
    assert groups.run() == TRAINED
    assert groups.codes == {0: TRAINED, 1: FAILED}
    assert sorted(groups.started) == [0, 1]


@pytest.mark.parametrize(("saves", "ends"), [(True, False), (False, True)])
def test_without_checkpoints_a_group_that_starts_ends_with_the_run(saves, ends, tmp_path):
    """With them it finds the last step on disk."""
    groups = Programs(tmp_path, [[], []])
    groups.saves = saves
    sent = []
    process = SimpleNamespace(send_signal=sent.append)
    groups.running = {0: process, 1: process}
    begun = groups.file_of_steps(1)
    begun.parent.mkdir()
    begun.touch()
    groups.end_starts()
    assert groups.starts_at == {}
    assert sent == [signal.SIGTERM] * ends


@pytest.mark.parametrize(
    ("codes", "received", "code"),
    [
        ({0: FAILED, 1: TRAINED}, 0, TRAINED),
        ({0: FAILED, 1: STOPPED}, signal.SIGTERM, STOPPED),
        ({0: FAILED, 1: FAILED}, signal.SIGTERM, FAILED),  # neither could save
        ({}, signal.SIGTERM, STOPPED),
    ],
)
def test_the_run_ends_as_the_group_that_has_found_its_last_step_on_disk(
    codes, received, code, tmp_path
):
    groups = Programs(tmp_path, [[], []])
    groups.codes = codes
    groups.signal = received
    assert groups.code() == code


def test_wrong_input_ends_all_groups_before_the_run_has_begun(tmp_path):
    assert ended(tmp_path, [WAITS], [CODE.format(2)])[0] == WRONG_INPUT


def test_a_group_of_another_recipe_does_not_end_the_run(tmp_path):
    step_of(tmp_path, 0, 5)
    (tmp_path / "restarts.json").write_text('{"0": 5}')
    groups = Programs(tmp_path, [[until_there(tmp_path / "noticed")], [CODE.format(2)]])
    collect = groups.collect

    def note():
        collect()
        if 1 in groups.codes:
            (tmp_path / "noticed").touch()

    groups.collect = note
    assert groups.run() == TRAINED
    assert groups.codes == {0: TRAINED, 1: WRONG_INPUT}
    assert sorted(groups.started) == [0, 1]


# A group whose rank saves for ever, in a session of its own as torchrun's
SAVING_COPY = """
import os, signal, subprocess, sys, time
if sys.argv[-1] != "rank":
    subprocess.Popen([__file__, "rank"], start_new_session=True)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
print("saving", os.getpid(), flush=True)
time.sleep(10_000)
"""
SUPERVISOR = """
import sys
from titan_lite import launch
from titan_lite.config import load_config
from titan_lite.launch_groups import GroupProcesses

recipe, folder, program = sys.argv[1:]
options = [f"--job.dump_folder={folder}", "--fault_tolerance.replica_groups=2"]
options += ["--fault_tolerance.lighthouse=http://127.0.0.1:1"]
launch.listen()
groups = GroupProcesses(options, load_config(recipe, options), [()] * 2)
sys.executable = program  # of groups
sys.exit(groups.run())
"""


def test_a_second_interrupt_ends_all_groups_at_once(tmp_path):
    program = tmp_path / "group"
    program.write_text(f"#!{sys.executable}{SAVING_COPY}")
    program.chmod(0o700)
    command = [sys.executable, "-c", SUPERVISOR, DEBUG, tmp_path, program]
    job = Job(tmp_path / "log", *command, session=True)
    job.until(r"(saving \d+\s+){4}")
    processes = [int(pid) for pid in re.findall(r"saving (\d+)", job.output)]
    os.killpg(job.process.pid, signal.SIGINT)  # as a terminal does
    job.until("SIGINT: stopping")
    assert all(map(runs, processes))
    os.killpg(job.process.pid, signal.SIGINT)
    assert job.ended() == STOPPED
    until_ended(processes)


def test_a_signal_stops_all_groups(tmp_path):
    ready = [tmp_path / f"ready-{group}" for group in range(2)]
    # by no exception, which would be lost where it meets the end of an object
    ends = "import os, signal; signal.signal(15, lambda *_: os._exit(75)); open({!r}, 'w'); {}"
    groups = Programs(tmp_path, [[ends.format(str(path), WAITS)] for path in ready])
    groups.signal = signal.SIGTERM
    real = groups.stop

    def later(number):
        while len(groups.running) < 2:
            groups.start_due()
        while not all(path.exists() for path in ready):
            time.sleep(0.02)
        real(number)

    groups.stop = later
    assert groups.run() == STOPPED
    assert groups.codes == {0: STOPPED, 1: STOPPED}
