"""Save and resume: tensors through torch.distributed.checkpoint (DCP), everything else as JSON.

Problem. A run may be killed at any moment, a disk may fill up or lose bits, another run may write
to the same folder, and training stops while a step is written.

Solution. A step is complete or absent: it is written under another name, and renamed when all of it
is on disk.

    checkpoint/step-50/              .metadata, *.distcp      parameters and optimizer state by FQN, resharded on load
                                     state.json               step, tokens, position in the data
                                     manifest.json            size and SHA-256 of each of these, written last
    checkpoint/unfinished-step-60/   being written
    checkpoint/deleting-step-20/     older than the newest checkpoint.keep_latest_k
    checkpoint/invalid-step-40/      damaged, and renamed, since the run will save this step again
    checkpoint/lock                  held by the run that writes here

Each rank writes and hashes a file. DCP's first rank writes the rest and renames the folder, so that
an error there is one of the save on all ranks. With checkpoint.async_mode the loop waits only for a
copy in host memory, and a thread of each rank goes on. These threads have a process group of their
own, since collectives of two threads on one group would be mixed up.

Open point. A resume reads a step twice: all files are hashed, split over the ranks, before the
first tensor is loaded.
"""

import datetime
import functools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions

from titan_lite import manifest
from titan_lite.checkpoint import state as saved_state
from titan_lite.checkpoint import tensor_files
from titan_lite.checkpoint.lock import FolderLock
from titan_lite.checkpoint.names import section_of
from titan_lite.checkpoint.state import RunState, SavedState
from titan_lite.config import Checkpoint, ConfigError
from titan_lite.data.streams import merge_states
from titan_lite.distributed.process_group import (
    alike,
    first_word,
    gather_objects,
    gather_on_first,
    is_communication,
    new_gloo_group,
    reduce_numbers,
)
from titan_lite.logging import logger
from titan_lite.manifest import CorruptFileError, FileDigest

GROUP = "checkpoint"  # name of the process group of saves, which has a time limit of its own
# checked before there is a process group, which checks the other files
SMALL = (tensor_files.NAME, saved_state.NAME)
LIMIT = datetime.timedelta(hours=1)  # for one phase of a save, while training goes on


class CheckpointError(RuntimeError):
    """An error on all ranks: a step could not be saved. Earlier steps are not affected."""

    everywhere = True


class SharedConfigError(ConfigError):
    """Wrong input that all ranks know of, although one may have found it alone."""

    everywhere = True


class Checkpointer:
    """The steps in one folder. Methods are collectives unless they say otherwise.

    progress: called from time to time while files are written, read and hashed, which may take longer
    than the limit of a phase.
    """

    def __init__(
        self, config: Checkpoint, dump_folder: Path, progress: Callable[[], None] = lambda: None
    ):
        self.config = config
        self.progress = progress
        self.folder = dump_folder / config.folder
        self.key = f'checkpoint.folder = "{config.folder}"'  # the beginning of errors
        self.group: dist.ProcessGroup | None = None
        self.saving: Future | None = None  # a save in the background
        self.stager: AsyncStager | None = None  # has the copies that are reused for every save
        self.newest = 0  # the last step on disk; 0: none
        self.tried = 0  # the last step that was attempted
        self.locked = FolderLock(self.folder, self.key)

    def lock(self) -> None:
        """Lock the folder until this process ends. For rank 0.

        Raises ConfigError if another run has it.
        """
        if self.locked.take():
            self._remove_leftovers()

    def lock_on_first(self) -> None:
        """Lock the folder until the process of rank 0 ends.

        Raises SharedConfigError if another run has it.
        """
        error = ""
        if dist.get_rank() == 0:
            try:
                self.lock()
            except ConfigError as taken:
                error = str(taken)
        self._agree(error)

    # What there is to load

    def path_of(self, step: int) -> Path:
        return self.folder / f"step-{step}"

    def _unfinished(self, step: int) -> Path:
        return self.folder / f"unfinished-step-{step}"

    def present(self) -> list[int]:
        """Return the steps that have a folder, complete or not, oldest first.

        Raises ConfigError.
        """
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        except OSError as error:  # must not start a new run
            fix = "use a folder that can be read"
            raise ConfigError(
                f"{self.key}: {self.folder} cannot be read: {error.strerror}; {fix}"
            ) from None
        return sorted(
            int(name.removeprefix("step-"))
            for name in names
            if re.fullmatch(r"step-(0|[1-9]\d*)", name)
        )

    def steps(self) -> list[int]:
        """Return the steps in which `fault` finds nothing wrong, oldest first.

        For one rank or all.
        """
        return [step for step in self.present() if not self.fault(step)]

    def fault(self, step: int, *, share: bool = False) -> str:
        """Return why a step cannot be loaded, or "" if nothing is wrong. For one rank or all.

        Checks the names and sizes of its files and the content of the small ones. share: checks
        only this rank's share of the files, but every byte of it, so that the results of all ranks
        are needed.
        """
        path = self.path_of(step)
        try:
            rank, ranks = (dist.get_rank(), dist.get_world_size()) if share else (0, 1)
            files = manifest.check_step(path, step, rank, ranks)
            names = sorted(files)[rank::ranks] if share else sorted(files.keys() & SMALL)
            manifest.check_bytes(path, {name: files[name] for name in names}, self.progress)
            if saved_state.read_state(path).step != step:
                raise CorruptFileError(f"{saved_state.NAME} is of another step")
            if share and dist.get_rank() == 0:
                tensor_files.read_metadata(path)
        except CorruptFileError as error:
            return str(error)
        return ""

    def step_to_load(self, damaged: Mapping[int, str] | None = None) -> int | None:
        """Return the step to start from, without fault and not `damaged`, or None for a new run.

        Needs no process group. Raises ConfigError.
        """
        if not self.config.enable:
            return None
        wanted, present, faults = self.config.load_step, self.present(), dict(damaged or {})
        for step in reversed(present):
            if step not in faults and (fault := self.fault(step)):
                faults[step] = fault
            if wanted == -1 and step not in faults:
                return step
        whole = [step for step in present if step not in faults]
        have = f"it has {', '.join(map(str, whole))}" if whole else "it has none"
        if wanted == -1 and present:
            each = "; ".join(f"step-{step}: {fault}" for step, fault in faults.items())
            fix = "to start a new run, move them away or use another job.dump_folder"
            raise ConfigError(f"{self.key}: all steps in {self.folder} are damaged ({each}); {fix}")
        if wanted == -1 and self.config.must_resume:
            raise ConfigError(
                f"checkpoint.must_resume = true: there is no step in {self.folder}; use false to"
                " start a new run"
            )
        if wanted == -1:
            return None
        if wanted not in whole:
            why = (
                f"the step is damaged: {faults[wanted]}"
                if wanted in faults
                else f"there is no such step in {self.folder}"
            )
            raise ConfigError(
                f"checkpoint.load_step = {wanted}: {why}; {have}; use -1 for the newest"
            )
        if wanted != whole[-1]:
            recipe = self.read_state(whole[-1]).identity.recipe
            if recipe.get("checkpoint", {}).get("load_step") == wanted:
                return whole[-1]  # the same command was started again, and has newer steps
            raise ConfigError(
                f"checkpoint.load_step = {wanted}: {self.folder} has newer steps, up to"
                f" {whole[-1]}, which this run would save again; move them away, or copy"
                f" step-{wanted} into the checkpoint folder of another job.dump_folder"
            )
        return wanted

    def verified_step(self) -> int | None:
        """Return `step_to_load` after a check of every byte.

        CorruptFileError newer steps are renamed, and the reason is logged.

        Raises ConfigError.
        """
        damaged: dict[int, str] = {}
        while True:
            seen, present, error = None, [], ""
            try:
                present = self.present()
                # The first rank decides: the look of every rank at every file would be ranks x
                # files calls to the file system.
                seen = max(present, default=None) if dist.get_rank() else self.step_to_load(damaged)
            except ConfigError as wrong:
                error = str(wrong)
            self._agree(error)
            step = json.loads(
                first_word("" if dist.get_rank() else json.dumps(seen), self._processes())
            )
            seen = step if step in present else seen
            if not alike(str(seen), self._processes()):
                all_seen = gather_objects(seen, self._processes())
                different = [
                    rank for rank, found in enumerate(all_seen) if found != all_seen[rank - 1]
                ]
                each = ", ".join(f"rank {rank}: {all_seen[rank] or 'none'}" for rank in different)
                fix = "use a job.dump_folder on a file system that all nodes share"
                raise ConfigError(
                    f"checkpoint.folder: ranks see different newest steps in {self.folder}"
                    f" ({each}); {fix}"
                )
            if step is None:
                return None
            fault = first_word(self.fault(step, share=True), self._processes())
            if not fault:
                self._set_aside(step, damaged)
                return step
            damaged[step] = fault

    def _set_aside(self, step: int, damaged: Mapping[int, str]) -> None:
        """Rename steps newer than `step`, since the run will save them again, and log what is wrong
        with older ones.
        """
        error = ""
        for other in self.present() if dist.get_rank() == 0 else ():
            fault = damaged.get(other) or self.fault(other)
            if other < step and fault:
                logger.warning(f"step-{other} could not be loaded, either: {fault}")
            if other <= step:
                continue
            names = (
                f"invalid-step-{other}{suffix}"
                for suffix in ("", *(f"-{n}" for n in range(2, 1000)))
            )
            aside = next(self.folder / name for name in names if not (self.folder / name).exists())
            logger.warning(f"step-{other} is not loaded: {fault}; set aside as {aside.name}")
            try:
                self.path_of(other).rename(aside)
            except OSError as wrong:
                error = (
                    f"{self.key}: {self.path_of(other)} cannot be renamed: {wrong.strerror}; move"
                    " it away"
                )
        self._agree(error)

    def read_state(self, step: int) -> SavedState:
        """Return what a step has beside its tensors. For one rank or all. Raises ConfigError."""
        try:
            return saved_state.read_state(self.path_of(step))
        except CorruptFileError as error:
            raise ConfigError(
                f"{self.path_of(step)}/{error}; use another step with checkpoint.load_step"
            ) from None

    def load(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Fill the tensors in place, on this rank's layout. Raises ConfigError on all ranks."""
        path = self.path_of(step)
        error = ""
        try:
            tensor_files.load(path, tensors, self.progress)
        except CorruptFileError as damage:
            error = f"{path} cannot be loaded: {damage}"
        self._agree(error)
        self.newest = step
        logger.info(f"resumed from {path}")

    # Saving

    def save(
        self, step: int, tensors: Mapping[str, Any], state: RunState, *, last: bool = False
    ) -> None:
        """Save a step, or with checkpoint.async_mode start to save it, after the previous save has
        ended.

        tensors: by their names in tensor_files; plain values among them are for other programs.
        state: rank 0's is written, with the loader's state of all ranks merged. last: the step is
        the run's last (checkpoint.last_save_model_only). Raises CheckpointError if a save has
        failed and checkpoint.on_failure = "stop".
        """
        self.wait()
        self.tried = step
        group = self._processes()
        if last and self.config.last_save_model_only:
            tensors = {fqn: value for fqn, value in tensors.items() if section_of(fqn) == "model"}
        sections = {
            section_of(name) for name, value in tensors.items() if isinstance(value, Tensor)
        }
        state = self._with_merged_loaders(state)

        writer = tensor_files.StepWriter(
            self._unfinished(step),
            begin=functools.partial(self._begin, step),
            commit=functools.partial(self._commit, step, sections, state),
            progress=self.progress,
        )
        planner = tensor_files.ProgressSavePlanner(self.progress)
        state_dict = tensor_files.by_section(tensors)
        if self.config.async_mode == "disabled":
            with self._ending(step):
                dcp.save(state_dict, storage_writer=writer, planner=planner, process_group=group)
            return
        # The thread is no daemon: if the run ends with an error, the process still waits until the
        # step is saved.
        self.saving = dcp.async_save(  # type: ignore[assignment] # a Future, as staging is not async
            state_dict,
            storage_writer=writer,
            planner=planner,
            process_group=group,
            async_stager=self._stager() or writer,
        )

    def _with_merged_loaders(self, state: RunState) -> RunState:
        """Return the state with the positions of all ranks in the data, on the first rank."""
        of_ranks = gather_on_first(state.parts.get("loader"), self._processes())
        loaders = [loader for loader in of_ranks if loader is not None]
        if not loaders:
            return state
        return RunState(state.identity, {**state.parts, "loader": merge_states(loaders)})

    def _stager(self) -> AsyncStager | None:
        """Return what copies tensors to memory that is reused for every save, if the recipe asks
        for it.
        """
        if self.config.async_mode == "async_with_pinned_mem" and self.stager is None:
            cuda = torch.cuda.is_available()
            if not cuda:
                logger.info(
                    'checkpoint.async_mode = "async_with_pinned_mem": without a GPU nothing is'
                    " pinned; copies are reused"
                )
            self.stager = DefaultStager(
                StagingOptions(
                    use_pinned_memory=cuda,
                    use_shared_memory=False,  # a container has 64 MB of it
                    use_async_staging=False,
                    use_non_blocking_copy=cuda,
                )
            )
        return self.stager

    def poll(self) -> None:
        """Check at the end of a step whether a background save has ended on all ranks.

        Raises like `save`.
        """
        if self.saving is not None and not reduce_numbers(int(not self.saving.done()))[0]:
            self.wait()

    def wait(self) -> None:
        """Wait until no save is running. Raises like `save`."""
        saving = self.saving
        self.saving = None
        if saving is not None:
            with self._ending(self.tried):
                saving.result()

    @contextmanager
    def _ending(self, step: int) -> Iterator[None]:
        """Return a context in which the save of a step ends, on all ranks alike.

        Raises like `save`.
        """
        try:
            yield
        except (Exception, CheckpointException) as error:  # DCP's is no Exception
            failure = CheckpointError(
                f"step {step} was not saved in {self.folder}: {_reason(error)}"
            )
            stops = self.config.on_failure == "stop" or is_communication(error)
            if dist.get_rank() == 0:
                then = "" if stops else '; the run goes on (checkpoint.on_failure = "continue")'
                logger.warning(f"NOTHING WAS SAVED: {failure}{then}")
                shutil.rmtree(self._unfinished(step), ignore_errors=True)
            if stops:
                raise failure from error
        else:
            self.newest = step

    def before_exit(self, step: int) -> str:
        """Return the part of a sentence about saving this step before the run exits, or "" if it is
        saved.
        """
        if not self.config.enable:
            return "checkpoint.enable = false, so nothing is saved; "
        if step == self.newest:
            return ""
        return (
            "saving, then "
            if step != self.tried or self.saving
            else f"the newest step on disk is {self.newest}; "
        )

    def describe_newest(self) -> str:
        """Return the step that a restarted run resumes from, in words. Waits for a running save."""
        if not self.config.enable:
            return "checkpoint.enable = false, so there is no step to resume from"
        with suppress(CheckpointError):
            self.wait()
        where = (
            f"resumes from {self.path_of(self.newest)}"
            if self.newest
            else "begins again, as there is no step"
        )
        return f"started again, by hand or by the launcher, the run {where}"

    def _begin(self, step: int, needed: int) -> None:
        """Make the folder of a step, on the first rank. needed: bytes. Raises CheckpointError."""
        self._check_lock()
        path = self.path_of(step)
        if os.path.lexists(path):
            raise CheckpointError(f"{path} exists, and no step is overwritten; move it away")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._remove_leftovers()
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise CheckpointError(
                f"it needs {needed / 2**30:.3f} GiB, and {free / 2**30:.3f} GiB are free"
            )
        self._unfinished(step).mkdir()

    def _commit(
        self, step: int, sections: set[str], state: RunState, files: dict[str, FileDigest]
    ) -> None:
        """Write state.json and the manifest of a step and give it its name, on the first rank.

        Raises CheckpointError.

        files: {name: size and SHA-256} of the files with tensors.
        """
        self._check_lock()
        unfinished = self._unfinished(step)
        saved_state.write_state(unfinished, step, sections, state)
        small = {name: manifest.digest(unfinished / name) for name in SMALL}
        manifest.write(unfinished, step, {**files, **small})
        try:
            manifest.check_step(unfinished, step)
        except CorruptFileError as error:
            raise CheckpointError(
                f"{error}, seen from rank 0; use a {self.folder} on a file system of all nodes"
            ) from None
        manifest.publish(unfinished, self.path_of(step))
        logger.info(
            f"checkpoint written to {self.path_of(step)}",
            extra={"event": "checkpoint", "step": step},
        )
        self._retain()

    def _check_lock(self) -> None:
        if not self.locked.is_held():
            raise CheckpointError("the folder or its lock was removed during the run")

    def _retain(self) -> None:
        """Delete all but the newest keep_latest_k complete steps; a step is renamed before it is
        deleted.
        """
        try:
            for old in (
                self.steps()[: -self.config.keep_latest_k] if self.config.keep_latest_k else ()
            ):
                doomed = self.folder / f"deleting-step-{old}"
                self.path_of(old).rename(doomed)
                manifest.sync(self.folder)
                shutil.rmtree(doomed)
        except OSError as error:
            logger.warning(f"an old step was not deleted: {error}")

    def _remove_leftovers(self) -> None:
        """Delete half-written and half-deleted steps of a killed run."""
        for path in (*self.folder.glob("unfinished-step-*"), *self.folder.glob("deleting-step-*")):
            try:
                shutil.rmtree(path)
                logger.info(f"removed {path}, left by a killed run")
            except OSError as error:
                logger.warning(f"{path}, left by a killed run, was not removed: {error}")

    # Communication, also in the background

    def _processes(self) -> dist.ProcessGroup:
        if self.group is None:
            self.group = new_gloo_group(LIMIT, GROUP)
        return self.group

    def _agree(self, error: str) -> None:
        """Raise SharedConfigError on all ranks if one has an error."""
        if error := first_word(error, self._processes()):
            raise SharedConfigError(error)


def _reason(error: BaseException) -> str:
    """Return an error in one line."""
    if isinstance(error, CheckpointException):
        failures = sorted(error.failures.items())
        return "; ".join(f"rank {rank}: {_reason(cause)}" for rank, (cause, _) in failures)
    words = " ".join(str(error).split())
    if isinstance(error, (CheckpointError, CorruptFileError)):
        return words
    return f"{type(error).__name__}: {words}"
