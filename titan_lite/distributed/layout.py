"""Compute and check all values that follow from a recipe and a number of ranks, once, before a
process group exists.

    layout = make_layout(config, world_size=8)
    layout.degrees               # {"pp": 1, "dp_replicate": 2, "dp_shard": 4, "cp": 1, "tp": 1}
    layout.microbatches          # of one optimizer step: local batches x microbatches of the pipeline
    layout.tokens                # of one optimizer step, over all ranks
    layout.rows_at(step)         # sequences of that step; training.global_batch_ramp changes it in the first steps

The trainer, the planner, the start lines, the checkpoint's state and verify read these values and
derive none again. torch is imported only by checks that build the model or read a machine's
profile, so that most errors are reported in 0.1 s.
"""

import dataclasses
import itertools
import math
from dataclasses import dataclass

from titan_lite.config import Config, ConfigError, Training, gradient_accumulation_steps
from titan_lite.distributed.degrees import (
    check_context_parallel,
    check_tensor_parallel,
    resolve_degrees,
)
from titan_lite.distributed.layout_checks import (
    check_layout,
    error_bytes,
    gathered_in_float8,
    on_meta_device,
    shapes_of,
)
from titan_lite.distributed.pipeline_schedule import PipelineSchedule, plan_pipeline
from titan_lite.models.flavors import shape_of
from titan_lite.models.loss_chunk import loss_chunk
from titan_lite.models.shapes import ModelConfig
from titan_lite.optim.state import kept_by_owners, moment_bytes, numbers_in, share_of_matrices
from titan_lite.sharding import chunk_size

SIZES = {"float32": 4, "bfloat16": 2}  # bytes of an element
# Bytes of a stored weight, of its gradient and of each of its moments: float32.
STORED = 4
# Share of a device's memory that fsdp_communication = "auto" may fill, without activations.
FILLED = 0.6


@dataclass(frozen=True)
class Layout:
    """A recipe arranged on a number of ranks."""

    model: ModelConfig  # with max_seq_len = training.seq_len
    degrees: dict[str, int]  # ranks along each axis of the mesh (distributed/mesh.py)
    pipeline: PipelineSchedule  # stages, their ranks, microbatches of a local batch
    local_batch_size: int  # sequences that a data-parallel rank or its pipeline takes at once
    # local batches of one optimizer step, on each data-parallel rank, once the ramp is over
    accumulation: int
    # weights are gathered and gradients reduced once an optimizer step, not once a microbatch
    gathers_once: bool
    loss_chunk: int = 0  # tokens whose logits a rank has at a time; 0: all of a microbatch
    ramp: tuple[
        tuple[int, int], ...
    ] = ()  # of global_batch_ramp, before accumulation: (local batches, last step)

    @property
    def world_size(self) -> int:
        return math.prod(self.degrees.values())

    @property
    def dp_degree(self) -> int:
        """Number of ranks, or pipelines, with different sequences."""
        return self.degrees["dp_replicate"] * self.degrees["dp_shard"]

    @property
    def seq_len(self) -> int:
        return self.model.max_seq_len

    @property
    def parameters(self) -> int:
        """Number of parameters of the model."""
        return sum(parameter.numel() for parameter in on_meta_device(self.model).parameters())

    @property
    def shapes_of_rank(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters of a rank's pipeline stages, by FQN, before they are split, on
        the rank with most.
        """
        ranks = (
            [self.pipeline.modules[stage] for stage in self.pipeline.stages_of(rank)]
            for rank in range(self.degrees["pp"])
        )
        return max(
            (shapes_of(self.model, [*itertools.chain(*stages)]) for stages in ranks), key=numbers_in
        )

    @property
    def parameters_of_rank(self) -> float:
        return numbers_in(self.shapes_of_rank) / self.degrees["tp"]

    def steady_bytes(self, config: Config) -> float:
        """Return the bytes of a rank's weights, gradients and moments on its device, of what it has
        as an owner, and of the errors of compressed gradients.
        """
        own = self.parameters_of_rank / (self.degrees["dp_shard"] * self.degrees["cp"])
        moments = moment_bytes(config.optimizer, own, own * share_of_matrices(self.shapes_of_rank))
        beside = self.owner_bytes(config) + 2 * error_bytes(config, self)
        return 2 * STORED * own + sum(moments) + beside

    def owner_bytes(self, config: Config) -> float:
        """Return the bytes that the rank with most keeps of whole matrices
        (optim/matrix_owners.py).
        """
        ranks = self.world_size // self.degrees["pp"]
        return max(kept_by_owners(config.optimizer, self.shapes_of_rank, ranks))

    def step_bytes(self, config: Config) -> float:
        """Return the extra bytes of gathering once a step: unsharded weights, gradients of a
        backward, sums of gradients.
        """
        computed, summed = itemsizes(config.training)
        in_float8 = (
            numbers_in(gathered_in_float8(config.float8, self.shapes_of_rank)) / self.degrees["tp"]
        )
        return (2 * computed + summed) * self.parameters_of_rank - (computed - 1) * in_float8

    @property
    def microbatches(self) -> int:
        """Forward and backward passes of one optimizer step."""
        return self.accumulation * self.pipeline.microbatches

    @property
    def sequences(self) -> int:
        """Sequences of one microbatch."""
        return self.local_batch_size // self.pipeline.microbatches

    @property
    def rows(self) -> int:
        """Sequences of one optimizer step, over all ranks."""
        return self.accumulation * self.local_batch_size * self.dp_degree

    @property
    def tokens(self) -> int:
        """Tokens of one optimizer step, over all ranks."""
        return self.rows * self.seq_len

    def accumulation_at(self, step: int) -> int:
        """Return the local batches of optimizer step `step`; the first step is 1."""
        return next((batches for batches, last in self.ramp if step <= last), self.accumulation)

    def rows_at(self, step: int) -> int:
        """Return the sequences of optimizer step `step`, over all ranks."""
        return self.rows * self.accumulation_at(step) // self.accumulation

    @property
    def most_rows(self) -> int:
        """Sequences of the largest optimizer step, over all ranks."""
        return max([self.rows, *(self.rows_at(last) for _, last in self.ramp)])

    def tokens_until(self, step: int) -> int:
        """Return the tokens of all steps up to `step`, over all ranks."""
        ends = [0, *(min(last, step) for _, last in self.ramp), step]
        return self.seq_len * sum(
            self.rows_at(end) * (end - begin) for begin, end in itertools.pairwise(ends)
        )

    @property
    def ramp_in_words(self) -> str:
        """Sequences of the first steps, in words; "" without a ramp."""
        return ", ".join(
            f"{self.rows_at(last):,} sequences until step {last:,}" for _, last in self.ramp
        )


def itemsizes(training: Training) -> tuple[int, int]:
    """Return the bytes per element of computation, and of sums of gradients."""
    return SIZES[training.mixed_precision_param], SIZES[training.mixed_precision_reduce]


def _fits_gathered_once(config: Config, layout: Layout, memory: float) -> bool:
    """Return the choice of fsdp_communication = "auto": True (once a step) if it fits and no key
    buckets or reshards.
    """
    stage = config.compile
    if config.parallelism.fsdp_reshard_after_forward == "always":
        return False
    if stage.compiles("model") and stage.bucketing not in ("none", "block"):
        return False
    if memory == math.inf:
        return True
    return layout.steady_bytes(config) + layout.step_bytes(config) <= FILLED * memory


def make_layout(
    config: Config, world_size: int, model: ModelConfig | None = None, *, memory: float = math.inf
) -> Layout:
    """Return the layout of a recipe on `world_size` ranks.

    Needs no tokenizer, no data and no process group.

    model: replaces the recipe's model shape. memory: bytes of a device. Raises ConfigError for a
    recipe that cannot run.
    """
    training, parallelism = config.training, config.parallelism
    model = model or shape_of(config.model)
    if training.seq_len > model.max_seq_len:
        wrong = f"training.seq_len = {training.seq_len} is more than the model's max_seq_len"
        raise ConfigError(f"{wrong}; use at most {model.max_seq_len}")
    degrees = resolve_degrees(parallelism, world_size)
    check_context_parallel(degrees["cp"], seq_len=training.seq_len, tp=degrees["tp"])
    check_tensor_parallel(
        degrees["tp"],
        n_heads=model.n_heads,
        n_kv_heads=model.n_kv_heads,
        hidden_dim=model.hidden_dim,
        vocab_size=model.vocab_size,
        seq_len=training.seq_len,
    )
    pipeline = plan_pipeline(
        parallelism,
        n_layers=model.n_layers,
        tied=model.tied_embeddings,
        local_batch_size=training.local_batch_size,
        compiled=config.compile.compiles("model") or config.compile.compiles("loss"),
        checkpointed=config.activation_checkpoint.mode != "none",
    )
    *ramp, (accumulation, _) = gradient_accumulation_steps(
        training, degrees["dp_replicate"] * degrees["dp_shard"]
    )
    microbatches = max([accumulation, *(batches for batches, _ in ramp)]) * pipeline.microbatches
    layout = Layout(
        model=dataclasses.replace(model, max_seq_len=training.seq_len),
        degrees=degrees,
        pipeline=pipeline,
        local_batch_size=training.local_batch_size,
        accumulation=accumulation,
        ramp=tuple((batches, int(last)) for batches, last in ramp),
        gathers_once=microbatches > 1 and parallelism.fsdp_communication == "step",
    )
    if microbatches > 1 and parallelism.fsdp_communication == "auto":
        once = _fits_gathered_once(config, layout, memory)
        layout = dataclasses.replace(layout, gathers_once=once)
    tokens = layout.sequences * layout.seq_len // degrees["cp"]
    chunk = loss_chunk(training, tokens, chunk_size(model.vocab_size, degrees["tp"]))
    layout = dataclasses.replace(layout, loss_chunk=chunk)
    check_layout(config, layout)
    return layout
