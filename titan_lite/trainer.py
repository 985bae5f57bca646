"""One rank of a run: all parts in the order of their construction, and the training loop.

    Trainer(config).train()

A recipe is checked before the process group starts.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from pydantic import NonNegativeInt
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from titan_lite import manifest, progress, sinks
from titan_lite.checkpoint.agreement import agree
from titan_lite.checkpoint.manager import GROUP as CHECKPOINT_GROUP
from titan_lite.checkpoint.manager import Checkpointer, CheckpointError
from titan_lite.checkpoint.names import OF_FEATURES, section_of
from titan_lite.checkpoint.resume import compare
from titan_lite.checkpoint.run_identity import (
    DocumentsOfRun,
    ListingsOfRun,
    RunIdentity,
    documents_of_run,
    git_revision,
    list_documents,
    run_identity,
    with_machine,
)
from titan_lite.checkpoint.state import RunState, Stateful
from titan_lite.checkpoint.weights import load_initial
from titan_lite.compile.errors import CompileError
from titan_lite.config import Config, ConfigError, Data, flatten, save_recipe
from titan_lite.config.errors import MachineError
from titan_lite.config.families import ModelConfig
from titan_lite.config.phases import phase_at
from titan_lite.cost.machine import Machine
from titan_lite.cost.measure import find_machine, peak_flops
from titan_lite.data.bad_documents import BadDocumentsLog
from titan_lite.data.listing import Listing
from titan_lite.data.loader import Batch, Loader, build_loader
from titan_lite.data.preflight import warn_of_repeated_documents
from titan_lite.data.processes import LoaderError
from titan_lite.data.source_identity import SourceKey, source_keys
from titan_lite.data.tokenizer import Tokenizer
from titan_lite.distributed.device import device_memory, init_device
from titan_lite.distributed.layout import Layout
from titan_lite.distributed.mesh import (
    build_mesh,
    data_rank,
    sum_of_flags,
    sum_of_losses,
    sum_over_tokens,
)
from titan_lite.distributed.parallelize import ParallelModel, parallelize
from titan_lite.distributed.pipeline import DeviceBatch
from titan_lite.distributed.process_group import (
    connect_store,
    init_process_group,
    limit_collectives,
    share_on_node,
)
from titan_lite.dtensor import gradient_shard
from titan_lite.environment import folder_of_group, group_number
from titan_lite.feature import Measurement, Repeat, StepPart, features_of
from titan_lite.hooks import Hook, build_hooks
from titan_lite.logging import events, logger, telling_if_slow
from titan_lite.metrics.deferred import DeferredMetrics, StepMetrics
from titan_lite.metrics.per_source import PerSource
from titan_lite.metrics.profiler import set_flight_recorder
from titan_lite.metrics.start_times import StartTimes
from titan_lite.metrics.throughput import Throughput
from titan_lite.metrics.writer import MetricsWriter, peak_memory_gib
from titan_lite.models.attention import use_kernel
from titan_lite.models.loss import counted
from titan_lite.models.shapes import flops_per_token
from titan_lite.one_group import OneGroup
from titan_lite.optim.build import Optimizers, build_optimizer
from titan_lite.optim.clipping import clip_grad_norm_
from titan_lite.optim.lr_scheduler import Decay, decay_of, lr_factor
from titan_lite.resilience import TrainingError, exit_code, signals
from titan_lite.resilience.shared_errors import share_errors
from titan_lite.resilience.skipped_steps import SkippedSteps
from titan_lite.resilience.stop_signal import StopSignal
from titan_lite.rules.machine import check_agreement, check_machine

# Errors whose message is sufficient
EXPLAINED = (CompileError, CheckpointError, LoaderError, MachineError)


class EarlierPhaseError(Exception):
    """The newest checkpoint without damage is of an earlier phase of the run, which has to be
    trained in place of this one. Raised on all ranks. step: of the checkpoint.
    """

    everywhere = True

    def __init__(self, step: int):
        super().__init__(
            f"the newest checkpoint without damage is step {step}, of an earlier phase"
        )
        self.step = step


@dataclass
class Progress:
    """The progress of a run; a part of its checkpoints."""

    step: int = 0  # optimizer steps done, skipped ones included
    tokens_seen: int = 0  # counted tokens of these steps, over all ranks
    validation_due: bool = False  # before the next step
    measurements_due: list[str] = field(default_factory=list)  # likewise, by name

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step = manifest.validated(NonNegativeInt, state, "step")
        self.tokens_seen = manifest.validated(NonNegativeInt, state, "tokens_seen")
        self.validation_due = manifest.validated(bool, state, "validation_due")
        # absent in checkpoints of 0.1
        due = {"measurements_due": [], **state}
        self.measurements_due = manifest.validated(list[str], due, "measurements_due")


class Trainer:
    """One rank of a run.

    model: replaces the recipe's model shape. hooks: observers, called after those of every run.
    start_times: those of this process so far. store: of all ranks, where it is connected.
    """

    config: Config
    layout: Layout  # all sizes that follow from the recipe and the number of ranks
    hooks: list[Hook]
    dump_folder: Path
    own_folder: Path  # of what each replica group writes: dump_folder, without groups
    rank: int
    world_size: int
    tokenizer: Tokenizer
    start_times: StartTimes

    device: torch.device
    mesh: DeviceMesh
    dp_rank: int  # ranks of one dp_rank (tp, cp, pp) read the same sequences
    dp_degree: int
    counts_reads: bool  # of the ranks that read the same sequences, one counts them
    machine: Machine | None  # what the compile stage estimates times on, and the peak of MFU

    model: ParallelModel
    parameters: dict[str, nn.Parameter]  # by FQN
    step_parts: list[StepPart]  # of the features that the recipe turns on
    optimizer: Optimizers
    decay: Decay  # of the learning rate

    loader: Loader
    validation_loader: Loader | None
    per_source: PerSource  # tokens and loss of each source of a data mix
    validation_per_source: PerSource
    measurements: list[Measurement]  # of the features that the recipe turns on
    has_done_step: bool  # in this process
    has_validated: bool  # in this process, so that validation is compiled
    bad_documents: BadDocumentsLog
    bos_id: int  # the token that begins a document, for training.mask_documents

    progress: Progress
    replica_groups: OneGroup  # which share the steps of this run
    skipped_steps: SkippedSteps
    stop: StopSignal
    checkpointer: Checkpointer
    identity: RunIdentity  # of this run, which a resumed run is compared with
    listings: ListingsOfRun  # the documents, as the first rank of this node has found them
    documents: DocumentsOfRun  # what identifies them

    deferred: DeferredMetrics  # scalars of the last steps, on their way to the host
    last_metrics: StepMetrics  # of the last step whose scalars have arrived
    lr: float
    throughput: Throughput
    metrics: MetricsWriter

    def __init__(
        self,
        config: Config,
        *,
        model: ModelConfig | None = None,
        hooks: Sequence[Hook] = (),
        start_times: StartTimes | None = None,
        store: dist.Store | None = None,
    ):
        self.start_times = start_times or StartTimes()
        self.start_times.begin("checks")
        self.config = config
        self.rank = int(os.environ["RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        self.dump_folder = Path(config.job.dump_folder)
        self.layout = Layout.from_config(config, self.world_size, model, device_memory())
        self.listings = list_documents(config)
        self.tokenizer = check_machine(config, self.layout, self.listings)
        self.replica_groups = OneGroup(self)
        group = group_number(config.fault_tolerance)
        self.own_folder = folder_of_group(self.dump_folder, group)
        # A run before in this process is neither watched nor counted.
        progress.report_to(progress.Listener())
        sinks.close()
        self.hooks = [*build_hooks(config, self.rank, self.own_folder), *hooks]
        self.progress = Progress(validation_due=config.validation.enable)

        set_flight_recorder(config.comm.trace_buf_size, self.own_folder)
        self.checkpointer = Checkpointer(
            config.checkpoint,
            self.dump_folder,
            run=config.fault_tolerance.address,
            own_suffix=f"-copy-{group}" if group else "",
        )
        with share_errors(*EXPLAINED):
            self.connect_ranks(store)
            self.build_model()
            self.build_data()
            self.build_resilience()
            self.resume()
            self.build_metrics()

    # Construction

    def connect_ranks(self, store: dist.Store | None) -> None:
        """Set up the device, the process group and the mesh. store: as in Trainer."""
        config, degrees = self.config, self.layout.degrees
        self.start_times.begin("agreement of ranks")
        progress.start_phase("start", "init_timeout_seconds")
        for hook in self.hooks:
            hook.on_start()
        self.device = init_device(config.debug, config.training.float32_matmul_precision)
        use_kernel(config.training.attention_kernel)
        limit = config.comm.init_timeout_seconds + progress.PATIENCE
        store = store or connect_store(limit)
        self.share_listings(store)
        # Before anything that differs with the recipe, and would wait for the other ranks
        identity = run_identity(config, self.layout, self.tokenizer, self.documents)
        self.identity = with_machine(identity, git=git_revision() if self.rank == 0 else "")
        agree(store, self.rank, self.world_size, self.identity)
        self.start_times.begin("process group")
        # On a communicator that is connected at once, a pipeline's sends and receives would wait
        # for each other.
        limit = config.comm.longest_limit + progress.PATIENCE
        init_process_group(self.device, store, limit, connect=degrees["pp"] == 1)
        # From here on a signal ends a step and saves it, and a rank that is killed has failed.
        signals.end_start(self.before_stop)
        exit_code.record(exit_code.FAILED)
        self.checkpointer.lock_on_first()
        self.checkpointer.check_shared()
        check_agreement(self.layout)
        self.mesh = build_mesh(degrees, self.device.type)
        self.dp_rank, self.dp_degree = data_rank(self.mesh)
        self.counts_reads = all(
            self.mesh[axis].get_local_rank() == 0 for axis in ("pp", "cp", "tp")
        )

    def share_listings(self, store: dist.Store) -> None:
        """Have the documents listed by the first rank of this node, and identify them."""
        if os.environ["LOCAL_RANK"] == "0":
            for listing in itertools.chain.from_iterable(self.listings.values()):
                listing.complete()
        self.listings = share_on_node(self.listings, store)
        self.documents = documents_of_run(self.listings)

    def build_model(self) -> None:
        """Build this rank's stages on the meta device, fill them, and build their optimizer."""
        config = self.config
        self.start_times.begin("model")
        self.machine = None
        if config.compile.enable:
            self.machine = find_machine(config.compile.machine, self.device)
        self.model = parallelize(config, self.layout, self.mesh, machine=self.machine)
        # All groups that there are by now. The watchdog, which hears of the next phase, may lower
        # it.
        limit = config.comm.longest_limit + progress.PATIENCE
        limit_collectives(limit, but_for=CHECKPOINT_GROUP)
        progress.start_phase("start", "init_timeout_seconds")

        self.model.materialize(self.device)
        self.model.init_weights(config.debug.seed)
        self.parameters = self.model.parameters
        self.step_parts = [
            part for feature in features_of(config) for part in feature.step_parts(self.model)
        ]
        self.optimizer = build_optimizer(config, self.parameters)
        self.decay = decay_of(config.lr_scheduler, config.training.steps, self.layout.tokens)

    def build_data(self) -> None:
        """Build the loaders of training and validation."""
        config = self.config
        self.start_times.begin("data")
        self.bad_documents = BadDocumentsLog(config.data, self.dump_folder, self.counts_reads)
        self.bos_id = self.tokenizer.bos_id
        listings = self.listings["documents"]
        self.loader = self.loader_of(
            config.data,
            listings,
            "train",
            keys=source_keys(self.documents["documents"]),
        )
        self.per_source = PerSource(config.data.source_names(), self.mesh, self.device)
        self.validation_loader = None
        self.has_validated = False
        if config.validation.enable:
            data = config.validation_data
            self.validation_loader = self.loader_of(
                data, self.listings.get("validation_documents", listings), "validation"
            )
            self.validation_per_source = PerSource(data.source_names(), self.mesh, self.device)

        self.measurements = [
            each for feature in features_of(config) for each in feature.measurements(self)
        ]
        self.progress.measurements_due = [each.name for each in self.measurements]

    def loader_of(
        self,
        data: Data,
        listings: Sequence[Listing],
        split: Literal["train", "validation"],
        keys: Sequence[SourceKey] = (),
    ) -> Loader:
        """Return a loader of this rank's sequences.

        keys: of the sources, for its state in checkpoints.
        """
        return build_loader(
            data,
            self.tokenizer,
            split=split,
            streams=self.layout.sequences_per_step,
            batch_size=self.layout.local_batch_size,
            seq_len=self.layout.seq_len,
            dp_rank=self.dp_rank,
            dp_degree=self.dp_degree,
            seed=self.config.debug.seed,
            listings=listings,
            keys=keys,
        )

    def build_resilience(self) -> None:
        """Build what decides whether a step counts and whether the run goes on."""
        config = self.config
        self.has_done_step = False
        self.skipped_steps = SkippedSteps(config.training, config.optimizer.lr, self.device)
        self.stop = StopSignal(self.device, self.describe_stop)

    def build_metrics(self) -> None:
        """Build what measures the run and writes it."""
        config, layout = self.config, self.layout
        self.start_times.begin("metrics")
        self.deferred = DeferredMetrics(self.device)
        has_groups = config.fault_tolerance.replica_groups > 1
        self.bad_documents.writes = not has_groups
        self.metrics = self.build_metrics_writer(writes=self.rank == 0 and not has_groups)
        dist.barrier()
        dtype = getattr(torch, config.training.mixed_precision_param)
        configured = self.machine if config.compile.machine else None
        self.throughput = Throughput(
            layout.tokens,
            ranks=self.world_size,
            flops_per_token=flops_per_token(layout.model, layout.seq_len),
            flops_per_token_full_attention=flops_per_token(
                layout.model, layout.seq_len, full_attention=True
            ),
            peak_flops=peak_flops(configured, self.device, dtype),
        )
        events.step = self.step

    def build_metrics_writer(self, *, writes: bool) -> MetricsWriter:
        """Return a writer of metrics. writes: files too, beginning with the recipe."""
        config = self.config
        if writes and not self.is_finished:  # a finished run keeps its recipe
            save_recipe(config, self.dump_folder)
        return MetricsWriter(
            config.metrics,
            self.dump_folder,
            flatten(config.without_secrets()),
            writes=writes,
            steps_done=self.step,
        )

    def write_files(self, *, writes: bool) -> None:
        """Begin or end to write the files of the run, as its first group does."""
        lines = self.metrics.lines
        self.metrics.close()
        self.metrics = self.build_metrics_writer(writes=writes)
        self.metrics.lines = lines
        self.bad_documents.writes = writes
        events.keep(self.dump_folder, all_events=writes)

    # Training

    def train(self) -> bool:
        """Train until the phase ends (returns True) or until a signal asks to stop (False).

        Raises TrainingError.
        """
        with ExitStack() as contexts:
            contexts.enter_context(share_errors(*EXPLAINED))
            contexts.enter_context(self.bad_documents.listing_on_error(self.loaders))
            steps = range(self.step + 1, self.config.phase.end + 1)
            for hook in self.hooks:
                contexts.enter_context(hook.around_training(steps))
            return self.run_steps()

    def run_steps(self) -> bool:
        progress.start_phase("the first step", self.compile_limit)
        going_on = self.join_groups()
        for hook in self.hooks:
            hook.on_train_start(self)
        self.throughput.start(self.step)
        if going_on:
            self.replica_groups.write_due()

        stops = self.replica_groups.poll_stop()
        if self.progress.validation_due and not stops:
            self.start_times.begin("validation")
            self.validate()
        if going_on and self.progress.measurements_due and not stops:
            self.start_times.begin("measurements")
            self.measure()
        self.start_times.begin("first step")
        while going_on and not self.is_finished and not self.stop.requested:
            self.begin_step()
            if self.train_step():
                self.end_step()
            going_on = self.replica_groups.agree()

        with (
            self.throughput.exclude("saving"),
            progress.phase("save", "init_timeout_seconds"),
        ):
            self.checkpointer.wait()
        self.replica_groups.leave()
        self.read_metrics(wait=True)
        self.metrics.write(self.step, self.throughput.excluded_values())
        self.metrics.close()
        for hook in self.hooks:
            hook.on_train_end(self)
        return not self.is_stopped

    def join_groups(self) -> bool:
        """Take part in the run with its other replica groups, if there are some; return False if
        the run stops, or they are done with it.
        """
        if self.is_finished:
            return True
        for feature in features_of(self.config):
            self.replica_groups = feature.replica_groups(self) or self.replica_groups
        return self.replica_groups.join()

    def begin_step(self) -> None:
        """Count a new step."""
        self.progress.step += 1
        self.progress.validation_due = self.config.validation.enable and self.is_due(
            self.config.validation.freq
        )
        self.progress.measurements_due = [
            each.name for each in self.measurements if self.is_due(each.freq)
        ]
        events.step = self.step
        progress.beat(f"step {self.step}")
        for hook in self.hooks:
            hook.on_step_start(self.step)

    def end_step(self) -> None:
        """Log, validate and save after a step, where it is time to."""
        config = self.config
        logs = self.is_due(config.metrics.log_freq)
        # step 1, too: a hook checks the loss of a new model before the next step
        self.read_metrics(wait=logs or self.step == 1 or self.replica_groups.has_several)
        for hook in self.hooks:
            hook.on_step_end(self.step)
        if not self.has_done_step:  # all graphs are compiled
            self.has_done_step = True
            progress.start_phase(f"step {self.step}", "train_timeout_seconds")
        if logs:
            self.log_metrics()
        if self.progress.validation_due and not self.stop.requested:
            self.validate()
        self.measure()
        if config.checkpoint.enable:
            if self.is_due(config.checkpoint.interval) or self.stop.requested:
                if self.replica_groups.is_first:
                    self.save()
                self.replica_groups.poll_stop()
            else:
                self.replica_groups.write_due()
            if logs:
                self.checkpointer.poll()

    def train_step(self) -> bool:
        """Accumulate gradients over the local batches, then update the weights.

        Return False if the step does not count, since another replica group was lost: nothing
        has changed then. Nothing here waits for the device, but for what features do at their
        moments: `read_metrics` gets the scalars later.
        """
        if self.has_done_step:
            batches = self.replica_groups.next_batches()
        else:
            batches = self.first_batches()
        for hook in self.hooks:
            hook.on_batches(self.step)
        tokens = self.replica_groups.sum_tokens(self.count_tokens(batches))

        self.begin_step_parts()
        loss = self.forward_backward(batches, tokens)
        for part in self.step_parts:
            part.after_backward(self.step)
        # Sums over all ranks, so that every rank decides the same
        loss, stop_requests = self.sum_loss_and_stops(loss, self.stop.received)
        totals = self.replica_groups.commit(loss, stop_requests)
        if totals is None:
            return False
        loss, stop_requests = totals
        for hook in self.hooks:
            hook.on_gradients(self.step, self.parameters)
        grad_norm = clip_grad_norm_(self.parameters.values(), self.config.training.max_norm)

        skip, loss_limit = self.skipped_steps.decide(loss, grad_norm)
        for part in self.step_parts:
            part.before_update(skip)
        self.lr = self.config.optimizer.lr * lr_factor(
            self.step, self.config.lr_scheduler, self.decay
        )
        self.optimizer.set_lr(self.lr)
        self.optimizer.step(skip)
        self.model.parameters_have_changed()
        self.optimizer.zero_grad()

        self.deferred.defer(
            self.step,
            loss=loss,
            grad_norm=grad_norm,
            skip=skip,
            loss_limit=loss_limit,
            tokens=tokens,
            stop_requests=stop_requests,
        )
        return True

    def forward_backward(self, batches: Sequence[DeviceBatch], tokens: Tensor) -> Tensor:
        """Accumulate the gradients of the loss, and return this rank's part of it, a scalar.

        tokens: as in ParallelModel.forward_backward.
        """
        found: list[Tensor] = []
        if batches:  # a replica group may have none in a small step
            found = self.model.forward_backward(batches, tokens)
        for part in self.step_parts:
            if repeat := part.repeat():
                found = self.repeat_step(repeat, batches, tokens)
        total = torch.zeros((), device=self.device)
        for losses in found:
            total += self.per_source.add(losses, tokens)
        return total

    def begin_step_parts(self) -> None:
        for part in self.step_parts:
            part.begin_step(self.step)

    def repeat_step(
        self, repeat: Repeat, batches: Sequence[DeviceBatch], tokens: Tensor
    ) -> list[Tensor]:
        """Run forward and backward again. Nothing of the first run counts."""
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                gradient_shard(parameter)  # waits for a reduction in flight
        self.optimizer.zero_grad()
        self.begin_step_parts()
        with progress.phase(repeat.why, self.compile_limit), repeat.context:
            return self.model.forward_backward(batches, tokens)

    def count_tokens(self, batches: Sequence[DeviceBatch]) -> Tensor:
        """Return the number of counted labels of these batches, over all ranks: a scalar."""
        counts = [counted(batch.label) for batch in batches]
        if not counts:
            counts.append(torch.zeros((), dtype=torch.int64, device=self.device))
        tokens = torch.stack(counts).sum()
        sum_over_tokens(tokens, self.mesh)
        return tokens

    def sum_loss_and_stops(self, loss: Tensor, signal_received: bool) -> tuple[Tensor, Tensor]:
        """Return the sum of the loss, and a number above 0 if a rank requests a stop: scalars.

        One reduction for both. Ranks of a pipeline count their requests once each, as the loss is
        zero on all but the last of them.
        """
        both = torch.stack((loss, torch.full_like(loss, signal_received)))
        sum_of_losses(both, self.mesh)
        sum_of_flags(both[1:], self.mesh)
        return both[0], both[1]

    def first_batches(self) -> list[DeviceBatch]:
        """Return the local batches of the first step, and tell what is packed if that takes long:
        a hang report names the phase.
        """
        sequences = self.layout.sequences_per_step // self.dp_degree
        what = f"packing {sequences:,} sequences of {self.layout.seq_len:,} tokens"
        with progress.phase(what, self.compile_limit), telling_if_slow(what):
            return self.replica_groups.next_batches()

    def next_batch(self) -> DeviceBatch:
        """Return the next local batch of training, on the device."""
        for hook in self.hooks:
            hook.on_batch(self.step)
        with self.throughput.waiting():
            batch = next(self.loader)
        return self.to_device(batch, self.per_source)

    def to_device(self, batch: Batch, per_source: PerSource) -> DeviceBatch:
        """Move a batch to the device, and count its tokens."""
        moved = self.model.to_device(
            batch.input, batch.label, bos_id=self.bos_id, eos_id=self.tokenizer.eos_id
        )
        per_source.read(batch.sources, counted(moved.label))
        return moved

    @torch.no_grad()
    def validate(self) -> None:
        """Log the loss on held-out documents, always the same ones.

        A run that stops meanwhile repeats it when it resumes.
        """
        assert self.validation_loader is not None
        loader, per_source = self.validation_loader, self.validation_per_source
        beginning = loader.state_dict()
        nats = torch.zeros((), device=self.device, dtype=torch.float64)
        tokens = torch.zeros((), device=self.device, dtype=torch.float64)
        with ExitStack() as contexts:
            contexts.enter_context(self.throughput.exclude("validation"))
            if not self.has_validated:  # the first one may compile
                contexts.enter_context(progress.phase("validation", self.compile_limit))
            for _ in range(self.config.validation.steps):
                for _ in range(self.layout.accumulation):
                    for hook in self.hooks:
                        hook.on_validation_batch(self.step)
                    progress.beat("validation")
                    batch = self.to_device(next(loader), per_source)
                    nats += per_source.add(self.model.evaluate(batch))
                    tokens += counted(batch.label).sum()
                if self.replica_groups.poll_stop():
                    return
            sum_of_losses(nats, self.mesh)
            sum_over_tokens(tokens, self.mesh)
            values = {"validation_loss": float(nats / tokens), **per_source.values("validation_")}
        if not self.has_validated:
            sequences = self.config.validation.steps * self.layout.sequences_per_step
            warn_of_repeated_documents(loader, sequences)
        loader.load_state_dict(beginning)
        if self.step:  # these documents were counted by the validation before the first step
            loader.pop_skipped()
        self.metrics.log(self.step, values)
        self.has_validated = True
        self.progress.validation_due = False

    @torch.no_grad()
    def measure(self) -> None:
        """Log what features measure of the weights, where it is due."""
        for each in self.measurements:
            if each.name not in self.progress.measurements_due or self.stop.requested:
                continue
            with (
                self.throughput.exclude(each.name),
                progress.phase(each.name, "init_timeout_seconds"),
            ):
                found = each.measure(self.replica_groups.poll_stop)
            if found is None:
                return
            self.metrics.log(self.step, found.values, found.shown)
            self.progress.measurements_due.remove(each.name)

    # Metrics

    def read_metrics(self, *, wait: bool) -> None:
        """Count the steps whose scalars have arrived from the device; wait: for those of all steps.

        Raises TrainingError after too many skipped steps in a row.
        """
        for metrics in self.deferred.arrived(wait=wait):
            self.skipped_steps.record(
                metrics.step, metrics.loss, metrics.grad_norm, metrics.skip, metrics.loss_limit
            )
            self.progress.tokens_seen += int(metrics.tokens)
            self.stop.update(int(metrics.stop_requests))
            self.last_metrics = metrics
            for hook in self.hooks:
                hook.on_metrics(metrics)

    def log_metrics(self) -> None:
        """Log the values of this step, and of the steps since the last line. A collective."""
        skipped_documents = [loader.pop_skipped() for loader in self.loaders]
        values = {
            "loss": self.last_metrics.loss,
            "grad_norm": self.last_metrics.grad_norm,
            "lr": self.lr,
            **self.throughput.values(self.step),
            "memory_gib": peak_memory_gib(self.device),
            "tokens_seen": self.progress.tokens_seen,
            "skipped_steps": self.skipped_steps.count,
            **self.bad_documents.gather(skipped_documents),
            **self.per_source.values(),
        }
        steps = range(self.throughput.window_start + 1, self.step + 1)
        folder = self.dump_folder if self.metrics.writes else None
        for part in self.step_parts:
            values |= part.metrics(steps, folder)
        if self.replica_groups.has_several:
            values["copies"] = self.replica_groups.living
        self.metrics.log(self.step, values)
        self.throughput.start(self.step)

    # Checkpoints

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint, by their names there."""
        tensors: dict[str, Tensor] = {**self.parameters, **self.model.buffers}
        for name, tensor in self.optimizer.state_tensors().items():
            tensors[f"optimizer.state.{name}"] = tensor
        for part in self.step_parts:
            added = part.state_tensors()
            assert all(section_of(name) in OF_FEATURES for name in added), "not in TENSORS"
            tensors |= added
        return {name: tensor.detach() for name, tensor in tensors.items()}

    def torchtitan_values(self) -> dict[str, Any]:
        """Return what torchtitan's checkpoints have beside tensors; a resume does not read it."""
        values: dict[str, Any] = {
            "train_state.step": self.step,
            "train_state.ntokens_seen": self.progress.tokens_seen,
        }
        for name, value in self.optimizer.settings().items():
            values[f"optimizer.param_groups.{name}"] = value
        return values

    @property
    def stateful(self) -> dict[str, Stateful]:
        """The parts of a checkpoint beside tensors, each under its own name."""
        return {
            "progress": self.progress,
            "skipped_steps": self.skipped_steps,
            "per_source": self.per_source,
            "loader": self.loader,
            "bad_documents": self.bad_documents,
        }

    def save(self) -> None:
        """Save this step. A collective, but for the state_dict of the parts (`Stateful`)."""
        self.read_metrics(wait=True)
        self.bad_documents.gather([loader.pop_skipped() for loader in self.loaders])
        for hook in self.hooks:
            hook.on_save(self.step)
        with (
            self.throughput.exclude("saving"),
            progress.phase("save", "init_timeout_seconds"),
        ):
            self.per_source.gather()
            parts = {name: part.state_dict() for name, part in self.stateful.items()}
            values = {**self.tensors(), **self.torchtitan_values()}
            self.checkpointer.save(
                self.step,
                values,
                RunState(self.identity, parts, self.documents),
                last=not self.needs_resume,
            )

    def resume(self) -> None:
        """Load the newest checkpoint, or the one of checkpoint.load_step.

        Without one, load the weights of checkpoint.initial_load_path, if set.
        """
        config = self.config
        self.start_times.begin("checkpoint")
        try:
            step = self.checkpointer.verified_step() if config.checkpoint.enable else None
        except ConfigError as error:
            if self.checkpointer.is_alone:
                raise
            raise TrainingError(
                f"another group saves meanwhile: {error}", everywhere=True
            ) from None
        if step is None:
            path = config.checkpoint.initial_load_path
            tensors = {**self.parameters, **self.model.buffers}
            load_initial(path, self.layout.model, tensors, self.dump_folder)
        else:
            self.load(step)
        self.model.parameters_have_changed()

    def load(self, step: int) -> None:
        """Load a checkpoint, but for what the changed recipe restarts.

        Raises EarlierPhaseError if newer ones, of this phase, are damaged.
        """
        if phase_at(self.config, step).phase != self.config.phase:
            self.checkpointer.close()
            raise EarlierPhaseError(step)
        saved = self.checkpointer.read_state(step)
        changes = compare(saved, self.identity, self.documents)
        changes.refuse_unless_accepted(self.config.checkpoint)
        for line in changes.describe():
            logger.info(line)
        self.checkpointer.load(step, changes.tensors_to_load(self.tensors()))
        stateful = self.stateful
        if changes.restarts_data:
            del stateful["loader"], stateful["bad_documents"]
        saved.load_into(stateful)
        if not self.config.validation.enable:
            self.progress.validation_due = False
        due = self.progress.measurements_due
        self.progress.measurements_due = [
            each.name for each in self.measurements if each.name in due
        ]

    # State of the run

    @property
    def step(self) -> int:
        """The optimizer step that runs, or the last one that is done."""
        return self.progress.step

    @property
    def is_finished(self) -> bool:
        """True if there is no further step in this phase of the run."""
        return self.step >= self.config.phase.end

    @property
    def is_stopped(self) -> bool:
        """True if a signal has asked for a stop, and the run has to be resumed."""
        return self.stop.requested and self.needs_resume

    @property
    def needs_resume(self) -> bool:
        """True if a run that stops now has to be resumed."""
        waits = self.progress.validation_due or bool(self.progress.measurements_due)
        return self.step < self.config.training.steps or waits

    def is_due(self, interval: int) -> bool:
        """Return True if what happens every `interval` steps, and at the last, happens now."""
        return self.step % interval == 0 or self.is_finished

    @property
    def loaders(self) -> list[Loader]:
        return [self.loader, *([self.validation_loader] if self.validation_loader else [])]

    @property
    def compile_limit(self) -> str:
        """Key in [comm] of the time limit of a phase that may compile."""
        return "compile_timeout_seconds" if self.config.compile.enable else "init_timeout_seconds"

    def before_stop(self) -> str:
        """Return what the run does before it stops, if it received a signal now."""
        phase = progress.current
        seconds = time.monotonic() - phase.began
        saves = self.config.checkpoint.enable and phase.name != "save"
        save = ", and a save" if saves else ""
        return f"{phase.name}, which began {seconds:.0f} s ago{save}"

    def describe_stop(self) -> str:
        """Return the step at which the run stops, and what it does then."""
        ending = "exiting, as the run is done"
        if self.needs_resume:
            ending = f"exiting (code {exit_code.STOPPED})"
        if not self.replica_groups.is_first:
            return f"step {self.step}: {ending}"
        return f"step {self.step}: {self.checkpointer.before_exit(self.step)}{ending}"
