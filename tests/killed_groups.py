"""Replica groups of one process each, of which one kills itself, once, at a chosen point.

    KILL='{"group": 0, "at": "save", "step": 4}' python tests/killed_groups.py RECIPE [options]

    group    that is killed
    step    in which, or of the checkpoint
    at      commit          after the step was committed, before parameters are updated
            line            after the update, before its line of metrics
            validation      before its second batch is read
            save            before a checkpoint is begun
            write           when its tensors are written, and it has no name yet
            rename          when it has its name
            disk            none is killed: no group can give a checkpoint its name

The file `killed` of the run's folder says that it has happened. The exit code is the run's.
"""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from titan_lite import manifest
from titan_lite.config import load_config
from titan_lite.environment import COPY, set_torchft_variables
from titan_lite.hooks import Hook
from titan_lite.launch_groups import GroupProcesses
from titan_lite.resilience.exit_code import end_with
from titan_lite.train import main

POINT = json.loads(os.environ["KILL"])
MOMENTS = {"commit": "gradients", "line": "step_end", "save": "save"}


class OfOneProcess(GroupProcesses):
    """Groups that are this program."""

    def start_due(self):
        for group, when in list(self.starts_at.items()):
            if time.monotonic() < when:
                continue
            del self.starts_at[group]
            self.begun[group] = time.monotonic()
            command = [sys.executable, __file__, *self.arguments]
            self.running[group] = subprocess.Popen(command, env=self.environment_of(group))


class Killed(Hook):
    """The hook of the group that is killed."""

    def __init__(self, folder):
        self.mark = Path(folder) / "killed"
        self.validation_batches = 0

    def kill(self, step):
        if step == POINT["step"] and not self.mark.exists():
            self.mark.touch()
            print(f"killed: {POINT}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    def on_validation_batch(self, step):
        self.validation_batches = self.validation_batches + 1 if step == POINT["step"] else 0
        if POINT["at"] == "validation" and self.validation_batches == 2:
            self.kill(step)


def watch_renames(kill):
    """Kill this process before or after a checkpoint gets its name."""
    publish = manifest.publish

    def killed(unfinished, path):
        step = int(path.name.removeprefix("step-"))
        if POINT["at"] == "disk":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if POINT["at"] == "write":
            kill(step)
        publish(unfinished, path)
        if POINT["at"] == "rename":
            kill(step)

    manifest.publish = killed


def begin_together(folder, group):
    """Have the first step wait for all groups, of which the lighthouse knows by then."""
    set_torchft_variables()
    from titan_lite.features.replica_groups import quorum

    begin_step = quorum.Quorum.begin_step
    is_ready = Path(folder) / f"ready-{group}"

    def waiting(self, *arguments, **named):
        is_ready.touch()
        while not all(is_ready.with_name(f"ready-{other}").exists() for other in range(2)):
            time.sleep(0.05)
        return begin_step(self, *arguments, **named)

    quorum.Quorum.begin_step = waiting


def run(arguments):
    config = load_config(arguments[0], arguments[1:])
    if COPY not in os.environ:
        return OfOneProcess(arguments, config, [()] * config.fault_tolerance.replica_groups).run()
    hooks = []
    begin_together(config.job.dump_folder, os.environ[COPY])
    if POINT["at"] == "disk" or int(os.environ[COPY]) == POINT["group"]:
        hook = Killed(config.job.dump_folder)
        if POINT["at"] in MOMENTS:
            moment = f"on_{MOMENTS[POINT['at']]}"
            setattr(hook, moment, lambda step, *_: hook.kill(step))
        watch_renames(hook.kill)
        hooks = [hook]
    return main(arguments, hooks=hooks)


if __name__ == "__main__":
    end_with(lambda: run(sys.argv[1:]))
