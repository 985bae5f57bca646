"""Build all parts of a run in order, then run the training loop.

The only module that knows every part.

    Trainer(config).train()

A recipe is checked before the process group starts (distributed/layout.py, check.py).
"""

import functools
import gc
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_lite.check import accepted_state, check, check_agreement, describe_run
from titan_lite.checkpoint.manager import GROUP as CHECKPOINT_GROUP
from titan_lite.checkpoint.manager import Checkpointer, CheckpointError
from titan_lite.checkpoint.resume import git_revision
from titan_lite.checkpoint.weights import load_initial
from titan_lite.compile.compile import CompileError, compile_function
from titan_lite.config import Config, flatten, save_recipe
from titan_lite.cost.measure import find_machine, peak_flops
from titan_lite.data.bad_documents import BadDocumentsLog
from titan_lite.data.loader import Batch, build_loader
from titan_lite.data.packing import doc_starts, doc_stats
from titan_lite.data.preflight import check_first_loss, preflight
from titan_lite.data.processes import LoaderError
from titan_lite.distributed.layout import make_layout
from titan_lite.distributed.mesh import (
    build_mesh,
    data_rank,
    sum_of_flags,
    sum_of_losses,
    sum_over_tokens,
)
from titan_lite.distributed.parallelize import gather_reports, parallelize
from titan_lite.distributed.param_collectives import started_last
from titan_lite.distributed.powersgd import PowerSGD
from titan_lite.distributed.process_group import device_memory, init_device, init_process_group
from titan_lite.distributed.simple_fsdp import shard_of
from titan_lite.logging import events, logger
from titan_lite.metrics.deferred import DeferredMetrics
from titan_lite.metrics.end_lines import end_lines, log_compile_reports
from titan_lite.metrics.per_source import PerSource
from titan_lite.metrics.profiler import build_profiler, set_flight_recorder
from titan_lite.metrics.start_lines import start_lines
from titan_lite.metrics.throughput import Throughput
from titan_lite.metrics.writer import MetricsWriter, draw_loss, peak_memory_gib
from titan_lite.models.attention import masks_by_kernel, use_kernel
from titan_lite.models.llama3 import ModelConfig, flops_per_token
from titan_lite.models.loss import counted
from titan_lite.optim.build import (
    build_optimizer,
    optimizer_settings,
    optimizer_state,
    set_learning_rate,
)
from titan_lite.optim.clipping import clip_grad_norm_
from titan_lite.optim.lr_scheduler import lr_factor
from titan_lite.outside import fields_of
from titan_lite.resilience import exit_code, signals
from titan_lite.resilience.replica_check import ReplicaCheck
from titan_lite.resilience.restarts import Restarts, again
from titan_lite.resilience.skipped_steps import SkippedSteps
from titan_lite.resilience.stopping import Stopping
from titan_lite.resilience.stragglers import Stragglers
from titan_lite.resilience.watchdog import PATIENCE, Watchdog
from titan_lite.validation import Validation

DeviceBatch = tuple[
    Tensor, Tensor, dict[str, Tensor]
]  # input, label, and the model's other arguments
Observe = Callable[[str, "Trainer"], None]


class Trainer:
    """One rank of a run.

    model: replaces the recipe's model shape. observe: called with the name of a moment and the
    trainer: "start" (before the process group), "model" (before parameters are allocated), "built";
    in a step "batch" (before each), "forward" (before the first), "backward" (after the last),
    "step" (`last_step` has its figures); "validation" (before each batch), "save" (before).
    """

    def __init__(
        self, config: Config, *, model: ModelConfig | None = None, observe: Observe | None = None
    ):
        self.config, self.observe = config, observe or (lambda moment, trainer: None)
        self.dump_folder, self.dtype = (
            Path(config.job.dump_folder),
            getattr(torch, config.training.mixed_precision_param),
        )
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.layout = make_layout(config, self.world_size, model, memory=device_memory())
        self.tokenizer = check(config, self.layout)
        self.checkpointer = Checkpointer(
            config.checkpoint, self.dump_folder, beat=lambda: self.watchdog.beat()
        )
        set_flight_recorder(config.comm.trace_buf_size, self.dump_folder)
        self.watchdog = Watchdog(
            config.comm, self.rank, self.world_size, notes=started_last, apart=CHECKPOINT_GROUP
        )
        with self.watchdog.reporting(CompileError, CheckpointError, LoaderError):
            self.build_mesh()
            self.build_model()
            self.build_data()
            self.step, self.tokens_seen, self.validated, self.validation_due = (
                0,
                0,
                False,
                config.validation.enable,
            )
            self.skipped = SkippedSteps(config.training, config.optimizer.lr, self.device)
            self.readings = DeferredMetrics(self.device)
            self.copies = ReplicaCheck(
                config.training.compare_copies_freq, self.checkpointer.describe_newest
            )
            self.stopping, self.restarts = (
                Stopping(self.device, self.describe_stop),
                Restarts(self.dump_folder),
            )
            self.resume()
            self.build_metrics()
            self.observe("built", self)

    def build_mesh(self) -> None:
        """Set up the device, the process group and the mesh."""
        config, degrees = self.config, self.layout.degrees
        self.watchdog.enter("start", "init_timeout_seconds")
        self.observe("start", self)
        self.device = init_device(config.debug, config.training.float32_matmul_precision)
        use_kernel(config.training.attention_kernel)
        by_kernel = masks_by_kernel(
            self.device, self.dtype, self.layout.model.head_dim, degrees["cp"]
        )
        self.counts_documents = config.training.mask_documents and by_kernel
        # On a communicator that is connected at once, a pipeline's sends and receives would wait
        # for each other.
        init_process_group(
            self.device, config.comm.init_timeout_seconds + PATIENCE, connect=degrees["pp"] == 1
        )
        signals.started()
        exit_code.record(exit_code.FAILED)
        if config.checkpoint.enable:
            self.checkpointer.lock_on_first()
        check_agreement(self.layout)
        self.mesh = build_mesh(degrees, self.device.type)
        self.dp_rank, self.dp_degree = data_rank(self.mesh)
        # False where a rank along another axis reads the same rows, and tells of them
        self.reads_alone = all(self.mesh[axis].get_local_rank() == 0 for axis in ("pp", "cp", "tp"))
        self.machine = (
            find_machine(config.compile.machine, self.device) if config.compile.enable else None
        )

    def build_model(self) -> None:
        """Build, compile, allocate and initialize this rank's stages, then build their optimizer."""
        config = self.config
        self.model = parallelize(config, self.layout, self.mesh, machine=self.machine)
        self.compile_reports = self.model.compile_reports
        # sets the limits of new process groups, too
        self.watchdog.enter("start", "init_timeout_seconds")
        self.observe("model", self)
        self.model.materialize(self.device)
        self.model.init_weights(config.debug.seed)
        self.stages = self.model.stages
        self.parameters = self.model.parameters
        # between copies
        self.between = PowerSGD(self.stages, config.parallelism, config.debug.seed)
        compile_update = None
        if config.compile.compiles("optimizer"):
            compile_update = functools.partial(
                compile_function, config=config.compile, component="optimizer"
            )
        self.optimizer = build_optimizer(config.optimizer, self.parameters, compile=compile_update)

    def build_data(self) -> None:
        config, layout = self.config, self.layout
        ranks: dict[str, Any] = dict(dp_rank=self.dp_rank, dp_degree=self.dp_degree)
        share = dict(ranks, batch_size=layout.local_batch_size, seq_len=layout.seq_len)
        build = functools.partial(
            build_loader, config.data, self.tokenizer, **share, seed=config.debug.seed
        )
        self.loader = build(split="train", streams=layout.most_rows)
        self.loaders = [self.loader]
        self.bad_documents = BadDocumentsLog(config.data, self.dump_folder, self.reads_alone)
        self.document_begin = self.tokenizer.bos_id
        sums = (
            functools.partial(add_up, mesh=self.mesh) for add_up in (sum_of_losses, sum_over_tokens)
        )
        by_source = functools.partial(PerSource, config.data.source_names(), self.device, *sums)
        self.by_source = by_source()
        if config.validation.enable:
            self.loaders.append(build(split="validation", streams=layout.rows))
            batches = config.validation.steps, layout.accumulation
            self.validation = Validation(
                self.loaders[-1], *batches, by_source(), self.device, self.mesh
            )

    def build_metrics(self) -> None:
        """Build the parts that log, write and watch the run, and log its start lines."""
        config, layout, steps = self.config, self.layout, self.config.training.steps
        if self.rank == 0 and self.step < steps:  # a finished run keeps its recipe
            save_recipe(config, self.dump_folder)
        dist.barrier()
        self.metrics = MetricsWriter(
            config.metrics,
            self.dump_folder,
            flatten(config),
            writes=self.rank == 0,
            first_step=self.step,
            total_steps=steps,
        )
        machine = self.machine if config.compile.machine else None
        causal, full = (
            flops_per_token(layout.model, layout.seq_len, full_attention=full)
            for full in (False, True)
        )
        peak = peak_flops(machine, self.device, self.dtype)
        self.throughput = Throughput(
            layout.tokens_until,
            ranks=self.world_size,
            flops_per_token=(causal, full),
            peak_flops=peak,
        )
        self.stragglers = Stragglers(self.rank)
        notes: dict[str, Any] = dict(
            priced=self.machine is not None, sources=self.loader.source_lines()
        )
        for line in start_lines(config, layout, self.device, **notes):
            logger.info(line)
        events.step = self.step
        logger.info(
            f"steps: {self.step} done of {steps}; output in {self.dump_folder}",
            extra={"event": "start"},
        )

    def train(self) -> bool:
        """Train until training.steps (returns True) or a signal to stop (returns False).

        Raises TrainingError.
        """
        listing = self.bad_documents.listing_on_error(self.loaders)
        with self.watchdog.reporting(CompileError, CheckpointError, LoaderError), listing:
            return self.loop()

    def loop(self) -> bool:
        config, steps = self.config, self.config.training.steps
        gc.disable()  # ranks that collect at different moments wait for each other
        self.watchdog.enter("the first step", self.compile_limit)
        if self.step < steps:
            preflight(
                self.loader.peek(), self.tokenizer, self.layout.model.vocab_size, self.dp_rank
            )
            self.copies.check(self.step, self.state_tensors)
        else:
            logger.info(
                f"nothing to do: step {self.step} is done, and training.steps = {steps}; raise it"
                " to go on"
            )
        self.throughput.start(self.step)
        first_step = self.step + 1
        with build_profiler(config.profiling, self.dump_folder, self.rank, self.step) as profiler:
            if not self.stopping.ask() and self.validation_due:
                self.validate()
            while self.step < steps and not self.stopping.asked:
                self.begin_step()
                self.train_step()

                # Periodic work
                last = self.step == steps
                logs = self.step % config.metrics.log_freq == 0 or last
                self.read(now=logs or self.step == 1)
                if self.step == 1 and not config.checkpoint.initial_load_path:
                    check_first_loss(self.last_step[1], self.layout.model.vocab_size)
                self.copies.check_if_due(self.step, self.state_tensors)
                if self.step == first_step:
                    self.end_compilation()
                if logs:
                    self.log()
                self.metrics.advance()
                profiler.step()
                if self.validation_due and not self.stopping.asked:
                    self.validate()
                if config.checkpoint.enable and (
                    self.step % config.checkpoint.interval == 0 or last or self.stopping.asked
                ):
                    self.save(last=last and not self.unfinished)
                    self.stopping.ask()
                if logs:
                    self.checkpointer.poll()
        with self.watchdog.within("save", "init_timeout_seconds"):
            self.checkpointer.wait()
        stopped = self.stopping.asked and self.unfinished
        self.finish("stopped" if stopped else "done")
        return not stopped

    def begin_step(self) -> None:
        self.step += 1
        events.step = self.step
        self.restarts.begin(self.step)
        self.watchdog.beat(f"step {self.step}")
        training, validation = self.config.training, self.config.validation
        self.validation_due = validation.enable and (
            self.step % validation.freq == 0 or self.step == training.steps
        )
        if self.step > 1 and (rows := self.layout.rows_at(self.step)) != (
            before := self.layout.rows_at(self.step - 1)
        ):
            logger.info(
                f"batch: {rows:,} sequences a step from step {self.step:,} on, {before:,} before"
            )
        if self.step % training.gc_freq == 0:
            gc.collect(1)

    def train_step(self) -> None:
        """Run one optimizer step.

        Nothing here but Shampoo waits for the device; `read` gets the loss later.
        """
        with self.stragglers.preparing():
            batches = [self.next_batch() for _ in range(self.layout.accumulation_at(self.step))]
        tokens = torch.stack([counted(label) for _, label, _ in batches]).sum()
        sum_over_tokens(tokens, self.mesh)
        self.observe("forward", self)
        loss = self.forward_backward(batches, tokens)
        self.between.reduce(self.step)
        self.observe("backward", self)
        grad_norm = clip_grad_norm_(self.parameters.values(), self.config.training.max_norm)
        self.lr = self.config.optimizer.lr * lr_factor(
            self.step, self.config.lr_scheduler, self.config.total_steps
        )
        set_learning_rate(self.optimizer, self.lr)

        ending = torch.stack((loss, torch.full_like(loss, bool(signals.received()))))
        sum_of_losses(ending, self.mesh)
        sum_of_flags(ending[1:], self.mesh)
        # Both are sums over all ranks, so every rank decides the same.
        skip, limit = self.skipped.decide(ending[0], grad_norm)
        self.between.settle(skip)
        self.optimizer.step(skip)
        self.model.refresh_float8_scales()
        self.optimizer.zero_grad()
        figures = {"loss": ending[0], "grad_norm": grad_norm, "skip": skip, "limit": limit}
        self.readings.put(self.step, **figures, asked=ending[1], tokens=tokens)

    def read(self, *, now: bool) -> None:
        """Record figures that have arrived from the device; now: wait for all.

        Raises TrainingError: too many skipped steps.
        """
        for step, values in self.readings.take(now=now):
            loss, grad_norm = values["loss"], values["grad_norm"]
            self.skipped.note(step, loss, grad_norm, values["skip"], values["limit"])
            self.tokens_seen += int(values["tokens"])
            self.stopping.note(bool(values["asked"]))
            self.last_step = step, loss, grad_norm
            self.observe("step", self)

    def forward_backward(self, batches: list[DeviceBatch], tokens: Tensor) -> Tensor:
        """Accumulate gradients of the loss, divided by `tokens` of all ranks; return this rank's
        part of it, a scalar.
        """
        total = torch.zeros((), device=self.device)
        for losses in self.model.forward_backward(batches, tokens):
            total += self.by_source.add(losses, tokens)
            self.watchdog.beat()
        return total

    def next_batch(self) -> DeviceBatch:
        self.observe("batch", self)
        with self.throughput.waiting():
            batch = next(self.loader)
        moved = self.to_device(batch)
        self.by_source.read(batch.sources, counted(moved[1]))
        return moved

    def to_device(self, batch: Batch) -> DeviceBatch:
        """Move a batch to the device and select this rank's tokens of every sequence (context
        parallelism).
        """
        input = batch.input.to(self.device, non_blocking=True)
        label = batch.label.to(self.device, non_blocking=True)
        documents = (
            {"labels": label[:, self.model.positions]} if self.layout.loss_chunk else {}
        )  # for the loss in the model
        if self.config.training.mask_documents:
            starts = doc_starts(input, self.document_begin)
            documents["doc_starts"] = starts[:, self.model.positions]
            if self.counts_documents:
                # on the host, as the batch is
                documents["doc_stats"] = doc_stats(batch.input, self.document_begin)
        return input[:, self.model.positions], label[:, self.model.positions], documents

    def validate(self) -> None:
        """Log the loss on held-out documents.

        A run that stops meanwhile repeats it when it resumes.
        """
        limit = (
            nullcontext()
            if self.validated
            else self.watchdog.within("validation", self.compile_limit)
        )
        with self.throughput.exclude(), limit:
            figures = self.validation.figures(
                self.model.evaluate, self.to_device, self.begin_validation, self.stopping.ask
            )
        if figures is None:
            return
        self.metrics.log(self.step, figures)
        self.validated = True
        self.validation_due = False

    def begin_validation(self) -> None:
        """Notify `observe` and the watchdog before each validation batch."""
        self.observe("validation", self)
        self.watchdog.beat("validation")

    @property
    def compile_limit(self) -> str:
        """Key in [comm] of the time limit for a phase that may compile."""
        return "compile_timeout_seconds" if self.config.compile.enable else "init_timeout_seconds"

    def end_compilation(self) -> None:
        """Log reports and set the limit of training steps, once all graphs are compiled."""
        self.compile_reports = gather_reports(self.compile_reports, self.mesh)
        if self.rank == 0:
            log_compile_reports(self.compile_reports, self.dump_folder)
        self.watchdog.enter(f"step {self.step}", "train_timeout_seconds")

    def log(self) -> None:
        _, loss, grad_norm = self.last_step
        values = {
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": self.lr,
            **self.throughput.figures(self.step),
            "memory_gib": peak_memory_gib(self.device),
            "tokens_seen": self.tokens_seen,
            "skipped_steps": self.skipped.count,
            **self.bad_documents.gather([loader.pop_skipped() for loader in self.loaders]),
            **self.by_source.figures(),
        }
        self.metrics.log(self.step, values)
        self.stragglers.log(self.step, values["step_time"])
        self.throughput.start(self.step)

    @property
    def unfinished(self) -> bool:
        """True if a run that stops now has to be resumed."""
        return self.step < self.config.training.steps or self.validation_due

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint, by their names there (checkpoint/tensor_files.py)."""
        tensors: dict[str, Tensor] = dict(self.parameters)
        for name, tensor in optimizer_state(self.optimizer, self.parameters).items():
            tensors[f"optimizer.state.{name}"] = tensor
        for name, tensor in self.between.state().items():
            tensors[f"between.{name}"] = tensor
        return {name: tensor.detach() for name, tensor in tensors.items()}

    def state_values(self) -> dict[str, Any]:
        """Return what torchtitan's checkpoints have beside tensors.

        A resume takes it from state.json and the recipe.
        """
        values: dict[str, Any] = {
            "train_state.step": self.step,
            "train_state.ntokens_seen": self.tokens_seen,
        }
        for name, value in optimizer_settings(self.optimizer, self.parameters).items():
            values[f"optimizer.param_groups.{name}"] = value
        return values

    def save(self, *, last: bool) -> None:
        self.read(now=True)
        self.observe("save", self)
        self.copies.check(self.step, self.state_tensors)
        with self.throughput.exclude(), self.watchdog.within("save", "init_timeout_seconds"):
            state = {
                "step": self.step,
                "tokens_seen": self.tokens_seen,
                **self.skipped.state_dict(),
                **self.by_source.state_dict(),
                "loader": self.loader.state_dict() if self.reads_alone else None,
                "validation_due": self.validation_due,
                **self.described,
            }
            values = {**self.state_tensors(), **self.state_values()}
            self.checkpointer.save(self.step, values, state, last=last)

    def resume(self) -> None:
        """Load the newest checkpoint, or the one of checkpoint.load_step.

        Without one, load initial weights if there are any.
        """
        config = self.config
        self.described = describe_run(
            config, self.layout, self.tokenizer, git_revision() if self.rank == 0 else ""
        )
        step = self.checkpointer.verified_step() if config.checkpoint.enable else None
        if step is None:
            path = config.checkpoint.initial_load_path
            load_initial(path, self.layout.model, self.parameters, shard_of)
        else:
            self.load(step)
        self.model.refresh_float8_scales()

    def load(self, step: int) -> None:
        state, changes = accepted_state(self.checkpointer, step, self.described)
        for line in changes.lines():
            logger.info(line)
        self.checkpointer.load(step, changes.to_load(self.state_tensors()))
        with fields_of(f"{self.checkpointer.path_of(step)}/state.json"):
            self.step = state["step"]
            self.tokens_seen = state["tokens_seen"]
            self.validation_due = state["validation_due"] and self.config.validation.enable
            self.skipped.load_state_dict(state)
            self.by_source.load_state_dict(state)
            if not changes.restarts_data:
                self.loader.load_state_dict(state["loader"])

    def describe_stop(self) -> str:
        ending = (
            f"exiting (code {exit_code.STOPPED})"
            if self.unfinished
            else "exiting, as the run is done"
        )
        return f"step {self.step}: {self.checkpointer.before_exit(self.step)}{ending}"

    def finish(self, how: str) -> None:
        """Log a summary. how: "done" or "stopped"; after "done", also draw the loss."""
        self.read(now=True)
        self.metrics.close()
        if self.rank != 0:
            return
        if how == "done":
            draw_loss(self.dump_folder)
        ending = end_lines(
            self.dump_folder,
            how,
            step=self.step,
            tokens=self.tokens_seen,
            skipped=self.skipped.count,
            bad_documents=self.bad_documents.summary(),
            tensorboard=self.config.metrics.enable_tensorboard,
            again=again(),
            reports=self.compile_reports,
            steps_on_disk=self.checkpointer.steps() if self.config.checkpoint.enable else (),
        )
        for line in ending:
            logger.info(line, extra={"event": how} if line == ending[0] and how == "done" else {})
