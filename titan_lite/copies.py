"""Train one run with several copies of the model, of which some may be lost (fault_tolerance).

    copies = Copies(trainer)                  # in each copy
    copies.join()                             # before the first step
    batches = copies.next_batches()           # those of the step that this copy takes
    totals = copies.commit(loss, tokens, stop_requests)      # None: the step is undone
    going_on = copies.agree()                 # before the next step

Between steps all copies have the same state: parameters, optimizer, counts, and positions in the
data. Every copy packs all documents of the run, and leaves out the batches of others; so the data
does not depend on how many copies take part in a step, and a copy that has lost others knows where
they were. The first living copy writes the files of the run.

resilience/quorum.py finds the living copies and sums over them.
"""

import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from titan_lite.checkpoint.run_identity import RunIdentity
from titan_lite.checkpoint.steps import NEWEST
from titan_lite.config import ConfigError
from titan_lite.distributed.pipeline import DeviceBatch
from titan_lite.distributed.process_group import hash64, max_over_ranks
from titan_lite.dtensor import gradient_shard, local
from titan_lite.environment import copy_number
from titan_lite.logging import console, events, logger
from titan_lite.resilience import TrainingError
from titan_lite.resilience.quorum import CopyState, Quorum, await_lighthouse
from titan_lite.resilience.replica_check import examine

if TYPE_CHECKING:
    from titan_lite.trainer import Trainer

SHORT = 0.5  # seconds of a quorum that count to the step; a longer one is a wait
IDENTITY = "identity"  # name of what `identity_of` returns, among the parts of a state
MAX_UNDONE = 2  # steps in a row; after more, a signal stops this copy without the others
DIFFERENCES = ("", "recipe", "state")  # of copies, which of them are wrong


class Totals(NamedTuple):
    """Sums of a step over all copies: scalars, float64."""

    loss: Tensor
    tokens: Tensor
    stop_requests: Tensor


class DifferentCopies(RuntimeError):
    """An error: copies that should be equal are not."""


def identity_of(identity: RunIdentity) -> int:
    """Return a number that is the same in copies that can train together."""
    recipe = {
        section: values
        for section, values in identity.recipe.items()
        if section not in ("job", "fault_tolerance")
    }
    same = {
        "recipe": recipe,
        "model": identity.model,
        "tokenizer": identity.tokenizer,
        "documents": [identity.documents, identity.validation_documents],
        "mesh": identity.mesh,
        "sequences": identity.sequences,
        "copies": identity.recipe["fault_tolerance"]["copies"],
        "device": identity.device,
        "versions": identity.versions,
        "sources": identity.sources,
        "family_file": identity.family_file,
    }
    return hash64(json.dumps(same, sort_keys=True, default=list).encode())


class Copies:
    """The copies of a run, as the trainer of one of them sees them."""

    quorum: Quorum  # from `join` on

    def __init__(self, trainer: "Trainer"):
        self.trainer = trainer
        self.number = copy_number(trainer.config.fault_tolerance)
        self.config = trainer.config.fault_tolerance
        self.has_joined = False  # a run that other copies had begun
        self.steps = 0  # that this process has committed
        self.began = 0.0  # the present step, by time.perf_counter
        self.identity = identity_of(trainer.identity)
        self.parts_before: dict[str, Any] = {}  # the state that the present step began with
        self.undone = 0  # steps in a row that did not count
        self.why_undone = ""  # the last one of them
        self.living = 0  # copies that take part in the present step; 0 before the first one
        self.is_first = False  # this copy writes the files of the run

    # Between steps

    def join(self) -> bool:
        """Take part in the run from its next step on; return False as `agree`.

        The graphs of a step are compiled before other copies know of this one, and wait for it.
        """
        trainer = self.trainer
        self.compile()
        progress = trainer.watchdog.progress
        if not await_lighthouse(self.config, progress, lambda: trainer.stop.received):
            self.stop_alone()
            return False
        self.quorum = Quorum(
            self.config,
            self.number,
            trainer.device,
            state_of=lambda: CopyState(self.tensors(), self.parts_before),
            progress=progress,
        )
        self.quorum.go_on_from(trainer.step)
        if not self.agree():
            return False
        self.has_joined = self.quorum.received is not None
        return True

    def compile(self) -> None:
        """Run forward and backward of a step that does not count, so that graphs are made."""
        trainer = self.trainer
        if not trainer.config.compile.compiles("model") or trainer.is_finished:
            return
        batch = trainer.loader.peek()
        moved = trainer.model.to_device(
            batch.input, batch.label, bos_id=trainer.bos_id, eos_id=trainer.tokenizer.eos_id
        )
        tokens = torch.ones((), dtype=torch.int64, device=trainer.device)
        trainer.begin_step_parts()
        trainer.model.forward_backward([moved], tokens, trainer.watchdog.progress)
        self.gradients()
        trainer.optimizer.zero_grad()

    def agree(self) -> bool:
        """Agree with the other copies on the next step; return False if the run has to stop.

        A copy that is behind others takes their state.
        """
        trainer = self.trainer
        if trainer.is_finished or trainer.stop.requested:
            return False
        if self.undone > MAX_UNDONE and trainer.stop.poll():
            self.stop_alone()
            return False
        self.parts_before = self.parts()
        before = self.living
        started = time.perf_counter()
        with trainer.watchdog.phase("waiting for other copies", "init_timeout_seconds"):
            if not self.quorum.begin_step(lambda: trainer.stop.received):
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
        has_changed = self.living != before or received is not None
        if has_changed:
            self.check_others()
            trainer.throughput.ranks = trainer.world_size * self.living
        self.take_role()
        if self.why_undone:
            if trainer.rank == 0:
                logger.warning(self.why_undone, extra={"event": "undone"})
            self.why_undone = ""
        if has_changed:
            self.describe_change(before)
        return True

    def check_others(self) -> None:
        """Raise ConfigError in a copy that is one too many, and TrainingError if a copy that was
        lost has saved a later step than that of the living.

        They may have loaded an earlier one while it was saved, or were cut off from it.
        """
        trainer = self.trainer
        if self.living > self.config.copies and not self.steps:
            raise ConfigError(
                f"copy {self.number}: {self.living} copies take part, and fault_tolerance.copies ="
                f" {self.config.copies}; start each with a COPY of its own, from 0 to"
                f" {self.config.copies - 1}"
            )
        checkpoint = trainer.config.checkpoint
        if not checkpoint.enable or checkpoint.load_step != NEWEST:
            return
        newest = max(trainer.checkpointer.present(), default=0)
        if max_over_ranks(newest) > [trainer.step]:
            raise TrainingError(
                f"step {newest} was saved by a copy that was lost since, and the living ones are at"
                f" step {trainer.step}; another start goes on from it",
                everywhere=True,
            )

    def newest(self) -> str:
        """Return the newest checkpoint, which another copy may have written, in words."""
        checkpointer = self.trainer.checkpointer
        steps = checkpointer.present() if checkpointer.config.enable else []
        return str(checkpointer.path_of(max(steps))) if steps else "the beginning"

    def stop_alone(self) -> None:
        """Stop this copy, which has found no quorum."""
        trainer = self.trainer
        if not trainer.stop.poll():
            logger.warning(
                f"no quorum of copies for {self.config.wait_seconds} s (fault_tolerance."
                f"wait_seconds): {trainer.describe_stop()}",
                extra={"event": "stop"},
            )
            trainer.stop.requested = True
        if trainer.config.checkpoint.enable and self.living:
            newest = max(trainer.checkpointer.present(), default=0)
            if max_over_ranks(newest) < [trainer.step]:  # whoever writes otherwise may be lost
                console.show(True)
                trainer.save_here()

    def describe_change(self, before: int) -> None:
        """Log how many copies there are; the first one does, and one that joins."""
        trainer = self.trainer
        if trainer.rank != 0:
            return
        received = self.quorum.received
        copies = f"{self.living} of {self.config.copies} copies take part"
        if received is not None:
            nbytes = sum(tensor.nbytes for tensor in received.tensors.values())
            logger.warning(
                f"copy {self.number} goes on from step {trainer.step} of a living copy"
                f" ({nbytes / 2**30:.2f} GiB a rank); {copies}",
                extra={"event": "copies"},
            )
        elif self.is_first:
            where = f"from step {trainer.step + 1} on"
            logger.warning(f"{copies} {where}, {before} before", extra={"event": "copies"})

    def take_role(self) -> None:
        """Write the files of the run if this copy is the first, else write none."""
        self.is_first = self.quorum.index == 0
        writes = self.is_first and self.trainer.rank == 0
        console.show(self.is_first)
        if writes != self.trainer.metrics.writes:
            self.trainer.write_files(writes=writes)

    def leave(self) -> None:
        """Take part in no further step."""
        if self.living:
            self.quorum.leave()

    # The state

    def tensors(self) -> dict[str, Tensor]:
        """Return this rank's shards of parameters and optimizer state, by their names."""
        return {name: local(tensor) for name, tensor in self.trainer.tensors().items()}

    def parts(self) -> dict[str, Any]:
        """Return the rest of this rank's state between two steps. A collective in this copy."""
        trainer = self.trainer
        trainer.bad_documents.gather([loader.pop_skipped() for loader in trainer.loaders])
        trainer.per_source.gather()
        parts = {name: part.state_dict() for name, part in trainer.stateful.items()}
        return {IDENTITY: self.identity, **parts}

    def load(self, received: CopyState) -> None:
        """Go on from the state of another copy. Raises ConfigError if it has another recipe."""
        if received.parts[IDENTITY] != self.identity:
            raise self.other_recipe()
        with torch.no_grad():
            for name, tensor in self.tensors().items():
                tensor.copy_(received.tensors[name])
        self.load_parts(received.parts)
        self.trainer.model.parameters_have_changed()

    def load_parts(self, parts: Mapping[str, Any]) -> None:
        for name, part in self.trainer.stateful.items():
            part.load_state_dict(parts[name])
        events.step = self.trainer.step

    def other_recipe(self) -> ConfigError:
        """Return the error of a copy that cannot train with the others."""
        return ConfigError(
            f"copy {self.number}: its recipe, data, device, packages or code are not those of the"
            " copies that train; start it as they were started (the recipe is"
            f" {self.trainer.dump_folder / 'config.toml'})"
        )

    # A step

    def next_batches(self) -> list[DeviceBatch]:
        """Return the local batches of this step that are of this copy."""
        trainer = self.trainer
        self.began = time.perf_counter()
        local_batches = trainer.layout.accumulation_at(trainer.step)
        share = self.quorum.share(local_batches)
        batches = []
        for index in range(local_batches):
            if index in share:
                batches.append(trainer.next_batch())
            else:
                trainer.loader.skip()
        return batches

    def gradients(self) -> list[Tensor]:
        """Return this rank's shards of all gradients; zeros where this copy had no batch."""
        shards = []
        for parameter in self.trainer.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            shards.append(gradient_shard(parameter))
        return shards

    @torch.no_grad()
    def commit(self, loss: Tensor, tokens: Tensor, stop_requests: Tensor) -> Totals | None:
        """Sum a step over copies; return None, and undo it, if it does not count.

        loss, tokens, stop_requests: over all ranks of this copy. Gradients and loss are divided by
        `nominal_tokens` before, and by the tokens of all copies after.
        """
        trainer = self.trainer
        totals = torch.stack((loss.double(), tokens.double(), stop_requests.double()))
        gradients = self.gradients()
        counts = [trainer.per_source.own]
        for part in trainer.step_parts:
            counts += part.counts()
        self.quorum.sum([*gradients, *counts, totals])
        difference = self.compare()
        if not self.quorum.commit():
            self.undo(self.quorum.fault, difference)
            return None
        self.steps += 1
        self.undone = 0
        of_all = Totals(*totals)
        ratio = float(self.nominal_tokens / of_all.tokens)
        if ratio != 1.0:  # some labels are not counted
            torch._foreach_mul_(gradients, ratio)
        return of_all._replace(loss=of_all.loss * ratio)

    @property
    def nominal_tokens(self) -> Tensor:
        """The tokens of this step if all labels count: a scalar.

        The counted ones are known when the step is done, and with it the copies that took part.
        """
        trainer = self.trainer
        tokens = trainer.layout.tokens_at(trainer.step)
        return torch.tensor(tokens, dtype=torch.int64, device=trainer.device)

    def compare(self) -> str:
        """Compare with other copies what has to be equal; return what is not, or "".

        The step does not count then. Every step compares recipe, code and data; one of
        training.compare_copies_freq compares parameters and optimizer state.
        """
        trainer = self.trainer
        freq = trainer.config.training.compare_copies_freq
        checksum = 0
        if freq and trainer.step % freq == 0:
            checksums = [examine(tensor)[0] for tensor in self.tensors().values()]
            checksum = int(torch.stack(checksums).sum())
        own = torch.tensor([self.identity, checksum], dtype=torch.int64, device=trainer.device)
        extremes = torch.cat((own, ~own))  # max(~x) is ~min(x), without overflow
        self.quorum.sum([extremes], torch.distributed.ReduceOp.MAX)
        if self.quorum.fault:
            return ""
        largest, inverted_smallest = extremes.chunk(2)
        differs = (largest != ~inverted_smallest).tolist()
        if differs[0]:
            difference = "recipe"
        elif differs[1]:
            difference = "state"
        else:
            return ""
        self.quorum.refuse(DifferentCopies(difference))
        return difference

    def undo(self, fault: str, difference: str) -> None:
        """Go back to the beginning of a step that does not count.

        fault: that this rank knows. difference: of `compare`. Raises ConfigError in a copy that has
        joined with another recipe, and TrainingError if parameters differ.
        """
        trainer = self.trainer
        reason = fault or "a sum over copies has failed on another rank"
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
            reason = "a copy has joined with another recipe, data, device or version of the code"
            if not self.steps:
                raise self.other_recipe()
        elif difference == "state":
            raise TrainingError(
                f"step {step}: parameters or optimizer state of copies of the model are not equal"
                f" (training.compare_copies_freq); another start goes on from {self.newest()}",
                everywhere=True,
            )
        self.why_undone = f"step {step} does not count, and is taken again: {reason}"
