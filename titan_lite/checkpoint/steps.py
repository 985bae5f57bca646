"""The saved steps in a folder, as any one process can look at them, without torch.

    steps = SavedSteps(config.checkpoint, Path(config.job.dump_folder))
    steps.present(), steps.steps()          # with a folder; of these, those without fault
    step = steps.step_to_load()             # None for a new run
    steps.read_state(step).identity         # of the run that saved it

manager.py saves and loads them, with all ranks.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from titan_lite import manifest
from titan_lite.checkpoint import state
from titan_lite.checkpoint.state import SavedState
from titan_lite.config import Checkpoint, ConfigError
from titan_lite.config.errors import error_because_of, shown
from titan_lite.config.weights_folder import METADATA, STATE, steps_in
from titan_lite.manifest import CorruptFileError

# Files whose content is checked before there is a process group, which checks the other files
SMALL_FILES = (METADATA, STATE)
NEWEST = -1  # checkpoint.load_step


class SavedSteps:
    """The steps in one folder."""

    def __init__(self, config: Checkpoint, dump_folder: Path):
        self.config = config
        self.folder = dump_folder / config.folder
        self.key = f'checkpoint.folder = "{config.folder}"'  # the beginning of errors

    def path_of(self, step: int) -> Path:
        return self.folder / f"step-{step}"

    def source_of(self, step: int) -> Path:
        """Return the folder that a step is read from: one that this run has not saved is that of
        checkpoint.branch_from.
        """
        own = self.path_of(step)
        if self.config.branch_from and not own.exists():
            return Path(self.config.branch_from)
        return own

    def present(self) -> list[int]:
        """Return the steps that have a folder, complete or not, oldest first.

        Raises ConfigError and MachineError.
        """
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        except OSError as error:  # must not start a new run
            raise error_because_of(
                error,
                f"{self.key}: {self.folder} cannot be read: {error.strerror}; use a folder that can"
                " be read",
            ) from None
        return sorted(
            int(name.removeprefix("step-"))
            for name in names
            if re.fullmatch(r"step-(0|[1-9]\d*)", name)
        )

    def steps(self) -> list[int]:
        """Return the steps in which `fault` finds nothing wrong, oldest first."""
        return [step for step in self.present() if not self.fault(step)]

    def newest(self) -> int:
        """Return the newest step in which `fault` finds nothing wrong; 0: none."""
        return next((step for step in reversed(self.present()) if not self.fault(step)), 0)

    def fault(self, step: int) -> str:
        """Return why a step cannot be loaded, or "" if nothing is wrong.

        Checks the names and sizes of its files and the content of the small ones.
        """
        path = self.source_of(step)
        try:
            files = manifest.check_step(path, step)
            small = {name: files[name] for name in sorted(files.keys() & SMALL_FILES)}
            manifest.check_bytes(path, small)
            self.check_state(step)
        except CorruptFileError as error:
            return str(error)
        return ""

    def check_state(self, step: int) -> None:
        """Raise CorruptFileError if state.json is damaged or of another step."""
        if state.read_state(self.source_of(step)).step != step:
            raise CorruptFileError(f"{STATE} is of another step")

    def step_to_load(self, damaged: Mapping[int, str] | None = None) -> int | None:
        """Return the step to start from, or None for a new run.

        damaged: steps that are known to be, and why. Raises ConfigError.
        """
        if not self.config.enable:
            return None
        faults = dict(damaged or {})
        if self.config.load_step == NEWEST:
            return self._newest_step(faults)
        return self._chosen_step(self.config.load_step, faults)

    def _newest_step(self, faults: dict[int, str]) -> int | None:
        """Return the newest step without fault."""
        present = self.present()
        for step in reversed(present):
            if step not in faults:
                fault = self.fault(step)
                if not fault:
                    self._check_branch(step)
                    return step
                faults[step] = fault
        if self.config.branch_from and not present:
            return self._branch_step(faults)
        if present:
            reasons = "; ".join(f"step-{step}: {fault}" for step, fault in faults.items())
            raise ConfigError(
                f"{self.key}: all checkpoints in {self.folder} are damaged ({reasons}); to start a"
                " new run, move them away or use another job.dump_folder"
            )
        if self.config.must_resume:
            raise ConfigError(
                f"checkpoint.must_resume = true: there is no checkpoint in {self.folder}; use false"
                " to start a new run"
            )
        return None

    def _chosen_step(self, step: int, faults: dict[int, str]) -> int:
        """Return the step that checkpoint.load_step names, which must be the newest one.

        If the same command was started before, return the newest step, which it has saved itself.
        """
        present = self.present()
        for other in reversed(present):
            if other not in faults and (fault := self.fault(other)):
                faults[other] = fault
        intact = [other for other in present if other not in faults]
        newest = intact[-1] if intact else step
        if newest > step:
            recipe = self.read_state(newest).identity.recipe
            if recipe.get("checkpoint", {}).get("load_step") == step:
                return newest
        if step not in intact:
            why = f"there is no such checkpoint in {self.folder}"
            if step in faults:
                why = f"the checkpoint is damaged: {faults[step]}"
            steps = ", ".join(str(other) for other in intact) or "none"
            raise ConfigError(
                f"checkpoint.load_step = {step}: {why}; it has {steps}; use -1 for the newest"
            )
        if step == newest:
            return step
        raise ConfigError(
            f"checkpoint.load_step = {step}: {self.folder} has newer checkpoints, up to {newest},"
            " which this run would save again; move them away, or begin another run with"
            f" checkpoint.branch_from = {shown(str(self.path_of(step)))}"
        )

    def _branch_step(self, faults: Mapping[int, str]) -> int:
        """Return the step of checkpoint.branch_from. Raises ConfigError."""
        path = Path(self.config.branch_from)
        try:
            step = state.read_state(path).step
            fault = faults.get(step) or self.fault(step)
        except CorruptFileError as error:
            fault = str(error) if path.is_dir() else "there is no such folder"
        if not fault:
            return step
        others = [each for each in steps_in(path) or steps_in(path.parent) if each != path]
        instead = f"a checkpoint such as {others[0]}" if others else "another run's step-N"
        raise ConfigError(f"checkpoint.branch_from = {shown(str(path))}: {fault}; use {instead}")

    def _check_branch(self, step: int) -> None:
        """Raise ConfigError if the run that has saved a step has not begun where this one is to."""
        branch = self.config.branch_from
        if not branch:
            return
        was = self.read_state(step).identity.recipe.get("checkpoint", {}).get("branch_from", "")
        if was != branch:
            began = f"began from {was}" if was else "is no branch"
            raise ConfigError(
                f"checkpoint.branch_from = {shown(branch)}: the run in {self.folder}, with"
                f" step-{step}, {began}; use another job.dump_folder"
            )

    def read_state(self, step: int) -> SavedState:
        """Return what a step has beside its tensors. Raises ConfigError."""
        try:
            return state.read_state(self.source_of(step))
        except CorruptFileError as error:
            raise ConfigError(
                f"{self.source_of(step)}/{error}; use another step with checkpoint.load_step"
            ) from None
