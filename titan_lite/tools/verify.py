"""Verify that a parallel layout computes the same as one process: run a small twin of a recipe on
CPU processes and compare.

    python -m titan_lite verify RECIPE [--layouts LAYOUT ...] [--steps N] [--section.key value ...]

    LAYOUT: recipe (default), all, or degrees such as dp_shard=2,tp=2

The *twin* of a recipe keeps what decides whether a layout is correct: kinds of parallelism,
schedule, activation checkpointing, compiler passes, communication, tied weights, RoPE scaling. It
shrinks the rest: the model to the debug flavor, degrees to 2 or a little more, the batch to a few
short sequences; layers are split evenly, and graphs run as traced, without Inductor. The twin is
trained in float32, with float8 products if the recipe has them, on the standard library's text. The
same model is trained with the same seed and data in one eager process without checkpointing. The
comparison covers the losses of all steps and of validation, every gradient of the first step, and
the output of every module in its forward.

Exit code 0: all layouts agree; 1: one does not; 2: wrong recipe or command line.
"""

import dataclasses
import functools
import itertools
import logging
import math
import os
import re
import socket
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from titan_lite.check import check
from titan_lite.config import (
    SHIPPED,
    ActivationCheckpoint,
    Checkpoint,
    Compile,
    Config,
    ConfigError,
    Data,
    Float8,
    Metrics,
    Parallelism,
    Profiling,
    load_config,
)
from titan_lite.distributed.layout import AXES, DEGREES, Layout
from titan_lite.distributed.memory import choose_fsdp_communication
from titan_lite.distributed.pipeline_schedule import TooFewLayers
from titan_lite.distributed.process_group import device_memory
from titan_lite.hooks import Hook
from titan_lite.metrics.deferred import StepMetrics
from titan_lite.metrics.run_files import read_metrics
from titan_lite.models.float8 import DIM_MULTIPLE
from titan_lite.models.llama3 import FLAVORS, ModelConfig
from titan_lite.models.loss_chunk import automatic_chunk
from titan_lite.models.shapes import shape_of, shape_words
from titan_lite.sharding import chunk_size
from titan_lite.tools.cli import Parser, at_least_one, command
from titan_lite.trainer import Trainer

TOKENIZER = SHIPPED.parent / "assets/tokenizer/debug.model"
MOST_PROCESSES = 8
LAYERS = 4  # in a twin, or more if its stages need them
ROWS, SEQ_LEN = 16, 32  # sequences and tokens of one step, on every layout
Degrees = dict[str, int]  # by axis
Prepare = Callable[[Trainer], None]


class Tolerances(NamedTuple):
    """Largest relative differences of two runs that agree."""

    loss: float  # over all steps, since rounding grows with training
    gradient: float  # norm of the difference relative to the norm, for each parameter
    activation: float  # of a module's sum of squares


FLOAT32 = Tolerances(1e-4, 1e-4, 1e-4)
# A scale depends on the tokens of a rank, so layouts round otherwise, and float8 has 2 or 3 bits of
# mantissa.
FLOAT8 = Tolerances(1e-3, 0.25, 0.02)


@dataclass
class Observed:
    """Values of one run."""

    losses: dict[tuple[int, int], tuple[float, float]] = field(
        default_factory=dict
    )  # (rank, step): (loss, gradient norm)
    validation: dict[int, float] = field(default_factory=dict)  # step: loss
    gradients: dict[str, Tensor] = field(default_factory=dict)  # by FQN
    activations: dict[str, Tensor] = field(
        default_factory=dict
    )  # FQN: (number of elements, sum, sum of squares)


@dataclass(frozen=True)
class Comparison:
    """Largest differences between two runs."""

    loss: float  # relative
    gradient: float  # relative, of `parameter`
    parameter: str
    module: str  # the first that diverges, or ""
    agrees: bool


def layout_of(config: Config) -> Degrees:
    """Return the degrees of a recipe's twin: 2 for each kind in the recipe, then data and context
    parallelism doubled as long as the recipe has more and MOST_PROCESSES are enough.
    """
    wanted = {axis: getattr(config.parallelism, key) for axis, key in DEGREES.items()}
    if wanted["dp_shard"] == -1:
        wanted["dp_shard"] = 4  # for any number of GPUs
    layout = {axis: min(2, degree) for axis, degree in wanted.items()}
    while True:
        largest = max(
            AXES, key=lambda axis: 0 if axis in ("pp", "tp") else wanted[axis] / layout[axis]
        )
        if 2 * layout[largest] > wanted[largest] or 2 * math.prod(layout.values()) > MOST_PROCESSES:
            return layout
        layout[largest] *= 2


def every_layout() -> list[Degrees]:
    """Return all combinations of degrees 1 and 2 for 2 to MOST_PROCESSES processes, small ones
    first.
    """
    layouts = [
        dict(zip(AXES, degrees, strict=True))
        for degrees in itertools.product((1, 2), repeat=len(AXES))
    ]
    return sorted(
        (layout for layout in layouts if 1 < math.prod(layout.values()) <= MOST_PROCESSES),
        key=lambda layout: math.prod(layout.values()),
    )


def parse_layout(text: str) -> Degrees:
    """Parse "dp_shard=2,tp=2" into the degrees of all axes. Raises ConfigError."""
    layout = dict.fromkeys(AXES, 1)
    for part in text.split(","):
        axis, _, degree = part.partition("=")
        if axis not in AXES or not (degree.isascii() and degree.isdigit() and int(degree) > 0):
            raise ConfigError(
                f"--layouts {text}: '{part}' is not a degree; use recipe, all, or degrees of "
                f"{', '.join(AXES)} such as dp_shard=2,tp=2"
            )
        layout[axis] = int(degree)
    return layout


def name_of(layout: Degrees) -> str:
    return (
        ",".join(f"{axis}={degree}" for axis, degree in layout.items() if degree > 1)
        or "one process"
    )


def twin_model(flavor: ModelConfig, stages: int) -> ModelConfig:
    """Return the debug flavor with the properties of `flavor` that are not sizes, and layers for
    `stages` stages.
    """
    return dataclasses.replace(
        FLAVORS["debug"],
        n_layers=max(LAYERS, stages),
        tied_embeddings=flavor.tied_embeddings,
        rope_scaling=flavor.rope_scaling,
        rope_theta=flavor.rope_theta,
    )


def twin(config: Config, layout: Degrees, steps: int) -> Config:
    """Return a small version of `config` on `layout`."""
    dp = layout["dp_replicate"] * layout["dp_shard"]
    shard = config.parallelism.data_parallel_shard_degree
    own_dp = config.parallelism.data_parallel_replicate_degree * shard if shard != -1 else dp
    accumulates = config.training.global_batch_size > config.training.local_batch_size * own_dp
    local = max(1, ROWS // (dp * (2 if accumulates else 1)))
    kept = (_of_twin(prefix) for prefix in config.parallelism.fsdp_keep_gathered)
    # Sequences of a pipeline's microbatch, at least: products in float8 need so many tokens.
    each = max(1, DIM_MULTIPLE * layout["cp"] // SEQ_LEN) if config.float8.enable else 1
    changes: dict[str, Any] = {"pipeline_parallel_split_points": ()}
    if layout["pp"] == 1:
        changes = {
            name: field.default
            for name, field in Parallelism.model_fields.items()
            if name.startswith("pipeline_parallel_")
        }
    else:
        changes["pipeline_parallel_microbatch_size"] = max(
            each, 2 if local >= 4 * layout["pp"] else 1
        )
        if config.parallelism.pipeline_parallel_degree == 1:
            changes["pipeline_parallel_first_stage_less_layers"] = changes[
                "pipeline_parallel_last_stage_less_layers"
            ] = 0
    if config.compile.compiles("model") and config.compile.bucketing not in ("none", "block"):
        changes["fsdp_communication"] = "microbatch"  # with "step" there is nothing to bucket
    sequences = local if layout["pp"] == 1 else changes["pipeline_parallel_microbatch_size"]
    chunk = (
        sequences * SEQ_LEN // layout["cp"] * 2 // 5 if _chunks_loss(config) else -1
    )  # three chunks, the last one smaller
    changes["fsdp_keep_gathered"] = tuple(dict.fromkeys(kept))
    changes.update(
        {DEGREES[axis]: degree for axis, degree in layout.items()}, replicate_compression="none"
    )  # approximates
    return config.replace(
        model=config.model.replace(tokenizer_path=str(TOKENIZER)),
        training=config.training.replace(
            local_batch_size=local,
            global_batch_size=-(-ROWS // (local * dp)) * local * dp,
            global_batch_ramp=(),
            seq_len=SEQ_LEN,
            steps=steps,
            loss_chunk_tokens=chunk,
            compare_copies_freq=1,
            mixed_precision_param="float32",
            mixed_precision_reduce="float32",
            attention_kernel="auto",
        ),
        optimizer=config.optimizer.replace(ns_dtype="float32", start_preconditioning_step=1),
        lr_scheduler=config.lr_scheduler.replace(warmup_steps=0, total_steps=-1),
        parallelism=config.parallelism.replace(**changes, enable_async_tensor_parallel=False),
        float8=config.float8.replace(
            filter_fqns=tuple(dict.fromkeys(map(_of_twin, config.float8.filter_fqns))),
        ),
        compile=_compile_of_twin(config.compile, SEQ_LEN // layout["cp"] // layout["tp"]),
        checkpoint=Checkpoint(),
        data=Data(num_workers=0),
        validation=config.validation.replace(enable=True, freq=steps, steps=1),
        metrics=Metrics(log_freq=1, enable_tensorboard=False),
        profiling=Profiling(),
    )


def _chunks_loss(config: Config) -> bool:
    """Return True if a run of the recipe computes its loss in chunks of tokens."""
    parallelism, training = config.parallelism, config.training
    pipelined = parallelism.pipeline_parallel_degree > 1
    sequences = (
        parallelism.pipeline_parallel_microbatch_size if pipelined else training.local_batch_size
    )
    tokens = sequences * training.seq_len // parallelism.context_parallel_degree
    if training.loss_chunk_tokens != 0:
        return training.loss_chunk_tokens > 0
    vocab_size = shape_of(config.model).vocab_size
    entries = chunk_size(vocab_size, parallelism.tensor_parallel_degree)
    return automatic_chunk(tokens, entries) > 0


def _compile_of_twin(stage: Compile, tokens: int) -> Compile:
    """Return [compile] with the same passes and the twin's names.

    tokens: of a sequence on a tensor-parallel rank, for chunks.
    """
    return stage.replace(
        backend="aot_eager",
        buckets=tuple(" ".join(map(_of_twin, bucket.split())) for bucket in stage.buckets),
        tensor_parallel_chunks=(
            2 if tokens % stage.tensor_parallel_chunks else stage.tensor_parallel_chunks
        ),
    )


def _of_twin(fqn: str) -> str:
    """Return an FQN of the twin; a layer that it does not have becomes its last one."""
    return re.sub(r"(?<=^layers\.)\d+", lambda layer: str(min(int(layer[0]), LAYERS - 1)), fqn)


def reference(config: Config) -> Config:
    """Return the reference for a twin: the same batches in one eager process without checkpointing,
    the loss of all logits.
    """
    plain, training = (
        Parallelism(data_parallel_shard_degree=1),
        config.training.replace(loss_chunk_tokens=-1),
    )
    changes: dict[str, Any] = dict(compile=Compile(), activation_checkpoint=ActivationCheckpoint())
    return config.replace(parallelism=plain, training=training, **changes)


def run(config: Config, model: ModelConfig, *, prepare: Prepare | None = None) -> Observed:
    """Train `config` in new CPU processes, and return the values.

    prepare: called in each with its Trainer, before training.
    """
    processes = math.prod(getattr(config.parallelism, key) for key in DEGREES.values())
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        config = config.replace(job=config.job.replace(dump_folder=folder))
        mp.start_processes(
            _process, (processes, port, config, model, prepare), processes, start_method="spawn"
        )
        result = Observed()
        for rank in range(processes):
            part: Observed = torch.load(Path(folder) / f"rank-{rank}.pt", weights_only=False)
            result.losses.update(part.losses)
            result.gradients.update(part.gradients)
            for fqn, sums in part.activations.items():
                result.activations[fqn] = (
                    result.activations.get(fqn, torch.zeros(3, dtype=torch.float64)) + sums
                )
        for step, values in read_metrics(Path(folder) / "metrics.jsonl").items():
            if "validation_loss" in values:
                result.validation[step] = values["validation_loss"]
        return result


def _process(
    rank: int,
    processes: int,
    port: int,
    config: Config,
    model: ModelConfig,
    prepare: Prepare | None,
) -> None:
    os.environ.update(
        dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    os.environ.update(
        dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(processes)), NO_COLOR="1"
    )
    # a warning about gathering a full gradient over two axes, which only this program does
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    recorder = _Recorder(prepare)
    Trainer(config, model=model, hooks=[recorder]).train()
    torch.save(recorder.observed, Path(config.job.dump_folder) / f"rank-{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


class _Recorder(Hook):
    """Keeps the losses of every step, and the gradients and module outputs of the first."""

    def __init__(self, prepare: Prepare | None):
        self.prepare = prepare
        self.observed = Observed()
        self.handles: list[RemovableHandle] = []

    def on_train_start(self, trainer: Trainer) -> None:
        # A twin's sequences are shorter than documents; for training.mask_documents each full stop
        # begins a document.
        trainer.bos_id = trainer.tokenizer.encode(".")[0]
        if self.prepare is not None:
            self.prepare(trainer)

    def on_metrics(self, trainer: Trainer, metrics: StepMetrics) -> None:
        self.observed.losses[trainer.rank, metrics.step] = metrics.loss, metrics.grad_norm

    def on_step_start(self, trainer: Trainer) -> None:
        if trainer.step != 1 or trainer.config.compile.compiles("model"):
            return
        without_output = {"", "layers"}
        if trainer.layout.loss_chunk:
            without_output.add("output")  # it returns the loss
        for stage in trainer.model.stages:
            for fqn, module in stage.named_modules():
                if fqn not in without_output:
                    handle = module.register_forward_hook(_summing(fqn, self.observed))
                    self.handles.append(handle)

    def on_gradients(self, trainer: Trainer) -> None:
        if trainer.step != 1:
            return
        for handle in self.handles:
            handle.remove()
        one_copy = all(trainer.mesh[axis].get_local_rank() == 0 for axis in AXES if axis != "pp")
        for fqn, parameter in trainer.parameters.items():
            gradient = parameter.grad.full_tensor().clone()  # type: ignore[union-attr]
            if one_copy:
                self.observed.gradients[fqn] = gradient


def _summing(fqn: str, result: Observed) -> Callable:
    def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # recomputed by activation checkpointing
        numbers = output.detach().double()
        sums = torch.stack(
            (torch.tensor(float(numbers.numel())), numbers.sum(), numbers.square().sum())
        )
        result.activations[fqn] = (
            result.activations.get(fqn, torch.zeros(3, dtype=torch.float64)) + sums
        )

    return hook


def compare(found: Observed, expected: Observed, within: Tolerances = FLOAT32) -> Comparison:
    def apart(one: float, other: float) -> float:
        difference = abs(one - other) / max(abs(other), 1e-30)
        return difference if math.isfinite(difference) else math.inf

    # on every rank, not only on those of the last pipeline stage
    ranks = {rank for rank, _ in found.losses}
    losses = [
        apart(mine, value)
        for (_, step), values in expected.losses.items()
        for rank in ranks
        for mine, value in zip(found.losses[rank, step], values, strict=True)
    ]
    losses += [apart(found.validation[step], loss) for step, loss in expected.validation.items()]
    worst = {
        fqn: apart(
            float((found.gradients[fqn] - gradient).norm() + gradient.norm()),
            float(gradient.norm()),
        )
        for fqn, gradient in expected.gradients.items()
    }
    parameter = max(worst, key=lambda fqn: worst[fqn])
    modules = {**expected.activations} if found.activations else {}
    if "output" not in found.activations:  # the loss is computed without all logits
        modules.pop("output", None)
    sums = ((fqn, found.activations.get(fqn), each) for fqn, each in modules.items())
    module = next((fqn for fqn, mine, each in sums if _diverges(mine, each, within.activation)), "")
    agrees = max(losses) <= within.loss and worst[parameter] <= within.gradient and not module
    return Comparison(max(losses), worst[parameter], parameter, module, agrees)


def _diverges(found: Tensor | None, expected: Tensor, tolerance: float) -> bool:
    if found is None:
        return True
    numbers, total, squares = (float(value) for value in expected)
    off = max(
        abs(float(found[1]) - total) / math.sqrt(numbers * squares + 1e-30),
        abs(float(found[2]) - squares) / (squares + 1e-30),
    )
    return float(found[0]) != numbers or not off <= tolerance


def verify(
    config: Config, layouts: Sequence[Degrees], *, steps: int = 5, prepare: Prepare | None = None
) -> bool:
    """Print a line for each layout, and return whether all agree.

    Raises ConfigError if the only layout is impossible.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before CUDA is initialized
    flavor, within = shape_of(config.model), FLOAT8 if config.float8.enable else FLOAT32
    kind = f"float8 {config.float8.recipe} beside float32" if config.float8.enable else "float32"
    print(
        f"twin of {shape_words(config.model)}: {twin_model(flavor, 1).n_layers} layers or more, dim"
        f" {FLAVORS['debug'].dim}, {kind}, {ROWS} sequences of {SEQ_LEN} tokens a step, {steps}"
        f" steps; expected: one eager process\ntolerances, relative: loss {within.loss:g}, gradient"
        f" {within.gradient:g}, activations {within.activation:g}"
    )
    width = max(len("layout"), *(len(name_of(layout)) for layout in layouts))
    if (how := config.parallelism.replicate_compression) != "none":
        print(f'not in the twin: parallelism.replicate_compression = "{how}", which approximates')
    print(
        f"{'layout':<{width}}  processes  loss     gradient  {'of':<31}  {'first to diverge':<24} "
        " verdict"
    )
    expected: dict[tuple, Observed] = {}
    agree = True
    for layout in layouts:
        start = f"{name_of(layout):<{width}}  {math.prod(layout.values()):>9}"
        small = twin(config, layout, steps)
        try:
            model = _enough_layers(small, flavor, math.prod(layout.values()))
        except ConfigError as error:
            if len(layouts) == 1:
                raise
            print(f"{start}  not possible: {error}", flush=True)
            continue
        key = (model.n_layers, small.training.global_batch_size)
        if key not in expected:
            expected[key] = run(reference(small), model)
            if config.float8.enable:
                _show_rounding(reference(small), model, expected[key], width)
        try:
            result = compare(run(small, model, prepare=prepare), expected[key], within)
            module = result.module
            if not result.agrees and small.compile.enable:
                eager = small.replace(compile=Compile())
                module = (
                    compare(run(eager, model, prepare=prepare), expected[key], within).module
                    or "none in eager mode"
                )
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            print(f"{start}  FAILS\n{error}", flush=True)
            agree = False
            continue
        verdict = "agrees" if result.agrees else "DIFFERS"
        figures = (
            f"{result.loss:.1e}  {result.gradient:.1e}   {result.parameter:<31} "
            f" {module or '-':<24}"
        )
        print(f"{start}  {figures}  {verdict}", flush=True)
        agree &= result.agrees
    return agree


def _show_rounding(config: Config, model: ModelConfig, rounded: Observed, width: int) -> None:
    """Print how far a run in float8 is from the same without, in bfloat16 and in float32."""
    for dtype in ("bfloat16", "float32"):
        training = config.training.replace(mixed_precision_param=dtype)
        apart = compare(rounded, run(config.replace(float8=Float8(), training=training), model))
        name = f"float8 beside {dtype}"
        print(
            f"{name:<{width + 11}}  {apart.loss:.1e}  {apart.gradient:.1e}   {apart.parameter}",
            flush=True,
        )


def _enough_layers(config: Config, flavor: ModelConfig, processes: int) -> ModelConfig:
    """Return the twin's model with the fewest layers for its stages.

    Raises ConfigError if the layout has another mistake.
    """
    for layers in range(LAYERS, most := 4 * processes + 8):
        model = twin_model(flavor, layers)
        try:
            layout = Layout.from_config(config, processes, model)
            check(config, choose_fsdp_communication(config, layout, device_memory()))
            break
        except TooFewLayers:
            if layers == most - 1:
                raise
    return model


@functools.partial(command, gone=1)  # 0 would say that all layouts agree
def main(arguments: Sequence[str]) -> int:
    parser = Parser(__doc__)
    parser.add_argument(
        "recipe", help="a TOML file; options of the form --section.key value change it"
    )
    parser.add_argument(
        "--layouts",
        nargs="+",
        default=["recipe"],
        metavar="LAYOUT",
        help="what to verify (default: recipe)",
    )
    parser.add_argument(
        "--steps", type=at_least_one, default=5, metavar="N", help="steps of each run (default: 5)"
    )
    options, overrides = parser.parse_with_overrides(arguments)
    config = load_config(options.recipe, overrides)
    layouts: list[Degrees] = []
    for name in options.layouts:
        layouts += (
            every_layout()
            if name == "all"
            else [layout_of(config) if name == "recipe" else parse_layout(name)]
        )
    return 0 if verify(config, layouts, steps=options.steps) else 1
