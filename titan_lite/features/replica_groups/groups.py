"""Train one run with several replica groups, of which some may be lost (fault_tolerance).

    groups = SeveralGroups(trainer)                  # in each group
    groups.join()                             # before the first step
    batches = groups.next_batches()           # those of the step that this group takes
    tokens = groups.sum_tokens(tokens)        # by which losses are divided
    totals = groups.commit(loss, stop_requests)              # None: the step is undone
    going_on = groups.agree()                 # before the next step
    groups.leave()                            # after the last one, once that is on disk

Between steps all groups have the same state: parameters, optimizer, counts, and positions in the
data. Every group packs all documents of the run, and leaves out the batches of others; so the data
does not depend on how many groups take part in a step, and a group that has lost others knows where
they were. The first living group writes the files of the run. If it is lost, the next one looks at
what is on disk, and writes what is due and not there, before it takes a further step.

quorum.py finds the living groups and sums over them.
"""

import json
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from titan_lite import progress
from titan_lite.checkpoint.agreement import PARTS_OF_ERRORS, Member, differences, parts_of
from titan_lite.checkpoint.run_identity import RunIdentity
from titan_lite.checkpoint.steps import NEWEST
from titan_lite.checksum import examine
from titan_lite.config import ConfigError
from titan_lite.config.errors import SharedConfigError
from titan_lite.distributed.pipeline import DeviceBatch
from titan_lite.distributed.process_group import first_nonempty, hash64, max_over_ranks
from titan_lite.dtensor import gradient_shard, local
from titan_lite.environment import COPY, group_number
from titan_lite.features.replica_groups.quorum import GroupState, Quorum, await_lighthouse
from titan_lite.logging import OF_GROUP, console, events, logger
from titan_lite.one_group import OneGroup
from titan_lite.resilience import TrainingError

if TYPE_CHECKING:
    from titan_lite.trainer import Trainer

PAUSE = 0.5  # seconds between looks at a checkpoint that another group writes
SHORT = 0.5  # seconds of a quorum that count to the step; a longer one is a wait
IDENTITY = "identity"  # among the parts of a state: that of the group, as a dictionary
LINES = "lines"  # likewise: of metrics, which the first group has to write (MetricsWriter.lines)
FOLDERS = "folders"  # among the parts of an identity: names in the locks of the run's folders
COMPARED = (*PARTS_OF_ERRORS, "mesh", "sequences", "device")
MAX_UNDONE = 2  # steps in a row; after more, a signal stops this group without the others
DIFFERENCES = ("", "recipe", "state")  # of groups, which of them are wrong


class DifferentGroups(RuntimeError):
    """An error: groups that should be equal are not."""


def identity_of(identity: RunIdentity, number: int, folders: str) -> Member:
    """Return what is the same in groups that can train together.

    number: of this group. folders: of the run (Checkpointer.shared_name).
    """
    parts = parts_of(identity)
    del parts["recipe"]["fault_tolerance"]["lighthouse"]  # one has several addresses
    same = {
        **{name: parts[name] for name in PARTS_OF_ERRORS},
        "mesh": dict(identity.mesh),
        "sequences": identity.sequences,
        "device": identity.device,
        FOLDERS: folders,
    }
    return Member(f"in group {number} on {socket.gethostname()}", same, identity.git)


def digest_of(member: Member) -> int:
    """Return a number that is the same in groups that can train together."""
    return hash64(json.dumps(member.parts, sort_keys=True).encode())


def why_apart(other: Member, own: Member) -> list[str]:
    """Return a line for each key in which two groups differ that should train together."""
    lines = differences(other, own, COMPARED)
    if lines:
        lines[-1] += (
            "; start all groups with the same recipe, command line, files and versions, on the same"
            " kind of device"
        )
    elif other.parts[FOLDERS] != own.parts[FOLDERS]:
        folder = own.parts["recipe"]["job"]["dump_folder"]
        lines.append(
            f'job.dump_folder = "{folder}": the folder {own.place} is not the one {other.place};'
            " use one on a file system that all groups share"
        )
    return lines


class SeveralGroups(OneGroup):
    """The groups of a run, as the trainer of one of them sees them."""

    has_several = True
    quorum: Quorum  # from `join` on

    def __init__(self, trainer: "Trainer"):
        super().__init__(trainer)
        self.number = group_number(trainer.config.fault_tolerance)
        self.config = trainer.config.fault_tolerance
        self.steps = 0  # that this process has committed
        self.began = 0.0  # the present step, by time.perf_counter
        folders = trainer.checkpointer.shared_name
        self.identity = identity_of(trainer.identity, self.number, folders)
        self.parts_before: dict[str, Any] = {}  # the state that the present step began with
        self.undone = 0  # steps in a row that did not count
        self.why_undone = ""  # the last one of them
        self.living = 0  # groups that take part in the present step; 0 before the first one
        self.is_first = False  # this group writes the files of the run
        self.owes_save = False  # another group was to save before, which may be lost
        self.digest = digest_of(self.identity)
        self.apart: list[str] = []  # why this group cannot train with the others
        self.meets_others = False  # at the end of the run

    # Between steps

    def join(self) -> bool:
        """Take part in the run from its next step on; return False as `agree`.

        The graphs of a step are compiled before other groups know of this one, and wait for it.
        """
        trainer = self.trainer
        self.compile()
        if not await_lighthouse(self.config, self.waits_in_vain):
            self.stop_alone()
            return False
        self.quorum = Quorum(
            self.config,
            self.number,
            trainer.device,
            state_of=lambda: GroupState(self.tensors(), self.parts_before),
        )
        self.quorum.go_on_from(trainer.step)
        if not self.meet():
            return False
        self.has_joined = self.quorum.received is not None
        return True

    def compile(self) -> None:
        """Run forward and backward of a step that does not count, so that graphs are made."""
        trainer = self.trainer
        if not trainer.config.compile.enable or trainer.is_finished:
            return
        batch = trainer.loader.peek()
        moved = trainer.model.to_device(
            batch.input, batch.label, bos_id=trainer.bos_id, eos_id=trainer.tokenizer.eos_id
        )
        tokens = torch.ones((), dtype=torch.int64, device=trainer.device)
        trainer.begin_step_parts()
        trainer.model.forward_backward([moved], tokens)
        self.gradients()
        trainer.optimizer.zero_grad()

    def agree(self) -> bool:
        """Agree with the other groups on the next step; return False if the run has to stop.

        A group that is behind others takes their state. One that has become the first writes what
        the one before it has left.
        """
        if not self.meet():
            return False
        self.write_due()
        return True

    def meet(self) -> bool:
        """Find the groups of the next step; return as `agree`."""
        trainer = self.trainer
        if trainer.is_finished or trainer.stop.requested:
            return False
        if self.undone > MAX_UNDONE and trainer.stop.poll():
            self.stop_alone()
            return False
        self.parts_before = self.parts()
        before = self.living
        started = time.perf_counter()
        with progress.phase("waiting for other groups", "init_timeout_seconds"):
            if not self.quorum.begin_step(self.waits_in_vain):
                self.stop_alone()
                return False
            if time.perf_counter() - started > SHORT:
                trainer.throughput.exclude_since(started, "waiting")
            received = self.quorum.received
            if received is not None:
                started = time.perf_counter()
                self.load(received)
                trainer.throughput.skip_to(trainer.step)
                trainer.throughput.exclude_since(started, "recovery")
                self.parts_before = self.parts()
        self.living = self.quorum.living
        self.meets_others = True
        has_changed = self.living != before or received is not None
        if has_changed:
            if not self.check_others():
                return False
            trainer.throughput.ranks = trainer.world_size * self.living
        self.take_role()
        if has_changed and self.is_first and trainer.config.checkpoint.enable:
            trainer.checkpointer.set_aside_after(trainer.step)
        if self.why_undone:
            if trainer.rank == 0:
                logger.warning(self.why_undone, extra={"event": "undone"})
            self.why_undone = ""
        if has_changed:
            self.describe_change(before)
        return True

    def waits_in_vain(self) -> bool:
        """Return True if this rank has received a signal, or knows that the run is done."""
        return self.trainer.stop.received or self.last_step_saved() > 0

    def last_step_saved(self) -> int:
        """Return the last step of the run, if another group has saved it; 0 otherwise, and on all
        ranks but the first.
        """
        trainer = self.trainer
        if trainer.rank != 0 or not trainer.config.checkpoint.enable or trainer.is_finished:
            return 0
        steps = trainer.config.training.steps
        if max(trainer.checkpointer.present(), default=0) < steps:
            return 0
        newest = trainer.checkpointer.newest()
        return newest if newest >= steps else 0

    def check_others(self) -> bool:
        """Return False if the run is done. Raises ConfigError in a group that is one too many, and
        TrainingError if a group that was lost has saved a later step than that of the living.

        They may have loaded an earlier one while it was saved, or were cut off from it.
        """
        trainer = self.trainer
        if self.living > self.config.replica_groups and not self.steps:
            raise ConfigError(
                f"group {self.number}: {self.living} groups take part, and"
                f" fault_tolerance.replica_groups = {self.config.replica_groups}; start each with a"
                f" COPY of its own, from 0 to {self.config.replica_groups - 1}"
            )
        if self.ends_with_others():
            return False
        checkpoint = trainer.config.checkpoint
        if not checkpoint.enable or checkpoint.load_step != NEWEST:
            return True
        (newest,) = max_over_ranks(trainer.checkpointer.newest() if trainer.rank == 0 else 0)
        if newest > trainer.step:
            raise TrainingError(
                f"step {newest} was saved by a group that was lost since, and the living ones are"
                f" at step {trainer.step}; another start resumes from it",
                everywhere=True,
            )
        return True

    def ends_with_others(self) -> bool:
        """Return True, and say so, if another group has saved the last step of the run. A
        collective in this group.
        """
        trainer = self.trainer
        (last,) = max_over_ranks(self.last_step_saved())
        if not last:
            return False
        if trainer.rank == 0:
            logger.warning(
                f"group {self.number} ends at step {trainer.step}, as the run is done: another"
                f" group has saved step {last}",
                extra=OF_GROUP,
            )
        self.meets_others = False
        return True

    def newest(self) -> str:
        """Return the newest checkpoint, which another group may have written, in words."""
        checkpointer = self.trainer.checkpointer
        steps = checkpointer.present() if checkpointer.config.enable else []
        return str(checkpointer.path_of(max(steps))) if steps else "the beginning"

    def stop_alone(self) -> None:
        """Stop this group, which has found no quorum, with what is due on disk."""
        trainer = self.trainer
        if self.ends_with_others():
            return
        if not trainer.stop.poll():
            logger.warning(
                f"no quorum of groups for {self.config.wait_seconds} s (fault_tolerance."
                f"wait_seconds): {trainer.describe_stop()}",
                extra={"event": "stop", **OF_GROUP},
            )
            trainer.stop.requested = True
        self.meets_others = False
        if self.living:
            self.take_over()

    def describe_change(self, before: int) -> None:
        """Log how many groups there are; the first one does, and one that joins."""
        trainer = self.trainer
        if trainer.rank != 0:
            return
        received = self.quorum.received
        groups = f"{self.living} of {self.config.replica_groups} groups take part"
        if received is not None:
            nbytes = sum(tensor.nbytes for tensor in received.tensors.values())
            logger.warning(
                f"group {self.number} resumes from step {trainer.step} of a living group"
                f" ({nbytes / 2**30:.2f} GiB a rank); {groups}",
                extra={"event": "copies", **OF_GROUP},
            )
        elif self.is_first:
            where = f"from step {trainer.step + 1} on"
            logger.warning(f"{groups} {where}, {before} before", extra={"event": "copies"})

    def take_role(self) -> None:
        """Write the files of the run if this group is the first, else write none."""
        self.write_files(first=self.quorum.index == 0)

    def write_files(self, *, first: bool) -> None:
        """Begin or end to write the files of the run, beginning with lines of metrics that the
        first group before this one has not written.
        """
        trainer = self.trainer
        self.owes_save = first and (self.owes_save or not self.is_first)
        self.is_first = first
        writes = first and trainer.rank == 0
        console.show(first)
        if writes == trainer.metrics.writes:
            return
        trainer.write_files(writes=writes)
        if writes and (steps := trainer.metrics.write_missing()):
            logger.warning(
                f"metrics of step {steps[0]}, which a lost group has not written, are written by"
                f" group {self.number}",
                extra={"event": "copies"},
            )

    # What is due on disk

    @property
    def step_due(self) -> int:
        """The newest step that has to be on disk; 0: none."""
        trainer = self.trainer
        checkpoint = trainer.config.checkpoint
        if not checkpoint.enable:
            return 0
        if trainer.is_finished or trainer.stop.requested:
            return trainer.step
        return trainer.step // checkpoint.interval * checkpoint.interval

    def lacks_save(self) -> bool:
        """Return True if a checkpoint is due that is not on disk. A collective in this group."""
        trainer = self.trainer
        lacks = trainer.rank == 0 and self.step_due > 0
        return max_over_ranks(int(lacks and trainer.checkpointer.newest() < self.step_due)) == [1]

    def is_saved_by_another(self) -> bool:
        """Return True if another living group is writing a checkpoint. A collective in this
        group.
        """
        trainer = self.trainer
        is_held = trainer.rank == 0 and trainer.checkpointer.save_lock.is_held_by_another()
        return max_over_ranks(int(is_held)) == [1]

    def write_due(self) -> None:
        """Save what the first group before this one was to save, and has not. A collective in this
        group.

        If a living group is still writing it, the next step looks again.
        """
        if not self.owes_save or self.is_saved_by_another():
            return
        self.save_due()

    def save_due(self) -> None:
        """Save this step if a checkpoint is due that is not on disk. A collective in this group."""
        trainer = self.trainer
        self.owes_save = False
        if not self.lacks_save():
            return
        if trainer.rank == 0:
            line = f"step {trainer.step} is due and not on disk: group {self.number} saves it"
            if self.step_due != trainer.step:
                line = (
                    f"step {self.step_due} is not on disk, as the group that was saving it is lost:"
                    f" group {self.number} saves step {trainer.step} at once"
                )
            logger.warning(line, extra={"event": "copies"})
        trainer.save()

    def take_over(self) -> None:
        """Write what is due as the only group that is left, but for what another one that lives is
        still writing: it has comm.init_timeout_seconds for that.
        """
        self.write_files(first=True)
        deadline = time.monotonic() + self.trainer.config.comm.init_timeout_seconds
        while self.lacks_save() and self.is_saved_by_another():
            progress.beat()
            if max_over_ranks(int(time.monotonic() > deadline)) == [1]:
                break
            time.sleep(PAUSE)
        self.save_due()

    def leave(self) -> None:
        """Take part in no further step, once what is due is on disk, whoever has written it.

        Raises TrainingError if the last step could not be saved.
        """
        if not self.living:
            return
        while self.meets_others:
            self.end_together()
        self.quorum.leave()
        self.trainer.checkpointer.wait()
        if self.lacks_save():
            step = self.step_due
            folder = self.trainer.checkpointer.folder
            raise TrainingError(
                f"step {step} is not on disk in {folder}: it could not be saved", everywhere=True
            )

    def end_together(self) -> None:
        """Meet the other groups once more, which shows who is left to write what is due."""
        self.parts_before = self.parts()  # for a group that starts now
        with progress.phase("waiting for other groups", "init_timeout_seconds"):
            found = self.quorum.begin_step(self.is_written, is_last=True)
            if found:
                self.take_role()
            is_written = max_over_ranks(int(self.is_written())) == [1]
            self.meets_others = found and not is_written and not self.is_first
            if not is_written and not self.meets_others:
                self.take_over()

    def is_written(self) -> bool:
        """Return True if the first rank finds all on disk that is due; False on other ranks."""
        trainer = self.trainer
        if trainer.rank != 0 or trainer.metrics.missing():
            return False
        return not self.step_due or trainer.checkpointer.newest() >= self.step_due

    # The state

    def tensors(self) -> dict[str, Tensor]:
        """Return this rank's shards of parameters and optimizer state, by their names."""
        return {name: local(tensor) for name, tensor in self.trainer.tensors().items()}

    def parts(self) -> dict[str, Any]:
        """Return the rest of this rank's state between two steps. A collective in this group."""
        trainer = self.trainer
        trainer.bad_documents.gather([loader.pop_skipped() for loader in trainer.loaders])
        trainer.per_source.gather()
        parts = {name: part.state_dict() for name, part in trainer.stateful.items()}
        return {IDENTITY: asdict(self.identity), LINES: trainer.metrics.lines, **parts}

    def load(self, received: GroupState) -> None:
        """Go on from the state of another group. Raises ConfigError if it has another recipe."""
        if apart := why_apart(Member(**received.parts[IDENTITY]), self.identity):
            raise SharedConfigError(*apart)
        with torch.no_grad():
            for name, tensor in self.tensors().items():
                tensor.copy_(received.tensors[name])
        self.load_parts(received.parts)
        self.trainer.metrics.lines = received.parts[LINES]
        self.trainer.model.parameters_have_changed()

    def load_parts(self, parts: Mapping[str, Any]) -> None:
        for name, part in self.trainer.stateful.items():
            part.load_state_dict(parts[name])
        events.step = self.trainer.step

    # A step

    def poll_stop(self) -> bool:
        """Groups ask each other in every step alone."""
        return self.trainer.stop.requested

    def next_batches(self) -> list[DeviceBatch]:
        """Return the local batches of this step that are of this group."""
        trainer = self.trainer
        self.began = time.perf_counter()
        local_batches = trainer.layout.accumulation
        share = self.quorum.share(local_batches)
        batches = []
        for index in range(local_batches):
            if index in share:
                batches.append(trainer.next_batch())
            else:
                trainer.loader.skip()
        return batches

    def gradients(self) -> list[Tensor]:
        """Return this rank's shards of all gradients; zeros where this group had no batch."""
        shards = []
        for parameter in self.trainer.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            shards.append(gradient_shard(parameter))
        return shards

    def sum_tokens(self, tokens: Tensor) -> Tensor:
        """Return the counted tokens of this step over all groups. After a failure they are wrong,
        and the step will not count.
        """
        total = tokens.clone()
        self.quorum.sum([total])
        return total

    @torch.no_grad()
    def commit(self, loss: Tensor, stop_requests: Tensor) -> tuple[Tensor, Tensor] | None:
        """Sum a step over groups; return None, and undo it, if it does not count.

        loss, stop_requests: over all ranks of this group.
        """
        trainer = self.trainer
        totals = torch.stack((loss.double(), stop_requests.double()))
        counts = [trainer.per_source.own]
        for part in trainer.step_parts:
            counts += part.counts()
        self.quorum.sum([*self.gradients(), *counts, totals])
        difference = self.compare()
        if not self.quorum.commit():
            self.undo(self.quorum.fault, difference)
            return None
        self.steps += 1
        self.undone = 0
        return totals[0].float(), totals[1]

    def compare(self) -> str:
        """Compare with other groups what has to be equal; return what is not, or "".

        The step does not count then. Every step compares recipe, code and data; one of
        training.compare_replicas_freq compares parameters and optimizer state.
        """
        trainer = self.trainer
        freq = trainer.config.training.compare_replicas_freq
        checksum = 0
        if freq and trainer.step % freq == 0:
            checksums = [examine(tensor)[0] for tensor in self.tensors().values()]
            checksum = int(torch.stack(checksums).sum())
        own = torch.tensor([self.digest, checksum], dtype=torch.int64, device=trainer.device)
        extremes = torch.cat((own, ~own))  # max(~x) is ~min(x), without overflow
        seats = own.new_zeros(self.config.replica_groups)
        seats[self.number] = self.seat
        self.quorum.sum([extremes, seats], torch.distributed.ReduceOp.MAX)
        if self.quorum.fault:
            return ""
        if int(seats[self.number]) != self.seat:
            raise SharedConfigError(
                f"environment: {COPY}={self.number}: another process trains as group {self.number};"
                f" start each group with a {COPY} of its own, from 0 to"
                f" {self.config.replica_groups - 1}"
            )
        largest, inverted_smallest = extremes.chunk(2)
        differs = (largest != ~inverted_smallest).tolist()
        if differs[0]:
            difference = "recipe"
            self.apart = why_apart(self.reference(), self.identity)
        elif differs[1]:
            difference = "state"
        else:
            return ""
        self.quorum.refuse(DifferentGroups(difference))
        return difference

    @property
    def seat(self) -> int:
        """The claim of this process to the number of its group: of two with one number the higher
        one trains on. A process that has trained has a higher one, and then the first.
        """
        return self.quorum.living - self.quorum.index + self.quorum.living * bool(self.steps)

    def reference(self) -> Member:
        """Return the group that the others have to be like: the first of those that have trained,
        or of all. A collective over groups.
        """
        device = self.trainer.device
        claim = torch.tensor([self.seat], device=device)
        content = torch.frombuffer(
            bytearray(json.dumps(asdict(self.identity)).encode()), dtype=torch.uint8
        )
        highest = claim.clone()
        self.quorum.sum([highest], torch.distributed.ReduceOp.MAX)
        is_reference = torch.equal(highest, claim)
        size = torch.tensor([content.numel() * is_reference], device=device)
        self.quorum.sum([size], torch.distributed.ReduceOp.MAX)
        text = torch.zeros(int(size), dtype=torch.uint8, device=device)
        if is_reference:
            text.copy_(content)
        self.quorum.sum([text], torch.distributed.ReduceOp.MAX)
        if self.quorum.fault:  # which undoes the step
            return self.identity
        return Member(**json.loads(text.cpu().numpy().tobytes()))

    def undo(self, fault: str, difference: str) -> None:
        """Go back to the beginning of a step that does not count.

        fault: that this rank knows. difference: of `compare`. Raises ConfigError in a group that
        has joined with another recipe, and TrainingError if parameters differ.
        """
        trainer = self.trainer
        reason = fault or "a sum over groups has failed on another rank"
        self.undone += 1
        trainer.optimizer.zero_grad()
        trainer.per_source.forget()
        for loader in trainer.loaders:
            loader.pop_skipped()
        step = trainer.step
        self.load_parts(self.parts_before)
        trainer.throughput.exclude_since(self.began, "undone")
        (found,) = max_over_ranks(DIFFERENCES.index(difference))
        difference = DIFFERENCES[found]
        if difference == "recipe":
            reason = "a group has joined with another recipe, data, device or version of the code"
            apart = first_nonempty("\n".join(self.apart))
            if apart and not self.steps:
                raise SharedConfigError(*apart.splitlines())
        elif difference == "state":
            raise TrainingError(
                f"step {step}: parameters or optimizer state of replica groups are not equal"
                f" (training.compare_replicas_freq); another start resumes from {self.newest()}",
                everywhere=True,
            )
        self.why_undone = f"step {step} does not count, and is repeated: {reason}"
