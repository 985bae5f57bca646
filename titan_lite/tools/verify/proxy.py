"""Make the proxy of a recipe: a small recipe whose layout is right if the large one's is.

    layout = layout_of(config, world_size=8)  # {"pp": 1, ..., "dp_shard": 4, "cp": 1, "tp": 2}
    small = proxy(config, layout, steps=5)
    model = proxy_model(shape_of(config.model), stages=1)
    alone = reference(small)                 # the same batches in one eager process

A proxy keeps what decides whether a layout is correct: kinds of parallelism, schedule, activation
checkpointing, compiler passes, communication, tied weights, RoPE scaling. It shrinks the rest: the
model to the debug flavor, degrees to 2 or a little more, the batch to a few short sequences; graphs
run as traced, without Inductor.
"""

import dataclasses
import itertools
import math

from titan_lite.config import (
    SHIPPED,
    ActivationCheckpoint,
    Checkpoint,
    Compile,
    Config,
    ConfigError,
    Data,
    FaultTolerance,
    Metrics,
    Parallelism,
    Profiling,
    Training,
    Validation,
)
from titan_lite.config.errors import shown
from titan_lite.config.families import ModelConfig, find_family
from titan_lite.distributed.layout import AXES, DEGREES, resolve_degrees
from titan_lite.feature import features_of
from titan_lite.models.loss_chunk import automatic_chunk
from titan_lite.models.shapes import shape_of
from titan_lite.sharding import chunk_size
from titan_lite.tools.verify.small import with_existing_blocks

Degrees = dict[str, int]  # by axis, and by "ep", which is within the others
KEYS = {**DEGREES, "ep": "expert_parallel_degree"}

TOKENIZER = SHIPPED.parent / "assets/tokenizer/debug.model"
MAX_PROCESSES = 8
MIN_LAYERS = 4  # more if the stages need them
SEQUENCES = 16  # of a step, on every layout
SEQ_LEN = 32  # tokens
TOKENS = 16  # of a microbatch on a rank, at least: matmuls of few bits need them
MAX_NORM = 0.01  # of gradients: every step clips them
DEGREE_OF_ANY = 4  # dp_shard of a recipe for any number of GPUs


# --- Layouts --------------------------------------------------------------------------------------


def layout_of(config: Config, world_size: int | None = None) -> Degrees:
    """Return the degrees of the proxy of a recipe, on so many ranks (None: on any number).

    They are 2 for each kind of parallelism in the recipe. Data and context parallelism are doubled
    as long as the recipe has more and MAX_PROCESSES are enough, that which is the furthest from the
    recipe first. Raises ConfigError if the recipe's degrees do not make up `world_size`.
    """
    wanted = resolve_degrees(config.parallelism, world_size or ranks_of_degrees(config))
    layout = {axis: min(2, degree) for axis, degree in wanted.items()}
    layout["ep"] = min(2, config.parallelism.expert_parallel_degree)
    growing = [axis for axis in AXES if axis not in ("pp", "tp")]
    while True:
        axis = max(growing, key=lambda axis: wanted[axis] / layout[axis])
        larger = layout | {axis: 2 * layout[axis]}
        if larger[axis] > wanted[axis] or processes_of(larger) > MAX_PROCESSES:
            return layout
        layout = larger


def ranks_of_degrees(config: Config) -> int:
    """Return the ranks that a recipe's degrees are for."""
    degrees = [getattr(config.parallelism, key) for key in DEGREES.values()]
    return math.prod(DEGREE_OF_ANY if degree == -1 else degree for degree in degrees)


def every_layout(experts: bool = False) -> list[Degrees]:
    """Return all combinations of degrees 1 and 2 for 2 to MAX_PROCESSES processes."""
    choices = itertools.product((1, 2), repeat=len(AXES))
    layouts = [dict(zip(KEYS, (*degrees, 1), strict=True)) for degrees in choices]
    possible = [layout for layout in layouts if 1 < processes_of(layout) <= MAX_PROCESSES]
    if experts:
        split = [layout | {"ep": 2} for layout in possible if ranks_of_copy(layout) > 1]
        possible += split
    return sorted(possible, key=processes_of)


def parse_layout(text: str) -> Degrees:
    """Parse "dp_shard=2,tp=2" into the degrees of all axes. Raises ConfigError."""
    layout = dict.fromkeys(KEYS, 1)
    for part in text.split(","):
        axis, _, degree = part.partition("=")
        if axis not in KEYS or not (degree.isascii() and degree.isdigit() and int(degree) > 0):
            raise ConfigError(
                f"--layouts {text}: '{part}' is not a degree; use recipe, all, or degrees of "
                f"{', '.join(KEYS)} such as dp_shard=2,tp=2"
            )
        layout[axis] = int(degree)
    return layout


def name_of(layout: Degrees) -> str:
    """Return the layout in the form that `parse_layout` reads."""
    degrees = [f"{axis}={degree}" for axis, degree in layout.items() if degree > 1]
    return ",".join(degrees) or "one process"


def processes_of(layout: Degrees) -> int:
    return math.prod(layout[axis] for axis in AXES)


def ranks_of_copy(layout: Degrees) -> int:
    """Return the ranks that may share the experts of a block, of which ep is a part."""
    return layout["dp_shard"] * layout["cp"] * layout["tp"]


# --- Proxies --------------------------------------------------------------------------------------


def proxy_model(flavor: ModelConfig, stages: int) -> ModelConfig:
    """Return the family's debug flavor with what `flavor` has beside sizes, and layers for its
    stages.

    Raises ConfigError for a family of a user's own without that flavor.
    """
    flavors = find_family(flavor.family).flavors
    if "debug" not in flavors:
        raise ConfigError(
            f"model.name = {shown(flavor.family)}: its Family has no flavor debug, which verify"
            " trains; add a small one"
        )
    return dataclasses.replace(
        flavors["debug"],
        family=flavor.family,
        n_layers=max(MIN_LAYERS, stages),
        tied_embeddings=flavor.tied_embeddings,
        rope_scaling=flavor.rope_scaling,
        rope_theta=flavor.rope_theta,
    )


def proxy(config: Config, layout: Degrees, steps: int) -> Config:
    """Return a small version of `config` on `layout`."""
    config = with_existing_blocks(config, MIN_LAYERS)
    small = config.replace(
        model=config.model.replace(tokenizer_path=str(TOKENIZER)),
        training=_training(config, layout, steps),
        lr_scheduler=config.lr_scheduler.replace(warmup_steps=0, decay_begin=""),
        parallelism=_parallelism(config, layout),
        compile=config.compile.replace(backend="aot_eager"),
        checkpoint=Checkpoint(),
        data=Data(num_workers=0),
        validation=Validation(enable=True, freq=steps, steps=1),
        metrics=Metrics(log_freq=1, enable_tensorboard=False),
        profiling=Profiling(),
        fault_tolerance=FaultTolerance(),
    )
    for feature in features_of(config):
        small, _ = feature.for_verify(small)
    return small


def reference(config: Config) -> Config:
    """Return the reference of a proxy: its batches in one eager process, the loss of all logits."""
    return config.replace(
        training=config.training.replace(loss_chunk_tokens=-1),
        parallelism=Parallelism(data_parallel_shard_degree=1),
        activation_checkpoint=ActivationCheckpoint(),
        compile=Compile(),
    )


def _training(config: Config, layout: Degrees, steps: int) -> Training:
    dp = layout["dp_replicate"] * layout["dp_shard"]
    local = _local_batch_size(config, layout)
    sequences = local if layout["pp"] == 1 else _microbatch_size(config, layout)
    tokens = sequences * SEQ_LEN // layout["cp"]
    return config.training.replace(
        local_batch_size=local,
        global_batch_size=math.ceil(SEQUENCES / (local * dp)) * local * dp,
        seq_len=SEQ_LEN,
        steps=steps,
        # three chunks, the last one smaller
        loss_chunk_tokens=tokens * 2 // 5 if _chunks_loss(config) else -1,
        compare_replicas_freq=1,
        max_norm=min(MAX_NORM, config.training.max_norm),
        mixed_precision_param="float32",
        mixed_precision_reduce="float32",
        attention_kernel="auto",
    )


def _local_batch_size(config: Config, layout: Degrees) -> int:
    """Return the sequences of a data-parallel rank's batch; a step has two if the recipe's does."""
    dp = layout["dp_replicate"] * layout["dp_shard"]
    recipe_dp = dp
    if config.parallelism.data_parallel_shard_degree != -1:
        recipe_dp = (
            config.parallelism.data_parallel_replicate_degree
            * config.parallelism.data_parallel_shard_degree
        )
    accumulates = config.training.global_batch_size > config.training.local_batch_size * recipe_dp
    batches = 2 if accumulates else 1
    return max(1, SEQUENCES // (dp * batches))


def _microbatch_size(config: Config, layout: Degrees) -> int:
    """Return the sequences that go through a pipeline at a time."""
    many = _local_batch_size(config, layout) >= 4 * layout["pp"]
    return max(TOKENS * layout["cp"] // SEQ_LEN, 2 if many else 1)


def _parallelism(config: Config, layout: Degrees) -> Parallelism:
    given = config.parallelism
    degrees = {KEYS[axis]: degree for axis, degree in layout.items()}
    parallelism = given.replace(
        **degrees,
        pipeline_parallel_split_points=(),
    )
    if layout["pp"] == 1:
        return parallelism.without_pipeline()
    if given.pipeline_parallel_degree == 1:
        parallelism = parallelism.replace(
            pipeline_parallel_first_stage_less_layers=0, pipeline_parallel_last_stage_less_layers=0
        )
    return parallelism.replace(pipeline_parallel_microbatch_size=_microbatch_size(config, layout))


def _chunks_loss(config: Config) -> bool:
    """Return True if a run of the recipe computes its loss in chunks of tokens."""
    if config.training.loss_chunk_tokens != 0:
        return config.training.loss_chunk_tokens > 0
    parallelism = config.parallelism
    sequences = config.training.local_batch_size
    if parallelism.pipeline_parallel_degree > 1:
        sequences = parallelism.pipeline_parallel_microbatch_size
    tokens = sequences * config.training.seq_len // parallelism.context_parallel_degree
    vocab_size = shape_of(config.model).vocab_size
    entries = chunk_size(vocab_size, parallelism.tensor_parallel_degree)
    return automatic_chunk(tokens, entries) > 0
