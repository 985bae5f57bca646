"""Everything that a recipe and a number of ranks decide, worked out and checked once, before any process group is there.

    layout = make_layout(config, world_size=8)
    layout.degrees               # {"pp": 1, "dp_replicate": 2, "dp_shard": 4, "cp": 1, "tp": 1}
    layout.microbatches          # of one optimizer step: local batches x microbatches of the pipeline
    layout.tokens                # of one optimizer step, over all ranks

The trainer, the planner, the start lines, the checkpoint's state and verify read these values; nobody derives one again.
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from titan_lite.compiler.autotune import check_steps
from titan_lite.compiler.fqns import parameters_within
from titan_lite.compiler.hardware import PROFILES, load_machine, profile_of
from titan_lite.config import Config, ConfigError, gradient_accumulation_steps
from titan_lite.distributed.mesh import check_context_parallel, check_tensor_parallel, resolve_degrees
from titan_lite.distributed.pipeline_plan import PipelinePlan, plan_pipeline
from titan_lite.models.llama3 import ModelConfig, Transformer
from titan_lite.shape import shape_of, shape_words


@dataclass(frozen=True)
class Layout:
    """A recipe arranged on a number of ranks."""

    model: ModelConfig  # with max_seq_len = training.seq_len
    degrees: dict[str, int]  # ranks along each axis of the mesh (distributed/mesh.py)
    pipeline: PipelinePlan  # stages, their ranks, microbatches of a local batch
    local_batch_size: int  # sequences that a data-parallel rank or its pipeline takes at once
    accumulation: int  # local batches of one optimizer step, on each data-parallel rank
    gathers_once: bool  # weights are gathered and gradients reduced once an optimizer step, not once a microbatch

    @property
    def world_size(self) -> int:
        return math.prod(self.degrees.values())

    @property
    def dp_degree(self) -> int:
        """Ranks, or pipelines, with different sequences."""
        return self.degrees["dp_replicate"] * self.degrees["dp_shard"]

    @property
    def seq_len(self) -> int:
        return self.model.max_seq_len

    @property
    def parameters(self) -> int:
        """Numbers in the weights of the whole model."""
        return sum(parameter.numel() for parameter in _on_meta_device(self.model).parameters())

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


def make_layout(config: Config, world_size: int, model: ModelConfig | None = None) -> Layout:
    """The layout of a recipe on so many ranks. Looks at no tokenizer, no data and no process group.

    model: a shape in place of the recipe's. Raises ConfigError for what cannot run.
    """
    training, parallelism = config.training, config.parallelism
    model = model or shape_of(config.model)
    if training.seq_len > model.max_seq_len:
        flavor = config.model.flavor or "of its own"
        most = "model.max_seq_len says" if config.model.max_seq_len else f"flavor {flavor} was made for"
        raise ConfigError(f"training.seq_len = {training.seq_len} is more than {most}; at most {model.max_seq_len} works")
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
    accumulation = gradient_accumulation_steps(training, degrees["dp_replicate"] * degrees["dp_shard"])
    microbatches = accumulation * pipeline.microbatches
    layout = Layout(
        model=dataclasses.replace(model, max_seq_len=training.seq_len),
        degrees=degrees,
        pipeline=pipeline,
        local_batch_size=training.local_batch_size,
        accumulation=accumulation,
        gathers_once=microbatches > 1 and parallelism.fsdp_communication == "step",
    )
    words = shape_words(config.model)
    _check_names("parallelism.fsdp_keep_gathered", parallelism.fsdp_keep_gathered, words, layout.model)
    _check_schedule(config, layout)
    if layout.gathers_once and parallelism.fsdp_reshard_after_forward == "always":
        raise ConfigError(
            'parallelism.fsdp_reshard_after_forward = "always" has no effect with fsdp_communication = "step", which keeps '
            f'weights gathered for a step of {microbatches} microbatches; fsdp_communication = "microbatch" would work'
        )
    return layout


def _check_names(key: str, names: Sequence[str], flavor: str, model: ModelConfig) -> None:
    """Raises ConfigError for a name in which the model, all pipeline stages together, has no parameter."""
    meta = _on_meta_device(model)
    for name in names:
        if not parameters_within(meta, [name]):
            raise ConfigError(
                f'{key} = [{", ".join(names)}]: "{name}" has no parameter in flavor {flavor}; '
                f"tok_embeddings, layers.0 to layers.{model.n_layers - 1}, norm and output have, and modules within"
            )


@functools.cache
def _on_meta_device(model: ModelConfig) -> Transformer:
    with torch.device("meta"):
        return Transformer(dataclasses.replace(model, max_seq_len=1))


def _check_schedule(config: Config, layout: Layout) -> None:
    """Raises ConfigError where the compile stage could not bucket as the recipe says."""
    stage = config.compile
    if stage.machine:
        load_machine(stage.machine)
    if not stage.compiles("model"):
        return
    if stage.bucketing == "plan":
        names = [name for bucket in stage.buckets for name in bucket.split()]
        _check_names("compile.buckets", names, shape_words(config.model), layout.model)
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            raise ConfigError(f'compile.buckets: "{twice[0]}" stands in it twice; a parameter has one bucket')
        meta = _on_meta_device(layout.model)
        if all(len(parameters_within(meta, bucket.split())) < 2 for bucket in stage.buckets):
            raise ConfigError(
                f"compile.buckets = [{', '.join(stage.buckets)}]: none has two parameters, so nothing would be merged; "
                '"layers.0 layers.1" would work, or compile.bucketing = "none"'
            )
    if stage.bucketing in ("greedy", "auto", "measured") and not stage.machine and torch.cuda.is_available():
        device = torch.cuda.get_device_name()
        if profile_of(device) is None:
            raise ConfigError(
                f'compile.bucketing = "{stage.bucketing}" prices collectives, and "{device}" is not known: compile.machine = '
                f'{", ".join(PROFILES)} or a .toml file, or bucketing = "block" would work'
            )
    if stage.bucketing not in ("none", "block") and layout.gathers_once:
        raise ConfigError(
            f'compile.bucketing = "{stage.bucketing}" has nothing to bucket: parallelism.fsdp_communication = "step" gathers '
            f'once for {layout.microbatches} microbatches; fsdp_communication = "microbatch" or bucketing = "block" would work'
        )
    check_steps(stage, done=0, steps=config.training.steps)
