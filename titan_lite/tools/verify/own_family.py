"""Verify a family of a user's own before a run: once for a layout, in a process of its own.

    verification = Verification(config, world_size=8)      # raises ConfigError without a twin
    if not verification.is_remembered():
        verification.run(["recipe.toml", "--training.steps=9"], seconds=240)

What a Family says of its modules is believed when they are split, and faults need not be seen in a
run's loss. `titan-lite verify` trains a small twin of the layout on CPU processes and finds them.

A verdict is of the family, the layout and the versions, not of a run. So it is remembered in the
user's cache: a sweep has many dump folders, and a job that starts again has the same user. Only
agreement is remembered.
"""

import dataclasses
import functools
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

import torch

import titan_lite
from titan_lite.checkpoint.run_identity import source_digest
from titan_lite.cli import INTERRUPTED
from titan_lite.config import Config, ConfigError
from titan_lite.config.errors import shown
from titan_lite.config.families import file_digest
from titan_lite.environment import cache_folder
from titan_lite.models.shapes import shape_of
from titan_lite.processes import signal_when_parent_dies
from titan_lite.resilience.signals import STOPPING, write_line
from titan_lite.tools.verify.twin import SEQ_LEN, layout_of, name_of, twin, twin_model

# What decides of a twin whether it computes what one process does
SECTIONS = ("parallelism", "activation_checkpoint", "compile", "float8")
TRAINING = ("local_batch_size", "global_batch_size", "mask_documents", "loss_chunk_tokens")


class Verification:
    """The verification of a recipe's own family on its layout."""

    def __init__(self, config: Config, world_size: int | None):
        """world_size: number of ranks; None: any. Raises ConfigError if there is no twin."""
        self.subject = f"model.name = {shown(config.model.name)}"
        self.world_size = world_size
        layout = layout_of(config, world_size)
        self.layout = name_of(layout)
        self.content = {
            "family": config.model.name,
            "sources": file_digest(config.model.name),
            "recipe": _what_decides(config, layout),
            "torch": str(torch.__version__),
            "titan_lite": f"{titan_lite.__version__} {source_digest()}",
        }
        hashed = {**self.content, "family": ""}  # a file that has moved is the same family
        digest = hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()
        self.path = cache_folder() / "verified" / f"{digest[:32]}.json"

    def is_remembered(self) -> bool:
        """Return True if the family has agreed on this layout before."""
        return self.path.is_file()

    def run(self, arguments: Sequence[str], seconds: float) -> bool:
        """Run `titan-lite verify`, and remember that the layout agrees. Return False if a signal
        ended it.

        arguments: the recipe and its options; seconds: at most. Raises ConfigError if the layout
        does not agree or cannot be verified.
        """
        write_line(
            f"titan_lite: {self.subject} is not one of titan_lite's: verifying it on {self.layout}"
            " before the run, about 10 s"
        )
        began = time.monotonic()
        code, output = self._run_tool(arguments, seconds)
        taken = time.monotonic() - began
        if code in (INTERRUPTED, *(-number for number in STOPPING)):
            return False
        if code != 0:
            write_line(output.rstrip())
            raise ConfigError(self._error(code, taken))
        write_line(
            f"titan_lite: {self.layout} computes what one process does: verified in {taken:.0f} s"
            f" with sequences of {SEQ_LEN} tokens"
        )
        self._remember()
        return True

    def _run_tool(self, arguments: Sequence[str], seconds: float) -> tuple[int | None, str]:
        """Return the exit code, or None after so many seconds, and the output.

        The wait is short sleeps, between which a signal is handled.
        """
        path, *keys = arguments
        command = [sys.executable, "-m", "titan_lite", "verify", path]
        if self.world_size:
            command += ["--world-size", str(self.world_size)]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
            process = subprocess.Popen(
                [*command, *keys],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                preexec_fn=functools.partial(_end_with_launcher, os.getpid()),
            )
            code: int | None = None
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.terminate()
                process.wait()
            output.seek(0)
            return code, output.read()

    def _error(self, code: int | None, taken: float) -> str:
        """Return why the run does not begin. code: of the tool, which has taken so many seconds."""
        off = "or train without with model.verify = false"
        if code is None:
            return f"{self.subject}: not verified on {self.layout} after {taken:.0f} s; {off}"
        if code == 2:
            return (
                f"{self.subject} cannot be verified on {self.layout} (above): change its flavor"
                f" debug, which verify trains, {off}"
            )
        return (
            f"{self.subject}: on {self.layout} it does not compute what one process does; the row"
            " above names the first module that differs. Correct the block or `styles` of its"
            f" Family (docs/contributing.md), {off}"
        )

    def _remember(self) -> None:
        """Write the verdict; without a home folder or room a line says that it is not kept."""
        unfinished = self.path.with_suffix(f".{os.getpid()}")
        try:
            if not self.path.is_absolute():
                raise OSError("this user has no home folder")
            self.path.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_text(json.dumps(self.content, indent=1), encoding="utf-8")
            unfinished.replace(self.path)
        except OSError as error:
            write_line(f"titan_lite: the next start verifies again, nothing is kept: {error}")


def _end_with_launcher(launcher: int) -> None:
    """Run in the tool's process: it ends with the launcher, which has blocked its signals."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    signal_when_parent_dies(signal.SIGTERM, launcher)


def _what_decides(config: Config, layout: dict[str, int]) -> dict[str, object]:
    """Return what a twin's agreement depends on beside sources: not its learning rate, say."""
    small = twin(config, layout, steps=1)
    model = dataclasses.replace(twin_model(shape_of(config.model), 1), family="")
    return {
        "layout": layout,
        "model": dataclasses.asdict(model),
        "optimizer": small.optimizer.name,
        "training": small.training.model_dump(include=set(TRAINING), mode="json"),
        **{name: getattr(small, name).model_dump(mode="json") for name in SECTIONS},
    }
