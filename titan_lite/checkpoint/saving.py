"""Save and resume: tensors through torch.distributed.checkpoint (DCP), everything else as JSON.

Problem. A run may be killed at any moment, a disk may fill up or lose bits, another run may write to the same folder, and
training stops while a step is written.

Solution. A step is complete or absent: it is written under another name, and renamed when all of it is on disk.

    checkpoint/step-50/              .metadata, *.distcp      all parameters and optimizer state by FQN, resharded on load
                                     state.json               step, tokens, position in the data
                                     manifest.json            size and SHA-256 of each of these, written last
    checkpoint/unfinished-step-60/   being written
    checkpoint/deleting-step-20/     older than the newest checkpoint.keep_latest_k
    checkpoint/invalid-step-40/      damaged, and renamed, since the run will save this step again
    checkpoint/lock                  held by the run that writes here

With checkpoint.async_mode the loop waits only for a copy in host memory. A thread on each rank writes it. These threads have a
process group of their own, since collectives of two threads on one group would be mixed up.

Open point. A resume reads a step twice: all files are hashed, split over the ranks, before the first tensor is loaded.
"""

import datetime
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from titan_lite import manifest
from titan_lite.checkpoint import state as saved_state
from titan_lite.checkpoint import tensor_files
from titan_lite.checkpoint.lock import FolderLock
from titan_lite.config import Checkpoint, ConfigError
from titan_lite.logging import logger
from titan_lite.outside import Damaged
from titan_lite.ranks import (
    alike,
    first_word,
    gather_objects,
    gather_on_first,
    is_communication,
    new_gloo_group,
    reduce_numbers,
)

T = TypeVar("T")
GROUP = "checkpoint"  # name of the process group of saves, which has a time limit of its own
SMALL = (
    tensor_files.NAME,
    saved_state.NAME,
)  # checked before there is a process group, which checks the other files
LIMIT = datetime.timedelta(hours=1)  # for one phase of a save, while training goes on


class CheckpointError(RuntimeError):
    """An error on all ranks: a step could not be saved. Earlier steps are not affected."""

    everywhere = True


class Checkpointer:
    """The steps in one folder. Methods are collectives unless they say otherwise.

    beat: called from time to time while files are written, read and hashed, which may take longer than the limit of a phase.
    """

    def __init__(
        self, config: Checkpoint, dump_folder: Path, beat: Callable[[], None] = lambda: None
    ):
        self.config, self.beat = config, beat
        self.folder = dump_folder / config.folder
        self.key = f'checkpoint.folder = "{config.folder}"'  # the beginning of errors
        self.group: dist.ProcessGroup | None = None
        self.saving: threading.Thread | None = None
        self.failure: CheckpointError | None = None  # of the last save
        self.newest = self.tried = 0  # the last step on disk, and the last one attempted; 0: none
        self.copies: dict[str, Tensor] = {}  # in pinned memory, reused for every save
        self.locked = FolderLock(self.folder, self.key)

    def lock(self) -> None:
        """Lock the folder until this process ends. For rank 0, before there is a process group. Raises ConfigError."""
        if self.locked.take():
            self._remove_leftovers()

    # What there is to load

    def path_of(self, step: int) -> Path:
        return self.folder / f"step-{step}"

    def _unfinished(self, step: int) -> Path:
        return self.folder / f"unfinished-step-{step}"

    def present(self) -> list[int]:
        """Return the steps that have a folder, complete or not, oldest first. Raises ConfigError."""
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
        """Return the steps in which `fault` finds nothing wrong, oldest first. For one rank or all."""
        return [step for step in self.present() if not self.fault(step)]

    def fault(self, step: int, *, share: bool = False) -> str:
        """Return why a step cannot be loaded, or "" if nothing is wrong. For one rank or all.

        Checks the names and sizes of its files and the content of the small ones. share: checks only this rank's share of the
        files, but every byte of it, so that the results of all ranks are needed.
        """
        path = self.path_of(step)
        try:
            rank, ranks = (dist.get_rank(), dist.get_world_size()) if share else (0, 1)
            files = manifest.check_step(path, step, rank, ranks)
            names = sorted(files)[rank::ranks] if share else sorted(files.keys() & SMALL)
            manifest.check_bytes(path, {name: files[name] for name in names}, self.beat)
            if saved_state.read_state(path)["step"] != step:
                raise Damaged(f"{saved_state.NAME} is of another step")
            if share and dist.get_rank() == 0:
                tensor_files.read_metadata(path, files)
        except Damaged as error:
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
                f"checkpoint.must_resume = true: there is no step in {self.folder}; use false to start a new run"
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
        if (
            wanted != whole[-1]
            and self.read_state(whole[-1]).get("recipe", {}).get("checkpoint", {}).get("load_step")
            == wanted
        ):
            return whole[-1]  # the same command was started again, and has newer steps of its own
        if wanted != whole[-1]:
            raise ConfigError(
                f"checkpoint.load_step = {wanted}: {self.folder} has newer steps, up to {whole[-1]}, which this run would save "
                f"again; move them away, or copy step-{wanted} into the checkpoint folder of another job.dump_folder"
            )
        return wanted

    def verified_step(self) -> int | None:
        """Return `step_to_load` after a check of every byte. Damaged newer steps are renamed, and the reason is logged.

        Raises ConfigError.
        """
        damaged: dict[int, str] = {}
        while True:
            seen, present, error = None, [], ""
            try:
                present = self.present()
                # The first rank decides: the look of every rank at every file would be ranks x files calls to the file system.
                seen = max(present, default=None) if dist.get_rank() else self.step_to_load(damaged)
            except ConfigError as wrong:
                error = str(wrong)
            self._agree(error)
            step = json.loads(
                first_word("" if dist.get_rank() else json.dumps(seen), self._processes())
            )
            seen = step if step in present else seen
            if not alike(str(seen), self._processes()):
                all_seen = self._gather(seen)
                different = [
                    rank for rank, found in enumerate(all_seen) if found != all_seen[rank - 1]
                ]
                each = ", ".join(f"rank {rank}: {all_seen[rank] or 'none'}" for rank in different)
                fix = "use a job.dump_folder on a file system that all nodes share"
                raise ConfigError(
                    f"checkpoint.folder: ranks see different newest steps in {self.folder} ({each}); {fix}"
                )
            if step is None:
                return None
            fault = first_word(self.fault(step, share=True), self._processes())
            if not fault:
                self._set_aside(step, damaged)
                return step
            damaged[step] = fault

    def _set_aside(self, step: int, damaged: Mapping[int, str]) -> None:
        """Rename steps newer than `step`, since the run will save them again, and log what is wrong with older ones."""
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
                error = f"{self.key}: {self.path_of(other)} cannot be renamed: {wrong.strerror}; move it away"
        self._agree(error)

    def read_state(self, step: int) -> dict[str, Any]:
        """Read a step's state.json. For one rank or all. Raises ConfigError."""
        try:
            return saved_state.read_state(self.path_of(step))
        except Damaged as error:
            raise ConfigError(
                f"{self.path_of(step)}/{error}; use another step with checkpoint.load_step"
            ) from None

    def load(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Fill the tensors in place, on this rank's layout. Raises ConfigError on all ranks."""
        path, reader = self.path_of(step), None
        try:
            metadata = tensor_files.read_metadata(path, manifest.read(path, step))
            reader, error = (
                tensor_files.Reader(path, metadata),
                tensor_files.misfit(metadata, tensors),
            )
        except Damaged as damage:
            error = str(damage)
        self._agree(error and f"{path} cannot be loaded: {error}")
        error = ""
        try:
            with tensor_files.alone(f"rank {dist.get_rank()}"):
                planner = tensor_files.Filling(self.beat)
                dcp.load(dict(tensors), storage_reader=reader, planner=planner, no_dist=True)
        except ConfigError as failed:
            error = str(failed)
        self._agree(error and f"{path} cannot be loaded: {error}; remove it to use the step before")
        self.newest = step
        logger.info(f"resumed from {path}")

    # Saving

    def save(
        self, step: int, tensors: Mapping[str, Tensor], state: dict[str, Any], *, last: bool = False
    ) -> None:
        """Save a step, or with checkpoint.async_mode start to save it, after the previous save has ended.

        tensors: {name: tensor or DTensor}. state: of JSON types; rank 0's is written, with what all ranks have as
        "loader", the position of their rows in the data, merged; a rank whose rows another one reads, too, may have None. Raises
        CheckpointError if a save has failed and checkpoint.on_failure = "stop".
        """
        self.wait()
        self.tried = step
        self._processes()  # made by this thread, as all ranks make groups in one order
        if last and self.config.last_save_model_only:
            tensors = {
                name: tensor for name, tensor in tensors.items() if name.startswith("model.")
            }
        state = {
            **state,
            "tensors": sorted({name.partition(".")[0] for name in tensors}),
        }  # ["model", "optimizer"]
        if self.config.async_mode == "disabled":
            self._save(
                step,
                tensors,
                {name: tensor_files.local_part(tensor) for name, tensor in tensors.items()},
                state,
            )
            self.wait()
            reduce_numbers(
                0, group=self.group
            )  # wait until rank 0 has deleted older steps, with the limit of this group
        else:
            copies = self._copy(tensors)
            # Not a daemon: if the run ends with an error, the process still waits until the step is saved.
            self.saving = threading.Thread(
                target=self._save, args=(step, tensors, copies, state), name=f"save of step {step}"
            )
            self.saving.start()

    def poll(self) -> None:
        """Check at the end of a step whether a background save has ended on all ranks. Raises like `save`."""
        if self.saving is not None and not reduce_numbers(int(self.saving.is_alive()))[0]:
            self.wait()

    def before_exit(self, step: int) -> str:
        """Return the part of a sentence about saving this step before the run exits, or "" if it is saved."""
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

    def wait(self) -> None:
        """Wait until no save is running. Raises like `save`."""
        if self.saving is not None:
            self.saving.join()
            self.saving = None
        failure, self.failure = self.failure, None
        if failure is not None and (self.config.on_failure == "stop" or is_communication(failure)):
            raise failure

    def _copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy this rank's parts to host memory; afterwards the optimizer may change the tensors."""
        keep = self.config.async_mode == "async_with_pinned_mem"
        if keep and not self.copies and not torch.cuda.is_available():
            logger.info(
                'checkpoint.async_mode = "async_with_pinned_mem": without a GPU nothing is pinned; copies are reused'
            )
        copies = self.copies if keep else {}
        for name, tensor in tensors.items():
            local = tensor_files.local_part(tensor)
            if name not in copies:
                copies[name] = torch.empty(
                    local.shape, dtype=local.dtype, pin_memory=keep and torch.cuda.is_available()
                )
            copies[name].copy_(local, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return copies

    def _save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        copies: Mapping[str, Tensor],
        state: dict[str, Any],
    ) -> None:
        """Save the step, or set `failure` on all ranks alike."""
        try:
            if (
                torch.cuda.is_available()
            ):  # a new thread is on GPU 0, where DCP would create a context of 0.5 GB for each rank
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            self._commit(step, tensors, copies, state)
        except Exception as error:
            self.failure = CheckpointError(
                f"step {step} was not saved in {self.folder}: {_reason(error)}"
            )
            self.failure.__cause__ = error
            if dist.get_rank() == 0:
                goes_on = self.config.on_failure == "continue" and not is_communication(error)
                then = '; the run goes on (checkpoint.on_failure = "continue")' if goes_on else ""
                logger.warning(f"NOTHING WAS SAVED: {self.failure}{then}")
                shutil.rmtree(self._unfinished(step), ignore_errors=True)
        else:
            self.newest = step
            if dist.get_rank() == 0:  # other ranks do not wait for it
                self._retain()

    def _commit(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        copies: Mapping[str, Tensor],
        state: dict[str, Any],
    ) -> None:
        rank, path, unfinished = dist.get_rank(), self.path_of(step), self._unfinished(step)
        (needed,) = reduce_numbers(
            sum(map(tensor_files.share, tensors.values())), group=self.group, total=True
        )

        def check_lock() -> None:
            if not self.locked.is_held():
                raise CheckpointError("the folder or its lock was removed during the run")

        def prepare() -> None:
            check_lock()
            if os.path.lexists(path):
                raise CheckpointError(f"{path} exists, and no step is overwritten; move it away")
            self.folder.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
            free = shutil.disk_usage(self.folder).free
            if free < needed:
                raise CheckpointError(
                    f"it needs {needed / 2**30:.3f} GiB, and {free / 2**30:.3f} GiB are free"
                )
            unfinished.mkdir()

        def copy_of(name: str) -> Tensor:
            self.beat()
            return copies[name]

        def write() -> tuple[Any, dict[str, dict[str, Any]], list[tensor_files.Entry]]:
            entries = tensor_files.write(unfinished, tensors, copy_of)
            files = {
                path.name: manifest.digest(path, self.beat)
                for path in unfinished.glob(f"__{rank}_*")
            }
            return state.get("loader"), files, entries

        def finish() -> None:
            check_lock()
            tensor_files.write_metadata(unfinished, (entries for _, _, entries in parts))
            loaders = [each for each, _, _ in parts if each is not None]
            merged = {"loader": saved_state.merge_loaders(loaders)} if loaders else {}
            manifest.write_text(
                unfinished / saved_state.NAME, json.dumps({**state, **merged}, indent=1) + "\n"
            )
            files = {name: each for _, theirs, _ in parts for name, each in theirs.items()}
            files.update({name: manifest.digest(unfinished / name) for name in SMALL})
            manifest.write(unfinished, step, files)
            try:
                manifest.check_step(unfinished, step)
            except Damaged as error:
                raise CheckpointError(
                    f"{error}, seen from rank 0; use a {self.folder} on a file system of all nodes"
                ) from None
            manifest.publish(unfinished, path)
            logger.info(
                f"checkpoint written to {path}", extra={"event": "checkpoint", "step": step}
            )

        self._together(prepare if rank == 0 else None)
        written = self._together(write)
        assert written is not None
        parts = gather_on_first(written, self.group)
        self._together(finish if rank == 0 else None)

    def _retain(self) -> None:
        """Delete all but the newest keep_latest_k complete steps; a step is renamed before it is deleted."""
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

    def _gather(self, mine: T) -> list[T]:
        """Return the values of all ranks, by rank."""
        return gather_objects(mine, self._processes())

    def _agree(self, error: str) -> None:
        """Raise ConfigError on all ranks if one has an error."""
        if error := first_word(error, self._processes()):
            raise ConfigError(error)

    def _together(self, work: Callable[[], T] | None) -> T | None:
        """Return the result of `work`. Raises CheckpointError on all ranks if it failed on one."""
        result, error = None, ""
        try:
            result = work() if work is not None else None
        except Exception as failed:
            error = _reason(failed)
        if reduce_numbers(int(bool(error)), group=self._processes())[0]:
            errors = [
                f"rank {rank}: {each}" for rank, each in enumerate(self._gather(error)) if each
            ]
            raise CheckpointError("; ".join(errors))
        return result


def _reason(error: BaseException) -> str:
    """Return an error in one line."""
    words = " ".join(str(error).split())
    return (
        words
        if isinstance(error, (CheckpointError, Damaged))
        else f"{type(error).__name__}: {words}"
    )
