"""Save and resume: tensors through torch.distributed.checkpoint (DCP), everything else as JSON.

Problem. A run may be killed at any moment, a disk may fill up or lose bits, another run may write
to the same folder, and training stops while a step is written.

Solution. A step is complete or absent: it is written under another name, and renamed when all of it
is on disk.

    checkpoint/
        lock                     held by the run that writes here
        saving                   of a run with groups: held by the one that writes a step
        step-50/                 a step:
            .metadata, *.distcp      parameters and optimizer state by FQN, resharded on load
            state.json               identity of the run, progress, position in the data
            documents.json           names, sizes and hashes of the files with its documents
            manifest.json            size and SHA-256 of each of these, written last
        unfinished-step-60/      being written
        deleting-step-20/        older than the newest checkpoint.keep_latest_k
        invalid-step-40/         damaged, and renamed, since the run will save this step again

    checkpointer.save(50, tensors, RunState(identity, parts))
    step = checkpointer.verified_step()
    checkpointer.load(step, tensors)                 # in place, on any layout
    saved = checkpointer.read_state(step)

Each rank writes and hashes a file. DCP's first rank writes the rest and renames the folder, so that
an error there is one of the save on all ranks. With checkpoint.async_mode the loop waits only for a
copy in host memory (host_copies.py), and a thread of each rank goes on. These threads have a
process group of their own, since collectives of two threads on one group would be mixed up.

Open point. A resume reads a step twice: all files are hashed, split over the ranks, before the
first tensor is loaded.
"""

import dataclasses
import datetime
import functools
import json
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException

from titan_lite import manifest
from titan_lite.checkpoint import state as saved_state
from titan_lite.checkpoint import tensor_files
from titan_lite.checkpoint.host_copies import HostCopies
from titan_lite.checkpoint.lock import FolderLock, SaveLock, StepHold, not_held
from titan_lite.checkpoint.names import section_of
from titan_lite.checkpoint.state import RunState
from titan_lite.checkpoint.steps import SMALL_FILES, SavedSteps
from titan_lite.config import Checkpoint, ConfigError
from titan_lite.config.errors import MachineError, SharedConfigError, is_of_machine, shown
from titan_lite.data.streams import merge_states
from titan_lite.distributed.process_group import (
    first_nonempty,
    gather_to_rank_0,
    is_communication_error,
    max_over_ranks,
    new_gloo_group,
)
from titan_lite.logging import events, logger
from titan_lite.manifest import CorruptFileError, FileDigest

GROUP = "checkpoint"  # name of the process group of saves, which has a time limit of its own
LEFTOVER = re.compile(r"(unfinished|deleting)-step-\d+(-copy-\d+)?")
# The beginning of a file's name: rank 0 makes it, and the others look whether they have it, too.
LOOKED_FOR = "looked-for-by-all-ranks-"
# Seconds until a rank gives up: NFS remembers for up to 60 that a new folder is not there.
SECONDS_TO_APPEAR = 75.0
SAVE_TIMEOUT = datetime.timedelta(hours=1)  # of a collective of a save, while training goes on


class CheckpointError(RuntimeError):
    """An error on all ranks: a step could not be saved. Earlier steps are not affected."""

    everywhere = True


class Checkpointer(SavedSteps):
    """The steps in one folder, to be loaded and saved. Methods that are not those of SavedSteps are
    collectives unless they say otherwise.

    run: a name of the run, if replica groups share its folder (features/replica_groups/).
    own_suffix: of this group's unfinished steps.
    """

    def __init__(
        self,
        config: Checkpoint,
        dump_folder: Path,
        run: str = "",
        own_suffix: str = "",
    ):
        super().__init__(config, dump_folder)
        self.run = run
        self.own_suffix = own_suffix
        self.folder_lock = FolderLock(
            self.folder,
            self.key,
            instead="a job.dump_folder or checkpoint.folder that can be written, or"
            " checkpoint.enable = false",
        )
        self.run_lock = FolderLock(
            dump_folder,
            f"job.dump_folder = {shown(str(dump_folder))}",
            instead="a folder that can be written",
        )
        self.save_lock = SaveLock(self.folder)  # of a run with groups
        self.branch_hold = StepHold(Path(config.branch_from))
        self.is_alone = True  # no other group of the run had begun it
        self.shared_name = ""  # the same in groups of the run that see the same folders
        self.newest_saved = 0  # the last step on disk; 0: none
        self.last_attempted = 0  # the last step whose save has begun
        self.background_save: Future | None = None
        self.host_copies = HostCopies(pinned=self._pins())
        # Its thread is no daemon: if the run ends with an error, the process still waits until the
        # step is saved.
        self._background = ThreadPoolExecutor(max_workers=1, thread_name_prefix="save")
        self._group: dist.ProcessGroup | None = None

    def lock(self) -> None:
        """Lock the folder until this process ends. For rank 0.

        Raises ConfigError if another run has it.
        """
        if self.folder.resolve() == self.run_lock.folder.resolve():
            self.folder_lock = self.run_lock  # a process cannot lock a file twice
        if self.folder_lock.acquire(self.run) and self.folder_lock.is_alone:
            self._remove_leftovers(of_all_groups=True)

    def lock_on_first(self) -> None:
        """Lock the folder of the run, and that of its steps, until the process of rank 0 ends.

        Raises SharedConfigError if another run has one of them.
        """
        error = ""
        if dist.get_rank() == 0:
            try:
                self.run_lock.acquire(self.run)
                if self.config.enable:
                    self.lock()
                    self._hold_branch()
            except ConfigError as in_use:
                error = str(in_use)
        try:
            self._raise_on_all(error)
        except SharedConfigError:
            events.stop()
            raise
        names = f"{self.run_lock.shared_name} {self.folder_lock.shared_name}".strip()
        self.shared_name = first_nonempty(names, self._processes())
        others = max_over_ranks(int(not self.run_lock.is_alone), group=self._processes())
        self.is_alone = others == [0]

    def _hold_branch(self) -> None:
        """Hold the step that the run begins from, if it branches from another run's, until it has
        saved one of its own. For rank 0.
        """
        path = Path(self.config.branch_from)
        if not self.config.branch_from or self.present():
            return
        if self.branch_hold.acquire():
            logger.info(f"{path} is kept by its run until this one has saved a checkpoint")
        else:
            logger.warning(
                f"{path} cannot be locked: its run may delete it (checkpoint.keep_latest_k there)"
                " before this one has saved a checkpoint"
            )

    def check_shared(self) -> None:
        """Check that all ranks see the folder of the first one, where each writes its part of a
        step. After `lock_on_first`.

        The first rank makes a file of a random name, and the others look for it: content and inode
        of one that was there before could be alike on two disks. Raises SharedConfigError.
        """
        if not self.config.enable:
            return
        name = error = ""
        if dist.get_rank() == 0:
            name = f"{LOOKED_FOR}{uuid.uuid4().hex}"
            try:
                (self.folder / name).touch()
            except OSError as wrong:
                error = f"{self.key}: {self.folder} cannot be written: {wrong.strerror}"
                if is_of_machine(wrong):
                    raise MachineError(error) from None  # which the other ranks are told
        self._raise_on_all(error)
        try:
            if not _appears(self.folder / first_nonempty(name, self._processes())):
                error = (
                    f"{self.key}: {self.folder} of rank {dist.get_rank()} on"
                    f" {socket.gethostname()} is not that of rank 0; use a job.dump_folder on a"
                    " file system that all nodes share"
                )
            self._raise_on_all(error)
        finally:
            if name:
                (self.folder / name).unlink(missing_ok=True)

    def _unfinished(self, step: int) -> Path:
        """Return the folder in which a step is written: each replica group has its own."""
        return self.folder / f"unfinished-step-{step}{self.own_suffix}"

    # What there is to load

    def _fault_in_share(self, step: int) -> str:
        """Return the fault that this rank finds in a step, or "".

        It reads every byte of its share of the files; a step is intact if no rank finds a fault.
        """
        path = self.source_of(step)
        rank = dist.get_rank()
        world_size = dist.get_world_size()
        try:
            files = manifest.read(path, step)
            share = {name: files[name] for name in sorted(files)[rank::world_size]}
            manifest.check_bytes(path, share)
            self.check_state(step)
            if rank == 0:
                tensor_files.read_metadata(path)
        except CorruptFileError as error:
            return str(error)
        return ""

    def verified_step(self) -> int | None:
        """Return `step_to_load` after a check of every byte.

        Newer steps that are damaged are renamed, and the reason is logged; with other groups of the
        run the one that saves does so. Raises ConfigError.
        """
        damaged: dict[int, str] = {}
        while True:
            step = self._agreed_step(damaged)
            if step is None:
                return None
            fault = first_nonempty(self._fault_in_share(step), self._processes())
            if not fault:
                if self.is_alone:
                    self.set_aside_after(step, damaged)
                return step
            damaged[step] = fault
            if dist.get_rank() == 0 and not self.is_alone:
                logger.warning(f"step-{step} is not loaded: {fault}")

    def _agreed_step(self, damaged: Mapping[int, str]) -> int | None:
        """Return `step_to_load` of the first rank. Raises ConfigError on all ranks.

        The first rank decides: the look of every rank at every file would be ranks x files calls to
        the file system. All see its folder (check_shared).
        """
        choice = error = ""
        if dist.get_rank() == 0:
            try:
                choice = json.dumps(self.step_to_load(damaged))
            except ConfigError as wrong:
                error = str(wrong)
        self._raise_on_all(error)
        return json.loads(first_nonempty(choice, self._processes()))

    def set_aside_after(self, step: int, damaged: Mapping[int, str] | None = None) -> None:
        """Rename the damaged steps newer than `step`, which the run will save again.

        damaged: steps that are known to be, and why. Raises ConfigError.
        """
        error = ""
        if dist.get_rank() == 0:
            for other in self.present():
                if other > step and (fault := (damaged or {}).get(other) or self.fault(other)):
                    error = self._rename_damaged(other, fault) or error
        self._raise_on_all(error)

    def _rename_damaged(self, step: int, fault: str) -> str:
        """Rename a step, and log why; return the error, or ""."""
        path = self._unused_path(f"invalid-step-{step}")
        logger.warning(f"step-{step} is not loaded: {fault}; set aside as {path.name}")
        try:
            self.path_of(step).rename(path)
        except OSError as error:
            why = (
                f"{self.key}: {self.path_of(step)} cannot be renamed: {error.strerror}; move it"
                " away"
            )
            if is_of_machine(error):
                raise MachineError(why) from None
            return why
        return ""

    def _unused_path(self, name: str) -> Path:
        """Return the path of this name in the folder; if it exists, of name-2, name-3 and so on."""
        path = self.folder / name
        number = 2
        while path.exists():
            path = self.folder / f"{name}-{number}"
            number += 1
        return path

    def load(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Fill the tensors in place, on this rank's layout. Raises ConfigError on all ranks."""
        path = self.source_of(step)
        error = ""
        try:
            tensor_files.load(path, tensors)
        except CorruptFileError as damage:
            error = f"{path} cannot be loaded: {damage}"
        self._raise_on_all(error)
        self.newest_saved = step
        logger.info(f"resumed from {path}")

    # Saving

    def save(
        self, step: int, values: Mapping[str, Any], state: RunState, *, last: bool = False
    ) -> None:
        """Save a step, or with checkpoint.async_mode start to save it, after the previous save has
        ended.

        values: tensors by their names in tensor_files, and plain values for other programs.
        state: rank 0's is written, with the loader's state of all ranks merged. last: the step is
        the run's last (checkpoint.last_save_model_only). Raises CheckpointError if a save has
        failed and checkpoint.on_failure = "stop".
        """
        self.wait()
        self.last_attempted = step
        if self.run and dist.get_rank() == 0:
            self.save_lock.acquire()
        if last and self.config.last_save_model_only:
            values = {name: value for name, value in values.items() if section_of(name) == "model"}
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        sections = {section_of(name) for name in tensors}
        state = self._with_merged_loaders(state)
        in_background = self.config.async_mode != "disabled"

        copies: Mapping[str, Tensor] | None = None
        failure: Exception | None = None
        if in_background:
            try:
                copies = self.host_copies.update(tensors)
            except RuntimeError as error:  # too little memory
                failure = error
        save = functools.partial(
            dcp.save,
            tensor_files.by_section(values),
            storage_writer=tensor_files.StepWriter(
                self._unfinished(step),
                begin=functools.partial(self._begin, step),
                commit=functools.partial(self._commit, step, sections, state),
                on_host=in_background,
            ),
            planner=tensor_files.StepPlanner(copies, failure),
            process_group=self._processes(),
        )
        if in_background:
            self.background_save = self._background.submit(save)
            return
        with self._end_of_save(step):
            save()

    def _pins(self) -> bool:
        """Return True if copies in host memory are pinned, as the recipe asks, for a GPU."""
        if self.config.async_mode != "async_with_pinned_mem":
            return False
        if not torch.cuda.is_available() and self.config.enable:
            logger.info(
                'checkpoint.async_mode = "async_with_pinned_mem": without a GPU nothing is pinned,'
                ' as with "async"'
            )
        return torch.cuda.is_available()

    def _with_merged_loaders(self, state: RunState) -> RunState:
        """Return the state with the positions of all ranks in the data, on the first rank."""
        of_ranks = gather_to_rank_0(state.parts.get("loader"), self._processes())
        loaders = [loader for loader in of_ranks if loader is not None]
        if not loaders:
            return state
        parts = {**state.parts, "loader": merge_states(loaders)}
        return dataclasses.replace(state, parts=parts)

    def poll(self) -> None:
        """End a background save that has ended on all ranks. Raises like `save`."""
        if self.background_save is None:
            return
        (running,) = max_over_ranks(int(not self.background_save.done()))
        if not running:
            self.wait()

    def close(self) -> None:
        """Unlock the folder for the next phase of the run, in this process, and the step of another
        run that this one began from. No save is running.
        """
        self._background.shutdown()
        for lock in (self.folder_lock, self.run_lock, self.save_lock, self.branch_hold):
            lock.release()

    def wait(self) -> None:
        """Wait until no save is running. Raises like `save`."""
        save = self.background_save
        self.background_save = None
        if save is not None:
            with self._end_of_save(self.last_attempted):
                save.result()

    @contextmanager
    def _end_of_save(self, step: int) -> Iterator[None]:
        """Return a context in which the save of a step ends, on all ranks alike.

        Raises like `save`.
        """
        try:
            yield
        except (Exception, CheckpointException) as error:  # DCP's is no Exception
            if not is_communication_error(error) and self._was_saved_by_another_group(step):
                self.newest_saved = step
                return
            failure = CheckpointError(
                f"step {step} was not saved in {self.folder}: {_reason(error)}"
            )
            stops = self.config.on_failure == "stop" or is_communication_error(error)
            if dist.get_rank() == 0:
                then = "" if stops else '; the run goes on (checkpoint.on_failure = "continue")'
                logger.warning(f"NOTHING WAS SAVED: {failure}{then}")
                shutil.rmtree(self._unfinished(step), ignore_errors=True)
            if stops:
                raise failure from error
        else:
            self.newest_saved = step
        finally:
            self.save_lock.release()

    def _was_saved_by_another_group(self, step: int) -> bool:
        """Return True if the first rank finds a step on disk that this group could not save."""
        if not self.run:
            return False
        found = dist.get_rank() == 0 and not self.fault(step)
        if found:
            shutil.rmtree(self._unfinished(step), ignore_errors=True)
        return max_over_ranks(int(found), group=self._processes()) == [1]

    def before_exit(self, step: int) -> str:
        """Return the part of a sentence about saving this step before the run exits, or "" if it is
        saved. For one rank or all.
        """
        if not self.config.enable:
            return "checkpoint.enable = false, so nothing is saved; "
        if step == self.newest_saved:
            return ""
        if step != self.last_attempted or self.background_save is not None:
            return "saving, then "
        return f"the newest checkpoint is step-{self.newest_saved}; "

    def describe_newest(self) -> str:
        """Return the step that a restarted run resumes from, in words. Waits for a running save."""
        if not self.config.enable:
            return "checkpoint.enable = false, so there is no checkpoint to resume from"
        with suppress(CheckpointError):
            self.wait()
        restart = "begins again, as there is no checkpoint"
        if self.newest_saved:
            restart = f"resumes from {self.source_of(self.newest_saved)}"
        return f"started again, by hand or by the launcher, the run {restart}"

    def _begin(self, step: int, needed_bytes: int) -> None:
        """Make the folder of a step, on the first rank. Raises CheckpointError."""
        self._check_lock()
        path = self.path_of(step)
        if os.path.lexists(path):
            raise CheckpointError(f"{path} exists, and no checkpoint is overwritten; move it away")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._remove_leftovers(of_all_groups=not self.run)
        free = shutil.disk_usage(self.folder).free
        if free < needed_bytes:
            raise CheckpointError(
                f"it needs {needed_bytes / 2**30:.3f} GiB, and {free / 2**30:.3f} GiB are free"
            )
        self._unfinished(step).mkdir()

    def _commit(
        self, step: int, sections: set[str], state: RunState, files: dict[str, FileDigest]
    ) -> None:
        """Write state.json and the manifest of a step and give it its name, on the first rank.

        sections: of its tensors. files: those with tensors. Raises CheckpointError.
        """
        self._check_lock()
        unfinished = self._unfinished(step)
        saved_state.write_state(unfinished, step, sections, state)
        names = [*SMALL_FILES, *([saved_state.DOCUMENTS] if state.documents else [])]
        small = {name: manifest.digest(unfinished / name) for name in names}
        manifest.write(unfinished, step, {**files, **small})
        try:
            manifest.check_step(unfinished, step)
        except CorruptFileError as error:
            raise CheckpointError(
                f"{error}, seen from rank 0; use a {self.folder} on a file system of all nodes"
            ) from None
        try:
            manifest.publish(unfinished, self.path_of(step))
        except OSError:
            if not (self.run and self.path_of(step).is_dir()):
                raise
            logger.info(f"{self.path_of(step)} was written by another group")
            shutil.rmtree(unfinished)
            return
        logger.info(
            f"checkpoint written to {self.path_of(step)}",
            extra={"event": "checkpoint", "step": step},
        )
        self.branch_hold.release()
        self._retain()

    def _check_lock(self) -> None:
        if not self.folder_lock.is_held():
            raise CheckpointError("the folder or its lock was removed during the run")

    def _retain(self) -> None:
        """Delete all but the newest keep_latest_k complete steps, and those that a branch holds; a
        step is renamed before it is deleted.
        """
        if not self.config.keep_latest_k:
            return
        try:
            for step in self.steps()[: -self.config.keep_latest_k]:
                with not_held(self.path_of(step)) as is_free:
                    if not is_free:
                        logger.info(f"step-{step} is kept: another run begins from it")
                        continue
                    renamed = self.folder / f"deleting-step-{step}"
                    self.path_of(step).rename(renamed)
                    manifest.sync(self.folder)
                    shutil.rmtree(renamed)
        except OSError as error:
            logger.warning(f"an old checkpoint was not deleted: {error}")

    def _remove_leftovers(self, *, of_all_groups: bool) -> None:
        """Delete half-written and half-deleted steps of a killed run.

        of_all_groups: no other replica group can be writing one.
        """
        for path in self.folder.glob("*-step-*"):
            match = LEFTOVER.fullmatch(path.name)
            is_own = match is not None and match[2] == (self.own_suffix or None)
            if match is None or not (is_own or of_all_groups):
                continue
            try:
                shutil.rmtree(path)
                logger.info(f"removed {path}, left by a killed run")
            except OSError as error:
                logger.warning(f"{path}, left by a killed run, was not removed: {error}")
        for path in self.folder.glob(f"{LOOKED_FOR}*"):
            path.unlink(missing_ok=True)

    # Communication, also in the background

    def _processes(self) -> dist.ProcessGroup:
        if self._group is None:
            self._group = new_gloo_group(SAVE_TIMEOUT, GROUP)
        return self._group

    def _raise_on_all(self, error: str) -> None:
        """Raise SharedConfigError on all ranks if one has an error."""
        shared = first_nonempty(error, self._processes())
        if shared:
            raise SharedConfigError(shared)


def _appears(path: Path) -> bool:
    """Return True if a file is there, or appears within SECONDS_TO_APPEAR."""
    deadline = time.monotonic() + SECONDS_TO_APPEAR
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def _reason(error: BaseException) -> str:
    """Return an error in one line."""
    if isinstance(error, CheckpointException):
        failures = sorted(error.failures.items())
        return "; ".join(f"rank {rank}: {_reason(cause)}" for rank, (cause, _) in failures)
    words = " ".join(str(error).split())
    if isinstance(error, (CheckpointError, CorruptFileError)):
        return words
    return f"{type(error).__name__}: {words}"
