"""Compute how big a recipe is on a number of ranks: degrees, stages, microbatches, tokens, shapes.

    layout = Layout.from_config(config, world_size=8, device_memory=80 * 2**30)
    layout.degrees            # {"pp": 1, "dp_replicate": 2, "dp_shard": 4, "cp": 1, "tp": 1}
    layout.microbatches       # of a step: local batches x microbatches of the pipeline
    layout.tokens             # of a step, over all ranks
    layout.gathers_once       # weights are gathered once a step, not once a microbatch

Plain numbers without torch, a device or a price. The trainer, the planner, the start lines, the
checkpoint's state and verify read them here, and compute none themselves. Which layouts are
possible is in titan_lite/rules/, and what they take in tools/plan/.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from titan_lite.config import (
    Config,
    ConfigError,
    Parallelism,
    Training,
    gradient_accumulation_steps,
)
from titan_lite.config.errors import alternatives, nearest_multiples
from titan_lite.config.families import ModelConfig, Shape
from titan_lite.config.optimizers import OPTIMIZERS
from titan_lite.distributed.pipeline_schedule import PipelineSchedule
from titan_lite.models.fqns import is_of_experts
from titan_lite.models.loss_chunk import automatic_chunk
from titan_lite.models.shapes import (
    FLOAT32_BYTES,
    ITEM_BYTES,
    active_parameters,
    numbers_in,
    parameter_shapes,
    shape_of,
)
from titan_lite.sharding import chunk_size

DEGREES = {  # axis: the key of its degree in [parallelism]
    "pp": "pipeline_parallel_degree",
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
}
AXES = tuple(DEGREES)  # of the mesh, the outermost first
# fsdp_communication = "auto" counts these bytes of a parameter. Of its shards: a weight, a gradient
# and two moments in float32. Gathered: a weight and a gradient in bfloat16, and a float32 sum.
SHARD_BYTES = 16
GATHERED_BYTES = 8
# Share of a device's memory that both may fill, without activations.
MAX_FILLED = 0.6


@dataclass(frozen=True)
class Layout:
    """A recipe arranged on a number of ranks."""

    model: ModelConfig  # with max_seq_len = training.seq_len
    degrees: dict[str, int]  # ranks along each axis of the mesh (distributed/mesh.py)
    pipeline: PipelineSchedule  # stages, their ranks, microbatches of a local batch
    local_batch_size: int  # sequences that a data-parallel rank or its pipeline takes at once
    accumulation: int  # local batches of a step on each data-parallel rank
    gathers_once: bool  # weights are gathered, gradients reduced once a step, not once a microbatch
    expert_parallel: int = 1  # ranks, of dp_shard x cp x tp, that have a block's experts together
    loss_chunk: int = 0  # tokens whose logits a rank has at a time; 0: all of a microbatch
    replica_groups: int = 1  # each on all ranks of a layout; they share local batches

    @classmethod
    def from_config(
        cls,
        config: Config,
        world_size: int,
        model: ModelConfig | None = None,
        device_memory: float = math.inf,
    ) -> "Layout":
        """Return the layout of a recipe on `world_size` ranks.

        model: replaces the recipe's model shape. device_memory: bytes of a rank's device, on which
        `gathers_once` depends. Raises ConfigError for degrees, batches or stages that do not
        divide; rules.check looks at the rest.
        """
        training = config.training
        model = model or shape_of(config.model)
        longest = model.max_seq_len
        model = dataclasses.replace(model, max_seq_len=training.seq_len)
        check_tensor_parallel(config.parallelism, model, world_size)
        check_context_parallel(config.parallelism, training.seq_len, longest, world_size)
        degrees = resolve_degrees(config.parallelism, world_size)
        check_expert_parallel(config.parallelism.expert_parallel_degree, degrees, model.n_experts)
        pipeline = PipelineSchedule.from_config(
            config.parallelism,
            n_layers=model.n_layers,
            local_batch_size=training.local_batch_size,
        )
        dp_degree = degrees["dp_replicate"] * degrees["dp_shard"]
        groups = config.fault_tolerance.replica_groups
        layout = cls(
            model=model,
            degrees=degrees,
            pipeline=pipeline,
            local_batch_size=training.local_batch_size,
            accumulation=gradient_accumulation_steps(training, dp_degree, groups),
            replica_groups=groups,
            gathers_once=False,
            expert_parallel=config.parallelism.expert_parallel_degree,
        )
        return dataclasses.replace(
            layout,
            gathers_once=_gathers_once(config, layout, device_memory),
            loss_chunk=_loss_chunk(training, layout),
        )

    @property
    def world_size(self) -> int:
        return math.prod(self.degrees.values())

    @property
    def dp_degree(self) -> int:
        """Number of ranks, or pipelines, with different sequences."""
        return self.degrees["dp_replicate"] * self.degrees["dp_shard"]

    @property
    def fsdp_degree(self) -> int:
        """Number of ranks that share a parameter's shards."""
        return self.degrees["dp_shard"] * self.degrees["cp"]

    @property
    def expert_ranks(self) -> int:
        """Number of ranks that share all experts of a block."""
        return self.fsdp_degree * self.degrees["tp"]

    # Parameters

    @property
    def parameters(self) -> int:
        """Number of parameters of the model."""
        return numbers_in(parameter_shapes(self.model))

    @property
    def active_parameters(self) -> int:
        """Number of parameters that a token is computed with; all of a dense model."""
        return active_parameters(self.model)

    @property
    def copies_table(self) -> bool:
        """True if the last stage has a copy of a tied table (distributed/tied_table.py)."""
        return self.model.tied_embeddings and len(self.pipeline.modules) > 1

    @property
    def sends_table(self) -> bool:
        """True if the first and the last stage are on different ranks, and share a tied table."""
        return self.copies_table and self.pipeline.rank_of[0] != self.pipeline.rank_of[-1]

    def shapes_on(self, rank: int) -> dict[str, Shape]:
        """Return the shapes of the parameters that a pipeline rank updates, by FQN, before they are
        split: all of its stages but the copy of a tied table.
        """
        stages = [self.pipeline.modules[stage] for stage in self.pipeline.stages_of(rank)]
        modules = [fqn for stage in stages for fqn in stage]
        if self.copies_table and "output" in modules:
            modules.remove("output")
        return parameter_shapes(self.model, modules) if modules else {}

    def copied_on(self, rank: int) -> int:
        """Return the numbers in a pipeline rank's copy of a tied table, before they are split."""
        has_copy = self.copies_table and rank == self.pipeline.rank_of[-1]
        return self.model.vocab_size * self.model.dim if has_copy else 0

    @property
    def largest_pipeline_rank(self) -> int:
        """The pipeline rank with most parameters, its copy of a tied table included."""
        return max(
            range(self.degrees["pp"]),
            key=lambda rank: numbers_in(self.shapes_on(rank)) + self.copied_on(rank),
        )

    @property
    def shapes_of_rank(self) -> dict[str, Shape]:
        """Shapes of the parameters that the largest pipeline rank updates, by FQN, before they are
        split.
        """
        return self.shapes_on(self.largest_pipeline_rank)

    @property
    def parameters_of_rank(self) -> float:
        """Number of parameters that a rank updates: in its stages and its tensor-parallel part,
        before sharding.
        """
        return numbers_in(self.shapes_of_rank) / self.degrees["tp"]

    @property
    def gathered_of_rank(self) -> float:
        """Number of parameters that `parameters_of_rank` is of, when they are gathered: a
        tensor-parallel rank has a part of them, and of experts some whole.
        """
        shapes = self.shapes_of_rank
        experts = numbers_in({fqn: each for fqn, each in shapes.items() if is_of_experts(each)})
        dense = numbers_in(shapes) - experts
        return dense / self.degrees["tp"] + experts / self.expert_parallel

    @property
    def copied_of_rank(self) -> float:
        """Number of parameters in the copy of a tied table, if `parameters_of_rank` is of a rank
        that has it; in its tensor-parallel part, before sharding.
        """
        return self.copied_on(self.largest_pipeline_rank) / self.degrees["tp"]

    @property
    def own_parameters(self) -> float:
        """Number of parameters in the shards of a rank."""
        return (self.parameters_of_rank + self.copied_of_rank) / self.fsdp_degree

    @property
    def gathered_bytes(self) -> float:
        """Bytes of unsharded weights, gradients and their sums, held for a step."""
        return GATHERED_BYTES * (self.gathered_of_rank + self.copied_of_rank)

    # Batches

    @property
    def seq_len(self) -> int:
        """Tokens of a sequence, over all context-parallel ranks."""
        return self.model.max_seq_len

    @property
    def microbatches(self) -> int:
        """Forward and backward passes of one optimizer step."""
        return self.accumulation * self.pipeline.microbatches

    @property
    def microbatch_size(self) -> int:
        """Sequences of one microbatch."""
        return self.local_batch_size // self.pipeline.microbatches

    @property
    def tokens_per_microbatch(self) -> int:
        """Tokens of a microbatch on a context-parallel rank."""
        return self.microbatch_size * self.seq_len // self.degrees["cp"]

    @property
    def sequences_per_step(self) -> int:
        """Sequences of one optimizer step, over all ranks."""
        return self.accumulation * self.local_batch_size * self.dp_degree

    @property
    def tokens(self) -> int:
        """Tokens of one optimizer step, over all ranks."""
        return self.sequences_per_step * self.seq_len

    def shared_evenly(self, sequences: int) -> int:
        """Return the sequences of a step in which each group has as many as the busiest one has of
        a step of `sequences`.
        """
        at_once = self.local_batch_size * self.dp_degree * self.replica_groups
        return math.ceil(sequences / at_once) * at_once


def resolve_degrees(parallelism: Parallelism, world_size: int) -> dict[str, int]:
    """Return the ranks along each axis, with -1 resolved.

    Raises ConfigError unless their product is world_size.
    """
    degrees: dict[str, int] = {axis: getattr(parallelism, key) for axis, key in DEGREES.items()}
    product = math.prod(degree for degree in degrees.values() if degree != -1)
    above_one = [f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1]
    factors = " x ".join(above_one) or "all 1"
    if degrees["dp_shard"] == -1:
        if world_size % product:
            raise ConfigError(
                "parallelism.data_parallel_shard_degree = -1 cannot be resolved: the other degrees"
                f" ({factors}) multiply to {product}, which does not divide {world_size} ranks;"
                f" {_lowered(degrees, world_size)}, or start"
                f" {math.ceil(world_size / product) * product} ranks"
            )
        degrees["dp_shard"] = world_size // product
    elif product != world_size:
        instead = f"lower degrees until they multiply to {world_size}"
        if world_size % (product // degrees["dp_shard"]) == 0:
            instead = "use data_parallel_shard_degree = -1"
        raise ConfigError(
            f"parallelism.data_parallel_shard_degree = {degrees['dp_shard']}: the degrees"
            f" ({factors}) need {product} ranks, and there are {world_size}; {instead}, or start"
            f" {product} ranks (NGPU={product})"
        )
    return degrees


def _lowered(degrees: Mapping[str, int], world_size: int) -> str:
    """Return the degree to lower, by as little as possible, so that their product divides the
    number of ranks, in words.

    A degree becomes a divisor of itself: that divides the model, too. Replicas may be any number.
    """
    product = math.prod(degree for degree in degrees.values() if degree != -1)
    fitting = [
        (degree / lower, f"use parallelism.{DEGREES[axis]} = {lower}")
        for axis, degree in degrees.items()
        for lower in range(1, degree)
        if world_size % (product // degree * lower) == 0
        and (axis == "dp_replicate" or degree % lower == 0)
    ]
    if not fitting:
        return f"lower degrees until they multiply to a divisor of {world_size}"
    return min(fitting)[1]


def check_tensor_parallel(parallelism: Parallelism, model: ModelConfig, world_size: int) -> None:
    """Raise ConfigError unless the degree divides the heads, and the tokens of a sequence."""
    divided = {
        "attention heads": model.n_heads,
        "key/value heads": model.n_kv_heads,
        "tokens of training.seq_len": model.max_seq_len,
    }
    degree = parallelism.tensor_parallel_degree
    undivided = [f"{count} {what}" for what, count in divided.items() if count % degree]
    if undivided:
        fitting = [
            each
            for each in range(1, model.n_kv_heads + 1)
            if not any(count % each for count in divided.values())
            and _divides_ranks(parallelism.replace(tensor_parallel_degree=each), world_size)
        ]
        raise ConfigError(
            f"parallelism.tensor_parallel_degree = {degree} does not divide the"
            f" {' and the '.join(undivided)}; use {alternatives(fitting or [1])}"
        )


def _divides_ranks(parallelism: Parallelism, world_size: int) -> bool:
    """Return True if there are ranks for all degrees but that of data_parallel_shard_degree."""
    degrees = [getattr(parallelism, key) for axis, key in DEGREES.items() if axis != "dp_shard"]
    return world_size % math.prod(degrees) == 0


def check_context_parallel(
    parallelism: Parallelism, seq_len: int, longest: int, world_size: int
) -> None:
    """Raise ConfigError unless each rank has two chunks of a sequence of `seq_len` tokens, which
    tensor-parallel ranks can share.

    longest: tokens of the longest sequence that the model has.
    """
    cp = parallelism.context_parallel_degree
    tp = parallelism.tensor_parallel_degree
    multiple = 2 * cp * tp
    if cp > 1 and seq_len % multiple:
        shared = f" that {tp} tensor-parallel ranks share" if tp > 1 else ""
        fitting = [each for each in nearest_multiples(seq_len, multiple) if each <= longest]
        instead = f"training.seq_len = {alternatives(fitting)}"
        if not fitting or not _divides_ranks(parallelism, world_size):
            instead = "a lower degree"
        raise ConfigError(
            f"parallelism.context_parallel_degree = {cp} cannot cut training.seq_len = {seq_len}"
            f" into 2 x {cp} chunks{shared}; use {instead}"
        )


def check_expert_parallel(degree: int, degrees: Mapping[str, int], experts: int) -> None:
    """Raise ConfigError unless the degree divides the experts, and the ranks of a copy of a
    pipeline stage.

    experts: of a block; 0 in a dense model.
    """
    ranks = degrees["dp_shard"] * degrees["cp"] * degrees["tp"]
    divided = {"experts": experts, "ranks of dp_shard x cp x tp": ranks}
    undivided = [f"{count} {what}" for what, count in divided.items() if count % degree]
    if undivided:
        common = math.gcd(experts, ranks)
        fitting = [each for each in range(1, common + 1) if common % each == 0]
        raise ConfigError(
            f"parallelism.expert_parallel_degree = {degree} does not divide the"
            f" {' and the '.join(undivided)}; use {alternatives(fitting)}"
        )


def _gathers_once(config: Config, layout: Layout, device_memory: float) -> bool:
    """Return True if weights are gathered, and gradients reduced, once a step.

    With fsdp_communication = "auto" they are, unless a key buckets or reshards, or what is gathered
    would leave no room for activations on a device of `device_memory` bytes.
    """
    parallelism = config.parallelism
    of_group = math.ceil(layout.accumulation / layout.replica_groups)
    if of_group * layout.pipeline.microbatches == 1:
        return False
    if parallelism.fsdp_communication != "auto":
        return parallelism.fsdp_communication == "step"
    reshards = parallelism.fsdp_reshard_after_forward == "always"
    if config.compile.buckets_across_blocks or reshards:
        return False
    needed = SHARD_BYTES * layout.own_parameters + layout.gathered_bytes
    return needed <= MAX_FILLED * device_memory


def least_state_bytes(config: Config, layout: Layout) -> float:
    """Return a lower bound of the bytes that a rank keeps for the whole run: its shards of weights,
    gradients and moments.
    """
    moments = len(OPTIMIZERS[config.optimizer.name].moments)
    moment_bytes = moments * ITEM_BYTES[config.optimizer.state_dtype]
    return (2 * FLOAT32_BYTES + moment_bytes) * layout.own_parameters


def least_batch_bytes(config: Config, layout: Layout) -> float:
    """Return a lower bound of the bytes that a rank needs for a local batch: its tokens and labels
    in int64, and in bfloat16 what the blocks of its largest stage keep of a microbatch.
    """
    model = layout.model
    tokens = 16 * layout.local_batch_size * layout.seq_len
    modules = layout.pipeline.modules
    blocks = max(sum(name.startswith("layers.") for name in stage) for stage in modules)
    kept = model.dim  # for each token: what enters the block
    if config.activation_checkpoint.mode == "none":
        # queries, the result of attention, both halves of the feed-forward
        hidden_dim = model.hidden_dim * max(1, model.experts_per_token)
        kept += 2 * (model.n_heads * model.head_dim + hidden_dim)
    return tokens + 2 * blocks * kept * layout.tokens_per_microbatch / layout.degrees["tp"]


def _loss_chunk(training: Training, layout: Layout) -> int:
    """Return the tokens whose logits a rank has at a time; 0: all of a microbatch."""
    if training.loss_chunk_tokens != 0:
        return max(0, training.loss_chunk_tokens)  # -1: never in chunks
    entries = chunk_size(layout.model.vocab_size, layout.degrees["tp"])
    return automatic_chunk(layout.tokens_per_microbatch, entries)
