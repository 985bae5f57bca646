"""Write metrics to the log, `metrics.jsonl`, TensorBoard and Weights & Biases.

    metrics = MetricsWriter(config.metrics, dump_folder, recipe, writes=rank == 0, steps_done=0)
    metrics.log(10, {"loss": 6.9, "tps": 5000.0, ...})

All use the same names. `metrics.jsonl` has one object per line. A resumed run appends to it, after
a line {"resumed_from": step}; if a step occurs twice, the later line counts.

    loss, validation_loss   nats per token, over all ranks
    grad_norm               global L2 norm before clipping
    tps                     tokens per second and device
    tflops                  10^12 floating-point operations per second and device that the model
                            needs, without recomputation
    mfu                     tflops relative to the device's datasheet peak, percent; causal
                            attention counts as half of full attention; absent on CPUs and GPUs
                            without a known peak, unless compile.machine has one
    mfu_full_attention      the same with attention counted as full, as torchtitan and others do
    memory_gib              peak of one device: memory reserved by the CUDA allocator, or resident
                            memory of a CPU process
    data_wait               time spent waiting for the loader, percent
    step_time               seconds per step
    seconds_CAUSE           since the line before, not in step_time: of validation, evaluation,
                            saving, waiting, recovery or undone steps, if there were any
                            (goodput.py)
    copies                  replica groups that took part in the step, with fault_tolerance
    bad_documents           bad documents skipped since the data of the run began, with
                            data.on_bad_document = "skip"
    empty_documents         empty texts skipped since this start, if there were any
    short_documents         documents skipped since this start, with data.min_document_tokens

of [evaluation], for each metric of a task, in a line of its own

    evaluation/TASK/METRIC  the score; a filter of the task follows as /FILTER
    evaluation/TASK/METRIC_stderr  its standard error, if the task has one

of an MoE model, over the steps since the line before

    expert_balance          E times the sum over experts of share of choices x mean probability,
                            the mean of layers: 1 if experts are equally loaded;
                            expert_balance/0 is that of layer 0
    router_entropy          of the probabilities of a token, nats, the mean of layers
    expert_load_max, _min   tokens of the most and the least loaded expert, relative to the mean of
                            their layer; expert_load_max/0 is that of layer 0
    expert_rows_max         with experts.capacity_factor: tokens of a rank's experts, relative to
                            equally loaded ones, the most of a layer and microbatch
    repeated_steps          likewise: steps that ran again with memory for all of them

and for each source of a data mix, where NAME is the end of its path, or its dataset

    loss_by_source/NAME     nats per token of that source, over all steps since the line before
    tokens_by_source/NAME   tokens of the run, resumed parts included
    validation_loss_by_source/NAME
"""

import json
import math
import os
import resource
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from titan_lite.config import ConfigError, Metrics
from titan_lite.config.errors import MachineError
from titan_lite.logging import logger
from titan_lite.metrics.run_files import read_metrics
from titan_lite.text import error_line

if TYPE_CHECKING:
    import wandb
    from torch.utils.tensorboard import SummaryWriter

COLOURS = {"loss": "\033[32m", "grad_norm": "\033[34m", "tps": "\033[36m", "mfu": "\033[35m"}
END_OF_COLOUR = "\033[0m"
FORMATS = {  # of the metrics in a line of the log, in their order
    "loss": "loss {:.4f}",
    "validation_loss": "validation loss {:.4f}",
    "grad_norm": "grad norm {:.3f}",
    "lr": "lr {:.2e}",
    "tps": "tps {:,.0f}",
    "tflops": "tflops {:.2f}",
    "mfu": "mfu {:.1f}%",
    "memory_gib": "memory {:.2f} GiB",
    "data_wait": "data wait {:.1f}%",
}


class MetricsWriter:
    """Show metrics on every rank, and write them on one.

    recipe: {"training.steps": 1000, ...}, written for TensorBoard and Weights & Biases. writes:
    this rank writes files. steps_done: before this start.
    """

    def __init__(
        self,
        config: Metrics,
        dump_folder: Path,
        recipe: Mapping[str, Any],
        *,
        writes: bool,
        steps_done: int,
    ):
        self.dump_folder = dump_folder
        self.path = dump_folder / "metrics.jsonl"
        self.writes = writes
        # that `log` was given of the newest step, whether this rank has written them or not
        self.lines: list[dict[str, Any]] = []
        self.started = time.perf_counter()
        self.warned_of_loss = False  # a file could not be written
        self.in_colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        self.tensorboard: SummaryWriter | None = None
        self.wandb: wandb.Run | None = None
        if not writes:
            return
        plain = json.loads(json.dumps(recipe, default=dict))  # sources of documents are models
        resumes = self._open()
        if resumes:
            self._write({"resumed_from": steps_done})
        if config.enable_tensorboard:
            purge_step = steps_done + 1 if resumes else None
            try:
                self.tensorboard = start_tensorboard(dump_folder / "tb", plain, purge_step)
            except OSError as error:
                self._warn_of_loss(error)
        if config.enable_wandb:
            self.wandb = start_wandb(dump_folder, plain)

    def _open(self) -> bool:
        """Open metrics.jsonl to append to it, and return True if it has lines."""
        before = self.path.read_bytes() if self.path.exists() else b""
        # `close` closes it.
        self.file = open(self.path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115
        if before and not before.endswith(b"\n"):  # a run that was killed may leave half a line
            self._append("\n")
        return bool(before)

    def log(self, step: int, values: Mapping[str, float], others: str = "") -> None:
        """Show and write the metrics of a step; those without a format are written only.

        others: what is shown of these, in words.

        The first one tells lines of a step apart.
        """
        shown = [*self._shown(values), *([others] if others else [])]
        logger.info("  ".join([f"step {step:>4}", *shown]))
        of_step = [line for line in self.lines if line["step"] == step]
        self.lines = [*of_step, _line_of(step, values)]
        self.write(step, values)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write metrics of a step that are not shown."""
        if not self.writes:
            return
        self._write_step(_line_of(step, values))
        if self.tensorboard is not None:
            try:
                for name, value in values.items():
                    self.tensorboard.add_scalar(name, value, step)
                self.tensorboard.flush()
            except OSError as error:
                self._warn_of_loss(error)
                self.tensorboard = None
        if self.wandb is not None:
            self.wandb.log({"step": step, **values})

    def missing(self) -> list[dict[str, Any]]:
        """Return the lines that metrics.jsonl has not, since the replica group that was to
        write them was lost.
        """
        written = read_metrics(self.path)
        missing = []
        for line in self.lines:
            _, first, *_ = line
            if first not in written.get(line["step"], {}):
                missing.append(line)
        return missing

    def write_missing(self) -> list[int]:
        """Write the lines of `missing`, into metrics.jsonl alone; return their steps."""
        lines = self.missing()
        for line in lines:
            self._write_step(line)
        return [line["step"] for line in lines]

    def _write_step(self, line: Mapping[str, Any]) -> None:
        seconds = round(time.perf_counter() - self.started, 3)
        self._write({**line, "time": seconds})

    def _shown(self, values: Mapping[str, float]) -> list[str]:
        """Return the parts of a line of the log."""
        parts = []
        for name, form in FORMATS.items():
            if name not in values:
                continue
            part = form.format(values[name])
            if self.in_colour and name in COLOURS:
                part = f"{COLOURS[name]}{part}{END_OF_COLOUR}"
            parts.append(part)
        return parts

    def close(self) -> None:
        """Close all files."""
        closing: list[Callable[[], object]] = []
        if self.tensorboard is not None:
            closing.append(self.tensorboard.close)
        if self.wandb is not None:
            closing.append(self.wandb.finish)
        if self.writes:
            closing.append(self.file.close)
        for close in closing:
            try:
                close()
            except OSError as error:
                self._warn_of_loss(error)

    def _write(self, entry: Mapping[str, object]) -> None:
        self._append(json.dumps(entry) + "\n")

    def _append(self, text: str) -> None:
        try:
            self.file.write(text)
        except OSError as error:
            self._warn_of_loss(error)

    def _warn_of_loss(self, error: OSError) -> None:
        """Warn once that metrics are lost; this does not end the run."""
        if not self.warned_of_loss:
            logger.warning(
                f"METRICS ARE LOST, the run goes on: {self.dump_folder} cannot be written: {error}"
            )
        self.warned_of_loss = True


def _line_of(step: int, values: Mapping[str, float]) -> dict[str, Any]:
    """Return the line of metrics.jsonl but for its time. JSON has no NaN."""
    finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
    return {"step": step, **finite}


def start_tensorboard(
    folder: Path, recipe: Mapping[str, Any], purge_step: int | None
) -> "SummaryWriter":
    """Return a writer of events with the recipe as text. Raises OSError.

    purge_step: the first step of a resumed run, from which on older values are hidden.
    """
    from torch.utils.tensorboard import SummaryWriter  # slow, and only one rank needs it

    writer = SummaryWriter(folder, purge_step=purge_step)
    # a Markdown code block
    lines = [
        f"    {key} = {json.dumps(value, ensure_ascii=False)}" for key, value in recipe.items()
    ]
    writer.add_text("recipe", "\n".join(lines), (purge_step or 1) - 1)
    writer.flush()
    return writer


def start_wandb(dump_folder: Path, recipe: dict[str, Any]) -> "wandb.Run":
    """Return the run of Weights & Biases, the same one if this folder's run is resumed.

    Raises ConfigError if no account is known, and MachineError if its server does not answer.
    """
    import wandb

    identity = dump_folder / "wandb_id"
    if not identity.exists():
        identity.write_text(uuid.uuid4().hex, encoding="utf-8")
    try:
        run = wandb.init(
            id=identity.read_text(encoding="utf-8"),
            name=dump_folder.resolve().name,
            dir=str(dump_folder),
            config=recipe,
            resume="allow",
        )
    except Exception as error:  # wandb's, and those of its libraries
        kind = type(error).__name__
        why = (
            f"metrics.enable_wandb = true: no run of W&B was begun ({kind}: {error_line(error)});"
            " use WANDB_MODE=offline to log without its server, or enable_wandb = false"
        )
        raise (ConfigError if kind == "UsageError" else MachineError)(why) from error
    # A resumed run repeats steps, and wandb's own count only grows.
    run.define_metric("*", step_metric="step")
    return run


def peak_memory_gib(device: torch.device) -> float:
    """Return the peak of memory reserved by the CUDA allocator, or of this process's resident
    memory on a CPU, in GiB.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 2**10  # of ru_maxrss, in bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
