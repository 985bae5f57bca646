"""A run that torchrun starts again and again goes on as long as it gets further: `restarts.json` in the dump folder.

    restarts = Restarts(dump_folder)
    restarts.check()          # RepeatedFault: the last two attempts that began a step ended in the same one
    restarts.begin(13)        # at the start of every step

The file holds the last step that each attempt began, {"0": 13, "1": 13}, and so outlives a process that is killed. The first rank
writes it, where torchrun may restart (`--max-restarts`); the first attempt begins it anew.
"""

import json
import os
import shlex
import sys
from contextlib import suppress
from pathlib import Path

from titan_lite.logging import logger
from titan_lite.outside import BYTES, WORD, Damaged, read_json


class RepeatedFault(RuntimeError):
    """Another attempt would end as the ones before; the message says where that was."""


class Restarts:
    def __init__(self, dump_folder: Path):
        self.path = dump_folder / "restarts.json"
        self.attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self.most = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
        self.writes = self.most and os.environ.get("RANK", "0") == "0"
        self.steps: dict[str, int] = self._read() if self.attempt else {}
        self.written = ""

    def check(self) -> None:
        """To be called before a process group is made: no rank writes before all have read. Raises RepeatedFault."""
        if self.attempt == 0:
            with suppress(OSError):  # that there is none, or no such folder, which is told elsewhere
                self.path.unlink()
            return
        last = self.steps.get(str(self.attempt - 1))
        logger.info(
            f"restart {self.attempt} of {self.most}: the attempt before ended "
            + ("before its first step" if last is None else f"in step {last}"),
            extra={"event": "restart", "step": last or 0},
        )
        # An attempt that did not begin a step is no news of the fault.
        begun = [self.steps[str(attempt)] for attempt in range(self.attempt) if str(attempt) in self.steps]
        if len(begun) > 1 and begun[-1] == begun[-2]:
            raise RepeatedFault(
                f"step {begun[-1]} failed twice in a row, the second time after a restart, so there is no further one; "
                "the cause is told above"
            )

    def _read(self) -> dict[str, int]:
        with suppress(Damaged):
            return read_json(self.path, {WORD: BYTES})
        return {}  # no attempt came to its first step

    def begin(self, step: int) -> None:
        if self.writes:
            self.steps[str(self.attempt)] = step
            new = self.path.with_name("restarts.json.new")
            with suppress(OSError):  # on a full disk the run can go on
                if self.written and self.path.exists() and self.path.read_text() != self.written:
                    return  # it is another run's by now
                self.written = json.dumps(self.steps) + "\n"
                new.write_text(self.written)
                new.replace(self.path)


def again() -> str:
    """The command that this process, or the launcher that it is of, was started by."""
    if command := os.environ.get("TITAN_LITE_COMMAND"):
        return command  # of ./run_train.sh
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return shlex.join(sys.orig_argv)
    world_size, local_size = (int(os.environ[name]) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    nodes = f"--nnodes {world_size // local_size} ... " if world_size > local_size else ""
    program = shlex.join([word for word in sys.orig_argv[1:] if word != "-u"])
    return f"torchrun {nodes}--nproc-per-node {local_size} {program}"
