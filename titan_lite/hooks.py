"""Observers of a run: logs, checks, profiles. They change no number, but their errors end a run.

    class Slow(Hook):
        def on_step_end(self, trainer): time.sleep(1)

    Trainer(config, hooks=[Slow()]).train()

Training, validation, logging and saving are statements of the trainer. Hooks run in the order of
`build_hooks`, the same on every rank, so that they may communicate.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from titan_lite.config import Config, Profiling
from titan_lite.data.preflight import check_first_batch, check_first_loss
from titan_lite.distributed.parallelize import gather_reports
from titan_lite.logging import console, logger
from titan_lite.metrics.deferred import StepMetrics
from titan_lite.metrics.end_lines import RunEnd, end_lines, log_compile_reports
from titan_lite.metrics.profiler import build_profiler
from titan_lite.metrics.start_lines import start_facts, start_lines
from titan_lite.metrics.writer import draw_loss
from titan_lite.resilience.replica_check import ReplicaCheck
from titan_lite.resilience.restarts import Restarts, restart_command

if TYPE_CHECKING:
    from titan_lite.trainer import Trainer


class Hook:
    """An observer. Override what you need. Tests inject faults by the same methods."""

    def on_start(self, trainer: Trainer) -> None:
        """Before the process group is made."""

    def on_model_built(self, trainer: Trainer) -> None:
        """The stages are on the meta device; parameters have not been allocated."""

    def on_train_start(self, trainer: Trainer) -> None:
        """All parts are built, and a checkpoint is loaded if there is one."""

    def around_training(self, trainer: Trainer) -> AbstractContextManager[object]:
        """Return a context around all steps, which sees the error that ends them."""
        return nullcontext()

    def on_step_start(self, trainer: Trainer) -> None: ...

    def on_batch(self, trainer: Trainer) -> None:
        """Before each local batch of a step is read."""

    def on_gradients(self, trainer: Trainer) -> None:
        """After the last backward of a step, before gradients are clipped."""

    def on_metrics(self, trainer: Trainer, metrics: StepMetrics) -> None:
        """The scalars of a step have arrived on the host, at a GPU up to a step later."""

    def on_step_end(self, trainer: Trainer) -> None:
        """After the update, before the step is logged, validated or saved."""

    def on_validation_batch(self, trainer: Trainer) -> None:
        """Before each local batch of a validation is read."""

    def on_save(self, trainer: Trainer) -> None:
        """Before a checkpoint is saved."""

    def on_train_end(self, trainer: Trainer) -> None:
        """After the last step, done or stopped."""


class LogRun(Hook):
    """Log what the run is at its start, and what it did at its end; draw the loss."""

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
        logger.info(
            f"steps: {trainer.step} done of {steps}; output in {trainer.dump_folder}",
            extra={
                "event": "start",
                "facts": start_facts(trainer.layout, trainer.device, trainer.identity.git),
            },
        )
        if trainer.is_finished:
            logger.info(
                f"nothing to do: step {trainer.step} is done, and training.steps = {steps}; raise"
                " it to go on"
            )

    def on_train_end(self, trainer: Trainer) -> None:
        if trainer.rank != 0:
            return
        if not trainer.is_stopped:
            draw_loss(trainer.dump_folder)
        saves = trainer.config.checkpoint.enable
        end = RunEnd(
            stopped=trainer.is_stopped,
            step=trainer.step,
            tokens=trainer.progress.tokens_seen,
            skipped_steps=trainer.skipped_steps.count,
            saved_steps=trainer.checkpointer.steps() if saves else (),
            reports=trainer.model.compile_reports,
            bad_documents=trainer.bad_documents.summary(),
            tensorboard=trainer.config.metrics.enable_tensorboard,
            command=restart_command(),
        )
        first, *others = end_lines(trainer.dump_folder, end)
        logger.info(first, extra={} if trainer.is_stopped else {"event": "done"})
        for line in others:
            logger.info(line)


class LogStart(Hook):
    """Log where the seconds of a start went, after the first step."""

    def on_train_start(self, trainer: Trainer) -> None:
        self.first_step = trainer.step + 1

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.step != self.first_step:
            return
        times = trainer.start_times
        times.end()
        logger.info(
            f"start to the end of step {trainer.step}: {times.describe()}",
            extra={"event": "first step", "seconds": times.seconds},
        )


class LogCompilation(Hook):
    """Log and write what the compiler did, after the first step."""

    def on_train_start(self, trainer: Trainer) -> None:
        self.first_step = trainer.step + 1

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.step != self.first_step:
            return
        model = trainer.model
        model.compile_reports = gather_reports(model.compile_reports, trainer.mesh)
        if trainer.rank == 0:
            log_compile_reports(model.compile_reports, trainer.dump_folder)


class GarbageCollection(Hook):
    """Collect garbage every `freq` steps, on all ranks in the same step.

    Ranks that collect in different steps would wait for each other in each of these.
    """

    def __init__(self, freq: int):
        self.freq = freq

    @contextmanager
    def around_training(self, trainer: Trainer) -> Iterator[None]:
        gc.disable()
        try:
            yield
        finally:
            gc.enable()

    def on_step_start(self, trainer: Trainer) -> None:
        if trainer.step % self.freq == 0:
            gc.collect(1)


class DataPreflight(Hook):
    """Check the first batch, and the first loss."""

    def on_train_start(self, trainer: Trainer) -> None:
        if not trainer.is_finished:
            check_first_batch(
                trainer.loader.peek(),
                trainer.tokenizer,
                trainer.layout.model.vocab_size,
                trainer.dp_rank,
            )

    def on_metrics(self, trainer: Trainer, metrics: StepMetrics) -> None:
        if metrics.step == 1 and trainer.rank == 0:  # the loss is that of all ranks
            is_trained = bool(trainer.config.checkpoint.initial_load_path)
            model = trainer.layout.model
            is_tied = model.tied_embeddings
            check_first_loss(metrics.loss, model.vocab_size, is_trained, is_tied=is_tied)


class CompareReplicas(Hook):
    """Compare the copies of the model: every `freq` steps (0: never), and before a save."""

    def __init__(self, freq: int):
        self.freq = freq

    def on_train_start(self, trainer: Trainer) -> None:
        self.check = ReplicaCheck(trainer.checkpointer.describe_newest)
        if not trainer.is_finished:
            self.check.check(trainer.step, trainer.tensors())

    def on_step_end(self, trainer: Trainer) -> None:
        if self.freq and trainer.step % self.freq == 0:
            self.check.check(trainer.step, trainer.tensors())

    def on_save(self, trainer: Trainer) -> None:
        if self.freq == 0 or trainer.step % self.freq != 0:  # else `on_step_end` has compared them
            self.check.check(trainer.step, trainer.tensors())


class RecordRestarts(Hook):
    """Record each step that begins, so that a fault that repeats ends restarts."""

    def __init__(self, dump_folder: Path):
        self.restarts = Restarts(dump_folder)

    def on_step_start(self, trainer: Trainer) -> None:
        self.restarts.record_step(trainer.step)


class Profile(Hook):
    """Write traces and memory snapshots as [profiling] says."""

    def __init__(self, config: Profiling):
        self.config = config

    @contextmanager
    def around_training(self, trainer: Trainer) -> Iterator[None]:
        steps = range(trainer.step + 1, trainer.config.training.steps + 1)
        with build_profiler(self.config, trainer.dump_folder, trainer.rank, steps) as profiler:
            self.profiler = profiler
            yield

    def on_step_end(self, trainer: Trainer) -> None:
        self.profiler.step()


class ProgressBar(Hook):
    """A bar below the log of the first rank, on a terminal."""

    bar: tqdm | None = None

    @contextmanager
    def around_training(self, trainer: Trainer) -> Iterator[None]:
        if trainer.rank != 0 or not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
            yield
            return
        self.bar = tqdm(
            file=sys.stdout,
            total=trainer.config.training.steps,
            initial=trainer.step,
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

    def on_step_end(self, trainer: Trainer) -> None:
        if self.bar is not None:
            self.bar.update()

    def on_train_end(self, trainer: Trainer) -> None:
        self.close()  # before the last lines


def build_hooks(config: Config) -> list[Hook]:
    """Return the hooks of every run, in their order."""
    return [
        LogRun(),
        LogStart(),
        LogCompilation(),
        GarbageCollection(config.training.gc_freq),
        RecordRestarts(Path(config.job.dump_folder)),
        DataPreflight(),
        CompareReplicas(config.training.compare_copies_freq),
        Profile(config.profiling),
        ProgressBar(),
    ]
