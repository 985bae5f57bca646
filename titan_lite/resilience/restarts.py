"""Stop restarts by torchrun once two attempts ended in the same step.

    restarts = Restarts(dump_folder)
    restarts.check()              # raises RepeatedFault if two attempts ended in the same step
    restarts.record_step(13)      # at the start of every step

The file `restarts.json` in the dump folder has the last step that each attempt began, such as
{"0": 13, "1": 13}, and so survives a killed process. The first rank writes it if torchrun
(`--max-restarts`) or the launcher of groups may restart. The first attempt deletes an old file.
"""

import json
import os
import shlex
import sys
from contextlib import suppress
from pathlib import Path

from titan_lite import manifest
from titan_lite.environment import SUPERVISOR
from titan_lite.logging import logger

FILE_OF_STEPS = "restarts.json"


class RepeatedFault(RuntimeError):
    """An error: two attempts ended in the same step, so that another one would, too."""


class Restarts:
    """The steps in which the attempts of a launch ended."""

    def __init__(self, dump_folder: Path):
        self.path = dump_folder / FILE_OF_STEPS
        self.attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self.max_restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
        may_restart = self.max_restarts > 0 or SUPERVISOR in os.environ
        self.writes = may_restart and os.environ.get("RANK", "0") == "0"
        self.steps: dict[str, int] = {}  # the last step that an attempt began, by its number
        if self.attempt > 0:
            with suppress(OSError, ValueError):  # no attempt has begun a step
                self.steps = json.loads(self.path.read_text())

    def check(self) -> None:
        """Log how the attempt before ended.

        Call it on all ranks before a process group is made: all read the record before rank 0
        writes it. Raises RepeatedFault if the last two attempts that began a step ended in the same
        one.
        """
        if self.attempt == 0:
            with suppress(OSError):  # no such file or folder
                self.path.unlink()
            return
        last = self.steps.get(str(self.attempt - 1))
        when = "before its first step" if last is None else f"in step {last}"
        logger.info(
            f"restart {self.attempt} of {self.max_restarts}: the attempt before ended {when}",
            extra={"event": "restart", "step": last or 0},
        )
        # An attempt that did not begin a step says nothing about the fault.
        last_steps = [self.steps.get(str(attempt)) for attempt in range(self.attempt)]
        begun = [step for step in last_steps if step is not None]
        if len(begun) > 1 and begun[-1] == begun[-2]:
            raise RepeatedFault(
                f"step {begun[-1]} failed twice in a row, the second time after a restart, so there"
                " is no further one; the cause is above"
            )

    def record_step(self, step: int) -> None:
        """Record that a step begins."""
        if not self.writes:
            return
        self.steps[str(self.attempt)] = step
        with suppress(OSError):  # the run goes on with a full disk
            self.path.parent.mkdir(exist_ok=True)
            manifest.replace_text(self.path, json.dumps(self.steps) + "\n")


def restart_command() -> str:
    """Return the command that started this process or its launcher."""
    command = os.environ.get("TITAN_LITE_COMMAND")  # set by ./run_train.sh
    if command:
        return command
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return shlex.join(sys.orig_argv)
    world_size = int(os.environ["WORLD_SIZE"])
    local_size = int(os.environ["LOCAL_WORLD_SIZE"])
    nodes = f"--nnodes {world_size // local_size} ... " if world_size > local_size else ""
    program = shlex.join([word for word in sys.orig_argv[1:] if word != "-u"])
    return f"torchrun {nodes}--nproc-per-node {local_size} {program}"
