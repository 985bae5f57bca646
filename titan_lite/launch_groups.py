"""Start the groups of a run with fault_tolerance on this machine, and their lighthouse; start a
group that is lost again while the others train.

    NCOPIES=2 ./run_train.sh                      # two groups of the debug model
    GroupProcesses(arguments, config, devices).run()            # the exit code of the run

Each group is a launcher of its own (launch.py), with its number in COPY. A group on another machine
is started there by COPY=1 ./run_train.sh, with the address of a lighthouse; then whatever has
started it starts it again.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from titan_lite.config import Config
from titan_lite.config.sections import LIGHTHOUSE
from titan_lite.environment import COPY, LOOPBACK, SUPERVISOR, folder_of_group, loopback_port
from titan_lite.resilience import exit_code
from titan_lite.resilience.restarts import FILE_OF_STEPS
from titan_lite.resilience.signals import STOPPING, write_line

CHECK_INTERVAL = 0.2  # seconds between looks at processes
MAX_DELAY = 60.0  # seconds before a group that fails again and again is started again
LONG = 60.0  # seconds: a group that has run so long was not started in vain
LIGHTHOUSE_DELAY = 5.0  # seconds from one start of the lighthouse to the next
FAILURES = 3  # of each group without a step of the run between them; then the run has failed


class GroupProcesses:
    """The processes of a run's groups, and that of their lighthouse.

    devices: for each group the GPUs that it uses, by CUDA's names; () without GPUs.
    """

    def __init__(self, arguments: Sequence[str], config: Config, devices: Sequence[Sequence[str]]):
        self.arguments = arguments
        self.settings = config.fault_tolerance
        self.saves = config.checkpoint.enable
        self.folder = Path(config.job.dump_folder)
        self.devices = devices
        self.port = loopback_port()
        self.lighthouse: subprocess.Popen | None = None
        self.lighthouse_starts_at = 0.0  # again, at the earliest
        self.running: dict[int, subprocess.Popen] = {}  # by number of the group
        self.starts_at = dict.fromkeys(range(len(devices)), 0.0)  # of groups that are to be started
        self.codes: dict[int, int] = {}  # of groups that have ended for good
        self.begun: dict[int, float] = {}  # when a running group was started
        self.in_a_row = [0] * len(devices)  # failures of each group soon after its start
        self.step = 0  # the newest that a living group had begun when one failed
        self.failures = 0  # of all groups since then
        self.has_failed = False  # the run does not go on
        self.signal = 0  # received; 0: none
        self.stopping = False

    def run(self) -> int:
        """Keep groups running until all have ended, and return the exit code of the run."""
        for number in STOPPING:
            signal.signal(number, self.receive)
        try:
            while self.running or self.starts_at:
                if self.signal and not self.stopping:
                    self.stop(self.signal)
                self.look_after_lighthouse()
                self.start_due()
                self.collect()
                time.sleep(CHECK_INTERVAL)
        finally:
            if self.lighthouse is not None:
                self.lighthouse.kill()
                self.lighthouse.wait()
        return self.code()

    def receive(self, number: int, frame: FrameType | None) -> None:
        self.signal = number

    def stop(self, number: int) -> None:
        """Send a signal to all groups: they end the step, and one saves it."""
        self.stopping = True
        self.starts_at = {}
        for process in self.running.values():
            process.send_signal(number)

    def look_after_lighthouse(self) -> None:
        """Start the lighthouse, also after it has ended."""
        if self.settings.lighthouse:
            return
        if self.lighthouse is not None:
            code = self.lighthouse.poll()
            if code is None or time.monotonic() < self.lighthouse_starts_at:
                return
            write_line(f"titan_lite: the lighthouse has ended ({ended(code)}): started again")
        self.lighthouse_starts_at = time.monotonic() + LIGHTHOUSE_DELAY
        self.lighthouse = subprocess.Popen(
            [
                *(sys.executable, "-m", "titan_lite.lighthouse"),
                *("--host", LOOPBACK, "--port", str(self.port)),
                *("--min-replica-groups", str(self.settings.min_replica_groups)),
            ],
            env={**os.environ, SUPERVISOR: str(os.getpid())},
            stdout=subprocess.DEVNULL,
        )

    def start_due(self) -> None:
        """Start the groups whose time has come."""
        for group, when in list(self.starts_at.items()):
            if time.monotonic() < when:
                continue
            del self.starts_at[group]
            self.begun[group] = time.monotonic()
            with suppress(OSError):
                self.file_of_steps(group).unlink()
            self.running[group] = subprocess.Popen(
                [sys.executable, "-m", "titan_lite.launch", *self.arguments],
                env=self.environment_of(group),
                start_new_session=True,  # a terminal's Ctrl-C comes once, from this process
            )

    def environment_of(self, group: int) -> dict[str, str]:
        environment = {
            **os.environ,
            COPY: str(group),
            SUPERVISOR: str(os.getpid()),
            LIGHTHOUSE: self.settings.lighthouse or f"http://{LOOPBACK}:{self.port}",
        }
        if self.devices[group]:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self.devices[group])
        return environment

    def collect(self) -> None:
        """Look for groups that have ended, and have failed ones started again."""
        for group, process in list(self.running.items()):
            code = process.poll()
            if code is None:
                continue
            del self.running[group]
            is_lost = code not in (exit_code.TRAINED, *exit_code.ENDINGS)
            if is_lost and not self.stopping and exit_code.TRAINED not in self.codes.values():
                self.start_again(group, code)
                continue
            self.codes[group] = code
            if code == exit_code.TRAINED:
                self.end_starts()
            elif code == exit_code.WRONG_INPUT and not self.newest_step():
                self.stop(signal.SIGTERM)

    def end_starts(self) -> None:
        """Start no group again, since the run is done. One that has not begun a step yet finds the
        last one on disk, and ends; without checkpoints it would train the run again.
        """
        self.starts_at = {}
        for group, process in self.running.items():
            if not self.saves and not self.file_of_steps(group).exists():
                process.send_signal(signal.SIGTERM)

    def start_again(self, group: int, code: int) -> None:
        """Have a failed group started again, unless the run does not go on."""
        step = self.newest_step()
        if step > self.step:  # one that starts again from a checkpoint is no further
            self.step = step
            self.failures = 0
        self.failures += 1
        lived = time.monotonic() - self.begun.get(group, 0.0)
        self.in_a_row[group] = self.in_a_row[group] + 1 if lived < LONG else 0
        if self.failures > FAILURES * len(self.devices):
            self.has_failed = True
            write_line(
                f"error: groups have failed {self.failures} times without a further step; the cause"
                " is above"
            )
            self.stop(signal.SIGTERM)
            return
        delay = min(2.0 ** max(0, self.in_a_row[group] - 1), MAX_DELAY)
        write_line(
            f"titan_lite: group {group} has failed ({ended(code)}): started again in {delay:g} s"
        )
        self.starts_at[group] = time.monotonic() + delay

    def newest_step(self) -> int:
        """Return the newest step that a group has begun since it was started."""
        steps = [0]
        for group in range(len(self.devices)):
            with suppress(OSError, ValueError):
                steps += json.loads(self.file_of_steps(group).read_text()).values()
        return max(steps)

    def file_of_steps(self, group: int) -> Path:
        """Return the file with the steps that a group has begun since it was started."""
        return folder_of_group(self.folder, group) / FILE_OF_STEPS

    def code(self) -> int:
        """Return the exit code of the run, of which some groups may have failed.

        A group that has trained, or was stopped, has found the last step on disk, if the run saves.
        """
        codes = self.codes.values()
        if exit_code.TRAINED in codes:
            return exit_code.TRAINED
        if self.has_failed:
            return exit_code.FAILED
        for code in (exit_code.STOPPED, exit_code.WRONG_INPUT):
            if code in codes:
                return code
        return exit_code.STOPPED if self.signal and not codes else exit_code.FAILED


def ended(code: int) -> str:
    """Return an exit code in words."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
