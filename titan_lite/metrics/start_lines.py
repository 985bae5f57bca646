"""Describe a recipe on its layout: the lines at a run's start, a picture of the mesh.

for line in start_lines(config, layout, device, priced=True): logger.info(line)
"""

import itertools
import math
import os
import re
from collections.abc import Mapping, Sequence

import torch

from titan_lite.config import Config
from titan_lite.distributed.axes import WORDS
from titan_lite.distributed.layout import Layout
from titan_lite.distributed.memory import (
    compressed_sizes,
    compression_error_bytes,
    gathered_once_bytes,
    itemsizes,
    steady_bytes,
)
from titan_lite.distributed.pipeline_schedule import bubble_fraction, order_of
from titan_lite.models.attention import fits_flash, masks_by_kernel
from titan_lite.models.shapes import shape_words
from titan_lite.optim.state import costs_of, owner_buckets, sum_by_owner

ROWS, BOXES, IN_A_BOX, IN_THE_ONLY_BOX = (
    4,
    4,
    4,
    16,
)  # limits of the picture; beyond them the middle is left out


def start_lines(
    config: Config,
    layout: Layout,
    device: torch.device,
    *,
    priced: bool,
    sources: Sequence[str] = (),
) -> list[str]:
    """Return lines on model, layout, batch, data and memory.

    priced: communication costs are known; sources: lines on sources.
    """
    training, parallelism, degrees, plan = (
        config.training,
        config.parallelism,
        layout.degrees,
        layout.pipeline,
    )
    threads = torch.get_num_threads()
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, {threads} thread{'s' * (threads > 1)}"
    )
    how = (
        f"{config.compile.backend} ({', '.join(config.compile.components)})"
        if config.compile.enable
        else "eager"
    )
    if training.float32_matmul_precision != "highest":
        how += f"; float32 products in {training.float32_matmul_precision} precision (TF32 on GPUs)"
    if training.attention_kernel != "auto" and fits_flash(
        getattr(torch, training.mixed_precision_param), layout.model.head_dim
    ):
        how += f"; attention by {training.attention_kernel} (training.attention_kernel)"
    if (float8 := config.float8).enable:
        gathers = float8.all_gather and degrees["dp_shard"] * degrees["cp"] > 1
        how += (
            f"; products of the blocks in float8, {float8.recipe}{', gathered in float8' * gathers}"
            " ([float8])"
        )
    axes = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1)
    notes = [
        "; ".join(short_names(plan.modules[stage]) for stage in plan.stages_of(rank))
        for rank in range(degrees["pp"])
    ]
    when = ""
    if layout.microbatches > 1:
        when = (
            f"; weights gathered once a {'step' if layout.gathers_once else 'microbatch'}"
            " (parallelism.fsdp_communication)"
        )
    lines = [
        *([config.job.description] if config.job.description else []),
        (
            f"model: {config.model.name} {shape_words(config.model)}, {layout.parameters:,}"
            f" parameters; torch {torch.__version__}, {how}"
        ),
        (
            f"layout: {layout.world_size}"
            f" rank{'s' * (layout.world_size > 1)}{f' = {axes}' if axes else ''}, each one {name}"
        ),
        *mesh_picture(degrees, notes),
        (
            f"batch: {layout.tokens:,} tokens a step = {layout.sequences_per_step} sequences of {layout.seq_len},"
            f" in {layout.accumulation} local batch{'es' * (layout.accumulation > 1)} of"
            f" {layout.local_batch_size} a rank{when}"
        ),
        *(
            [f"batch ramp: {describe_ramp(layout)} (training.global_batch_ramp)"]
            if layout.ramp
            else []
        ),
        *sources,
        (
            "tokenizer:"
            f" {min(config.model.tokenizer_path, os.path.relpath(config.model.tokenizer_path), key=len)}"
        ),
    ]
    if training.mask_documents:
        lines.append(
            f"documents: attention stays within them, by {_documents_by(config, layout, device)}"
            " (training.mask_documents)"
        )
    if costs_of(config.optimizer).has_owners:
        lines.append(_owners_of(config, layout))
    if parallelism.replicate_compression != "none":
        lines.append(_between_copies(config, layout))
    if config.compile.compiles("model") and not priced:
        lines.append(
            f"no prices for {name}: what communication costs is not estimated (compile.machine)"
        )
    if degrees["pp"] > 1:
        schedule = parallelism.pipeline_parallel_schedule
        lines.append(
            f"pipeline: {len(plan.modules)} stages, {schedule}, {plan.microbatches} microbatches of"
            f" {layout.microbatch_size}; ranks wait"
            f" {100 * bubble_fraction(order_of(parallelism, plan)):.1f}% of the time (the bubble),"
            " if all stages are equally fast"
        )
    if chunk := layout.loss_chunk:
        chunks = -(-layout.microbatch_size * layout.seq_len // layout.degrees["cp"] // chunk)
        lines.append(
            f"loss: in {chunks} chunks of {chunk:,} tokens, never with all logits"
            " (training.loss_chunk_tokens)"
        )
    held = f"{steady_bytes(config, layout) / 2**30:.2f} GiB a rank"
    memory = f"memory: {held} for parameters, gradients and optimizer state"
    if errors := 2 * compression_error_bytes(config, layout):
        memory += (
            f" ({errors / 2**30:.2f} GiB of it for two errors of the gradients between copies)"
        )
    if layout.gathers_once:
        memory += (
            f", {gathered_once_bytes(config, layout) / 2**30:.2f} GiB for unsharded weights and gradients,"
            " held for the step"
        )
    saves = (
        f"every {config.checkpoint.interval} steps and at the end"
        if config.checkpoint.enable
        else "none"
    )
    return [
        *lines,
        f"{memory}; activations beside that",
        (
            f"checkpoints: {saves}"
            f" (checkpoint.{'interval' if config.checkpoint.enable else 'enable = false'})"
        ),
        *(
            ["compiling comes first: the first step and the first validation take longer"]
            if config.compile.enable
            else []
        ),
    ]


def describe_ramp(layout: Layout) -> str:
    """Return the sequences of the first steps in words; "" without training.global_batch_ramp."""
    parts = [
        f"{layout.sequences_at(last_step):,} sequences until step {last_step:,}"
        for _, last_step in layout.ramp
    ]
    return ", ".join(parts)


def _owners_of(config: Config, layout: Layout) -> str:
    ranks = layout.world_size // layout.degrees["pp"]
    buckets = owner_buckets(config.optimizer, layout.shapes_of_rank, ranks)
    loads = sum_by_owner(buckets, ranks, costs_of(config.optimizer).owner_flops)
    shared = (
        f", shared by {ranks} ranks, of which the busiest computes"
        f" {max(loads) * ranks / sum(loads):.2f} times the mean"
    )
    by = (
        f"optimizer: {config.optimizer.name} for {sum(map(len, buckets))}"
        f" matrices{shared * (ranks > 1)}"
    )
    return f"{by}; AdamW for embedding, output and norms (optimizer.name)"


def _between_copies(config: Config, layout: Layout) -> str:
    """Return the line on what travels between copies, in bytes of a rank's all-reduces."""
    sent, summed, parallelism = (
        compressed_sizes(config, layout),
        itemsizes(config.training)[1],
        config.parallelism,
    )
    whole = {
        re.sub(r"\.\d+\.", ".*.", fqn).removesuffix(".weight"): None
        for fqn, (_, factors) in sent.items()
        if not factors
    }
    nbytes = sum(4 * factors or summed * numbers for numbers, factors in sent.values())
    before = sum(summed * numbers for numbers, _ in sent.values())
    count, rank = sum(factors > 0 for _, factors in sent.values()), parallelism.replicate_rank
    return (
        f"gradients between copies: {count} of {len(sent)} as factors of {rank} columns, {nbytes:,}"
        f" bytes a step instead of {before:,} (parallelism.replicate_compression); as they are:"
        f" {', '.join(whole) or 'none'}, and all in the first"
        f" {parallelism.replicate_uncompressed_steps} steps"
    )


def _documents_by(config: Config, layout: Layout, device: torch.device) -> str:
    dtype, cp = getattr(torch, config.training.mixed_precision_param), layout.degrees["cp"]
    if masks_by_kernel(device, dtype, layout.model.head_dim, cp):
        return "FlashAttention, with no mask"
    pairs = layout.microbatch_size * layout.seq_len**2 // cp
    bias = (
        f", and a bias of {pairs * dtype.itemsize / 2**30:.2f} GiB for its kernel"
        if device.type == "cuda"
        else ""
    )
    return f"a mask of {pairs / 2**30:.2f} GiB{bias}"


def mesh_picture(degrees: Mapping[str, int], notes: Sequence[str] = ()) -> list[str]:
    """Draw the ranks of a mesh in boxes, with a note for each rank along pp.

    Returns no lines for a single rank.

           dp_shard 0  dp_shard 1
          +-----------+-----------+
    pp 0  |   0   1   |   2   3   |  tok_embeddings, layers 0-2
    pp 1  |   4   5   |   6   7   |  layers 3-5, norm, output
          +-----------+-----------+  numbers are ranks; rows: pp (pipeline), boxes: dp_shard (FSDP), columns in a box: ...
    """
    active = [axis for axis, degree in degrees.items() if degree > 1]
    if not active:
        return []
    rest = [axis for axis in active if axis != "pp"]
    down, across, inside = (
        [axis for axis in active if axis not in rest[-2:]],
        rest[-2:-1],
        rest[-1:],
    )
    sizes = list(degrees.values())
    strides = {axis: math.prod(sizes[place + 1 :]) for place, axis in enumerate(degrees)}
    width = len(str(math.prod(sizes) - 1))

    def places(axes: Sequence[str], most: int) -> list[dict[str, int] | None]:
        """Return positions along these axes; None stands for those left out."""
        every = [
            dict(zip(axes, place, strict=True))
            for place in itertools.product(*(range(degrees[axis]) for axis in axes))
        ]
        return list(every) if len(every) <= most else [*every[: most - 2], None, every[-1]]

    def called(place: dict[str, int] | None) -> str:
        return (
            "..."
            if place is None
            else ", ".join(f"{axis} {number}" for axis, number in place.items())
        )

    def rank(*where: dict[str, int] | None) -> str:
        if None in where:
            return ".."
        return str(
            sum(
                number * strides[axis] for place in where if place for axis, number in place.items()
            )
        )

    rows, boxes, slots = (
        places(down, ROWS),
        places(across, BOXES),
        places(inside, IN_A_BOX if across or down else IN_THE_ONLY_BOX),
    )
    cells = [
        [" ".join(rank(row, box, slot).rjust(width) for slot in slots) for box in boxes]
        for row in rows
    ]
    wide = max(
        *(len(cell) for line in cells for cell in line), *(len(called(box)) for box in boxes)
    )
    left = max(len(called(row)) for row in rows)
    border = f"  {'':{left}}  +{'+'.join('-' * (wide + 2) for _ in boxes)}+"
    lines = (
        [f"  {'':{left}}   {' '.join(called(box).center(wide + 2) for box in boxes)}".rstrip()]
        if across
        else []
    )
    lines.append(border)
    for row, line in zip(rows, cells, strict=True):
        note = notes[row["pp"]] if notes and row and "pp" in row else ""
        lines.append(
            f"  {called(row):{left}}  |{'|'.join(f' {cell.center(wide)} ' for cell in line)}| "
            f" {note}".rstrip()
        )
    places_of = {"rows": down, "boxes": across, "columns in a box" if across else "columns": inside}
    said = [
        f"{place}: {', '.join(f'{axis} ({WORDS[axis]})' for axis in axes)}"
        for place, axes in places_of.items()
        if axes
    ]
    lines.append(f"{border}  numbers are ranks; {', '.join(said)}")
    return lines


def short_names(modules: Sequence[str]) -> str:
    """("tok_embeddings", "layers.0", "layers.1") -> tok_embeddings, layers 0-1"""
    words: list[str] = []
    layers: list[int] = []
    for name in (*modules, ""):
        if name.startswith("layers."):
            layers.append(int(name.removeprefix("layers.")))
            continue
        if layers:
            words.append(
                f"layers {layers[0]}-{layers[-1]}" if len(layers) > 1 else f"layer {layers[0]}"
            )
            layers = []
        words += [name] if name else []
    return ", ".join(words)
