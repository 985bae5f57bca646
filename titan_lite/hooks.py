"""Observers of a run: logs, checks, profiles. They change no number, but their errors end a run.

    class Slow(Hook):
        def on_step_end(self, step: int) -> None:
            time.sleep(1)

    Trainer(config, hooks=[Slow()]).train()

Training, validation, logging and saving are statements of the trainer. Hooks run in the order of
`build_hooks`, the same on every rank, so that they may communicate.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn
from tqdm import tqdm

from titan_lite.config import Config, Profiling
from titan_lite.config.phases import describe_phase
from titan_lite.data.preflight import check_first_batch, check_first_loss
from titan_lite.distributed.parallelize import gather_reports
from titan_lite.feature import features_of
from titan_lite.logging import console, logger
from titan_lite.metrics.deferred import StepMetrics
from titan_lite.metrics.end_lines import RunEnd, end_lines, log_compile_reports
from titan_lite.metrics.profiler import build_profiler
from titan_lite.metrics.start_lines import start_facts, start_lines
from titan_lite.resilience.restarts import Restarts, restart_command

if TYPE_CHECKING:
    from titan_lite.trainer import Trainer


class Hook:
    """An observer. Override what you need. Tests inject faults by the same methods.

    A moment gets what it is about. The start and the end of training are about all of the run, and
    get its Trainer; a hook keeps from it the parts that it observes at later moments.
    """

    def on_start(self) -> None:
        """Before the process group is made."""

    def on_train_start(self, trainer: Trainer) -> None:
        """All parts are built, and a checkpoint is loaded if there is one."""

    def around_training(self, steps: range) -> AbstractContextManager[object]:
        """Return a context around these steps, which sees the error that ends them."""
        return nullcontext()

    def on_step_start(self, step: int) -> None: ...

    def on_batch(self, step: int) -> None:
        """Before each local batch of a step is read."""

    def on_batches(self, step: int) -> None:
        """After the local batches of a step are read, before its first collective."""

    def on_gradients(self, step: int, parameters: Mapping[str, nn.Parameter]) -> None:
        """After the last backward of a step, before gradients are clipped.

        parameters: of this rank, by FQN.
        """

    def on_metrics(self, metrics: StepMetrics) -> None:
        """The scalars of a step have arrived on the host, at a GPU up to a step later."""

    def on_step_end(self, step: int) -> None:
        """After the update, before the step is logged, validated or saved."""

    def on_validation_batch(self, step: int) -> None:
        """Before each local batch of a validation is read. step: the last one that is done."""

    def on_save(self, step: int) -> None:
        """Before a checkpoint is saved."""

    def on_train_end(self, trainer: Trainer) -> None:
        """After the last step, done or stopped."""


class LogRun(Hook):
    """Log what the run is at its start, and what it did at its end."""

    def on_train_start(self, trainer: Trainer) -> None:
        sources = trainer.loader.source_lines()
        if trainer.validation_loader and trainer.config.validation.has_documents:
            sources += trainer.validation_loader.source_lines()
        lines = start_lines(
            trainer.config,
            trainer.layout,
            trainer.device,
            priced=trainer.machine is not None,
            tokens_known=trainer.tokenizer.vocab_size,
            sources=sources,
        )
        for line in lines:
            logger.info(line)
        steps = trainer.config.training.steps
        begins = not trainer.replica_groups.has_joined
        facts = start_facts(trainer.layout, trainer.device, trainer.identity.git)
        logger.info(
            f"steps: {trainer.step} done of {steps}; output in {trainer.dump_folder}",
            extra={"event": "start", "facts": facts} if begins else {},
        )
        if len(trainer.config.phases) > 1:
            logger.info(describe_phase(trainer.config), extra={"event": "phase"})
        if trainer.is_finished:
            logger.info(
                f"nothing to do: step {trainer.step} is done, and training.steps = {steps}; raise"
                " it to continue"
            )

    def on_train_end(self, trainer: Trainer) -> None:
        if not trainer.metrics.writes:
            return
        if trainer.needs_resume and not trainer.is_stopped:
            phase = trainer.config.phase.number
            logger.info(f"phase {phase} is done", extra={"event": "phase done"})
            return
        saves = trainer.config.checkpoint.enable
        end = RunEnd(
            stopped=trainer.is_stopped,
            step=trainer.step,
            tokens=trainer.progress.tokens_seen,
            skipped_steps=trainer.skipped_steps.count,
            saved_steps=trainer.checkpointer.steps() if saves else (),
            replica_groups=trainer.config.fault_tolerance.replica_groups,
            bad_documents=trainer.bad_documents.summary(),
            tensorboard=trainer.config.metrics.enable_tensorboard,
            command=restart_command(),
        )
        first, *others = end_lines(trainer.dump_folder, end)
        logger.info(first, extra={} if trainer.is_stopped else {"event": "done"})
        for line in others:
            logger.info(line)


class LogStart(Hook):
    """Log where the seconds of a start went, and what the compiler did, after the first step."""

    def __init__(self, dump_folder: Path, *, writes: bool):
        """writes: True on one rank."""
        self.dump_folder = dump_folder
        self.writes = writes
        self.is_logged = False

    def on_train_start(self, trainer: Trainer) -> None:
        self.times = trainer.start_times
        self.model = trainer.model

    def on_step_end(self, step: int) -> None:
        if self.is_logged:
            return
        self.is_logged = True
        self.times.end()
        logger.info(
            f"start to the end of step {step}: {self.times.describe()}",
            extra={"event": "first step", "seconds": self.times.seconds},
        )
        self.model.compile_reports = gather_reports(self.model)
        if self.writes:
            log_compile_reports(self.model.compile_reports, self.dump_folder)


class GarbageCollection(Hook):
    """Collect garbage every `freq` steps, on all ranks in the same step.

    Ranks that collect in different steps would wait for each other in each of these.
    """

    def __init__(self, freq: int):
        self.freq = freq

    @contextmanager
    def around_training(self, steps: range) -> Iterator[None]:
        gc.disable()
        try:
            yield
        finally:
            gc.enable()

    def on_step_start(self, step: int) -> None:
        if step % self.freq == 0:
            gc.collect(1)


class DataPreflight(Hook):
    """Check the first batch, and the first loss."""

    def __init__(self, *, is_trained: bool, checks_loss: bool):
        """is_trained: the run begins with weights. checks_loss: True on one rank."""
        self.is_trained = is_trained
        self.checks_loss = checks_loss

    def on_train_start(self, trainer: Trainer) -> None:
        self.model = trainer.layout.model
        if not trainer.is_finished:
            check_first_batch(
                trainer.loader.peek(),
                trainer.tokenizer,
                self.model.vocab_size,
                trainer.dp_rank,
            )

    def on_metrics(self, metrics: StepMetrics) -> None:
        if metrics.step == 1 and self.checks_loss:  # the loss is that of all ranks
            check_first_loss(
                metrics.loss,
                self.model.vocab_size,
                self.is_trained,
                is_tied=self.model.tied_embeddings,
            )


class RecordRestarts(Hook):
    """Record each step that begins, so that a fault that repeats ends restarts."""

    def __init__(self, dump_folder: Path):
        self.restarts = Restarts(dump_folder)

    def on_step_start(self, step: int) -> None:
        self.restarts.record_step(step)


class Profile(Hook):
    """Write traces and memory snapshots as [profiling] says."""

    def __init__(self, config: Profiling, dump_folder: Path, rank: int):
        self.config = config
        self.dump_folder = dump_folder
        self.rank = rank

    @contextmanager
    def around_training(self, steps: range) -> Iterator[None]:
        with build_profiler(self.config, self.dump_folder, self.rank, steps) as profiler:
            self.profiler = profiler
            yield

    def on_step_end(self, step: int) -> None:
        self.profiler.step()


class ProgressBar(Hook):
    """A bar below the log of the first rank, on a terminal."""

    bar: tqdm | None = None

    def __init__(self, rank: int):
        self.rank = rank

    @contextmanager
    def around_training(self, steps: range) -> Iterator[None]:
        if self.rank != 0 or not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
            yield
            return
        self.bar = tqdm(
            file=sys.stdout,
            total=steps.stop - 1,
            initial=steps.start - 1,
            unit="step",
            dynamic_ncols=True,
            leave=False,
        )
        console.around = self.bar.external_write_mode
        try:
            yield
        finally:
            self.close()

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
            console.around = nullcontext

    def on_step_end(self, step: int) -> None:
        if self.bar is not None:
            self.bar.update()

    def on_train_end(self, trainer: Trainer) -> None:
        self.close()  # before the last lines


def build_hooks(config: Config, rank: int, folder: Path) -> list[Hook]:
    """Return the hooks of a run, in their order. folder: for what each replica group writes.
    Several groups have no bar, as each would draw its own.
    """
    has_groups = config.fault_tolerance.replica_groups > 1
    is_trained = bool(config.checkpoint.initial_load_path)
    return [
        LogRun(),
        LogStart(folder, writes=rank == 0),
        GarbageCollection(config.training.gc_freq),
        RecordRestarts(folder),
        DataPreflight(is_trained=is_trained, checks_loss=rank == 0),
        *(hook for feature in features_of(config) for hook in feature.hooks(config)),
        Profile(config.profiling, folder, rank),
        *([] if has_groups else [ProgressBar(rank)]),
    ]
