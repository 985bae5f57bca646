"""Describe a recipe on its layout: the lines at a run's start.

    for line in start_lines(config, layout, device, priced=True, tokens_known=2048): ...

A function for each line, in the order in which a run shows them.
"""

import os
import socket
from collections.abc import Sequence

import torch

from titan_lite import __version__
from titan_lite.config import Config
from titan_lite.distributed.layout import Layout, least_batch_bytes, least_state_bytes
from titan_lite.feature import features_of
from titan_lite.models.attention import fits_flash, masks_by_kernel
from titan_lite.models.shapes import shape_words
from titan_lite.optim.lr_scheduler import decay_of
from titan_lite.sharding import chunk_size

GIB = 2**30
# A vocabulary is rounded up for the hardware, by a few percent; above this ratio it is a mistake.
MAX_ROWS_PER_TOKEN = 1.25


def start_lines(
    config: Config,
    layout: Layout,
    device: torch.device,
    *,
    priced: bool,
    tokens_known: int,
    sources: Sequence[str] = (),
) -> list[str]:
    """Return lines on model, layout, batch, data and memory.

    priced: communication costs are known; tokens_known: to the tokenizer; sources: lines on sources
    of documents.
    """
    lines = []
    if config.job.description:
        lines.append(config.job.description)
    lines.append(model_line(config, layout))
    lines.append(layout_line(layout, device))
    lines.append(batch_line(layout))
    lines += sources
    lines.append(tokenizer_line(config))
    if layout.model.vocab_size > MAX_ROWS_PER_TOKEN * tokens_known:
        lines.append(unused_rows_line(layout, tokens_known))
    if config.training.mask_documents:
        lines.append(documents_line(config, layout, device))
    for feature in features_of(config):
        lines += feature.start_lines(config, layout)
    if config.compile.enable and not priced:
        lines.append(
            f"no cost model for {device_name(device)}: what communication costs is not estimated"
            " (compile.machine)"
        )
    if layout.degrees["pp"] > 1:
        lines.append(pipeline_line(config, layout))
    if layout.loss_chunk:
        chunks = chunk_size(layout.tokens_per_microbatch, layout.loss_chunk)
        lines.append(
            f"loss: in {chunks} chunks of {layout.loss_chunk:,} tokens, never with all logits"
            " (training.loss_chunk_tokens)"
        )
    lines.append(memory_line(config, layout))
    lines.append(checkpoints_line(config))
    lines += learning_rate_lines(config, layout)
    if config.compile.enable:
        lines.append("compiling comes first: the first step and the first validation take longer")
    return lines


def start_facts(layout: Layout, device: torch.device, revision: str) -> dict[str, str]:
    """Return what a start runs on, in words by name, for events.jsonl and the report.

    revision: of the checkout; "" without one.
    """
    nodes = layout.world_size // int(os.environ.get("LOCAL_WORLD_SIZE", layout.world_size))
    others = f" and {counted(nodes - 1, 'other node')}" if nodes > 1 else ""
    return {
        "layout": describe_layout(layout),
        "device": device_name(device),
        "host": f"{socket.gethostname()}{others}",
        "torch": str(torch.__version__),
        "titan_lite": __version__,
        "revision": revision,
    }


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return "1 rank" or "2 ranks"."""
    return f"1 {noun}" if number == 1 else f"{number} {plural or noun + 's'}"


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {counted(torch.get_num_threads(), 'thread')}"


def model_line(config: Config, layout: Layout) -> str:
    ways = [computed_by(config)]
    training = config.training
    if training.float32_matmul_precision != "highest":
        precision = training.float32_matmul_precision
        ways.append(f"float32 matmuls in {precision} precision (TF32 on GPUs)")
    dtype = getattr(torch, training.mixed_precision_param)
    if training.attention_kernel != "auto" and fits_flash(dtype, layout.model.head_dim):
        ways.append(f"attention by {training.attention_kernel} (training.attention_kernel)")
    shape = f"{config.model.name} {shape_words(config.model)}"
    parameters = f"{layout.parameters:,} parameters"
    if layout.model.n_experts:
        parameters += f", {layout.active_parameters:,} of them for a token"
    return f"model: {shape}, {parameters}; torch {torch.__version__}, {'; '.join(ways)}"


def computed_by(config: Config) -> str:
    compile = config.compile
    return compile.backend if compile.enable else "eager"


def layout_line(layout: Layout, device: torch.device) -> str:
    return f"layout: {describe_layout(layout)}, each one {device_name(device)}"


def describe_layout(layout: Layout) -> str:
    """Return the ranks and degrees in words, such as "4 ranks = dp_shard 2 x tp 2"."""
    axes = [f"{axis} {degree}" for axis, degree in layout.degrees.items() if degree > 1]
    product = f" = {' x '.join(axes)}" if axes else ""
    experts = f", experts over ep {layout.expert_parallel}" if layout.expert_parallel > 1 else ""
    return f"{counted(layout.world_size, 'rank')}{product}{experts}"


def batch_line(layout: Layout) -> str:
    local_batches = counted(layout.accumulation, "local batch", "local batches")
    gathered = ""
    if layout.microbatches > 1 and layout.fsdp_degree > 1:
        interval = "step" if layout.gathers_once else "microbatch"
        gathered = f"; weights gathered once a {interval} (parallelism.fsdp_communication)"
    return (
        f"batch: {layout.tokens:,} tokens a step = {layout.sequences_per_step} sequences of"
        f" {layout.seq_len}, in {local_batches} of {layout.local_batch_size} a rank{gathered}"
    )


def tokenizer_line(config: Config) -> str:
    path = config.model.tokenizer_path
    return f"tokenizer: {min(path, os.path.relpath(path), key=len)}"


def unused_rows_line(layout: Layout, tokens_known: int) -> str:
    """Return the line on a vocabulary that is far larger than the tokenizer's."""
    rows = layout.model.vocab_size
    return (
        f"vocabulary: {rows:,} rows of embedding and output for {tokens_known:,} tokens of the"
        f" tokenizer: {rows - tokens_known:,} are never a label, and cost memory and time"
        " (model.vocab_size)"
    )


def documents_line(config: Config, layout: Layout, device: torch.device) -> str:
    means = attention_within_documents(config, layout, device)
    return f"documents: attention stays within them, by {means} (training.mask_documents)"


def attention_within_documents(config: Config, layout: Layout, device: torch.device) -> str:
    """Return what keeps attention within documents, with its memory."""
    dtype = getattr(torch, config.training.mixed_precision_param)
    cp = layout.degrees["cp"]
    if masks_by_kernel(device, dtype, layout.model.head_dim, cp):
        return "FlashAttention, with no mask"
    pairs = layout.microbatch_size * layout.seq_len**2 // cp  # of tokens, a byte each
    mask = f"a mask of {pairs / GIB:.2f} GiB"
    if device.type == "cuda":
        return f"{mask}, and a bias of {pairs * dtype.itemsize / GIB:.2f} GiB for its kernel"
    return mask


def pipeline_line(config: Config, layout: Layout) -> str:
    pipeline = layout.pipeline
    schedule = config.parallelism.pipeline_parallel_schedule
    return (
        f"pipeline: {len(pipeline.modules)} stages, {schedule}, {pipeline.microbatches}"
        f" microbatches of {layout.microbatch_size};"
        f" stages on a rank: {len(pipeline.stages_of(0))},"
        f" ranks of a stage: {layout.world_size // layout.degrees['pp']}"
    )


def memory_line(config: Config, layout: Layout) -> str:
    steady = least_state_bytes(config, layout) / GIB
    line = f"memory: at least {steady:.2f} GiB a rank for parameters, gradients and optimizer state"
    if layout.gathers_once:
        unsharded = layout.gathered_bytes / GIB
        line += f", {unsharded:.2f} GiB for unsharded weights and gradients, held for the step"
    batch = least_batch_bytes(config, layout) / GIB
    return f"{line}; at least {batch:.2f} GiB for a local batch and its activations"


def checkpoints_line(config: Config) -> str:
    if not config.checkpoint.enable:
        return "checkpoints: none (checkpoint.enable = false)"
    interval = config.checkpoint.interval
    return f"checkpoints: every {interval} steps and at the end (checkpoint.interval)"


def learning_rate_lines(config: Config, layout: Layout) -> list[str]:
    """Return a line on where a decay is whose begin is set, or on a warm-up that is longer than the
    run.
    """
    schedule = config.lr_scheduler
    steps = config.training.steps
    if schedule.decay_begin != "":
        decay = decay_of(schedule, steps, layout.tokens)
        return [
            f"learning rate: decays from step {decay.begin + 1:,} to step {decay.end:,}"
            " (lr_scheduler.decay_begin, decay_length)"
        ]
    if schedule.warmup_steps <= steps:
        return []
    return [
        f"learning rate: lr_scheduler.warmup_steps = {schedule.warmup_steps:,} is longer than"
        f" training.steps = {steps:,}: it only rises, to"
        f" {100 * steps / schedule.warmup_steps:.0f}% of optimizer.lr; use"
        f" warmup_steps = {max(1, steps // 10)} unless the run is resumed later"
    ]
