"""What a run says of itself before its first step and after its last one, a line each.

for line in start_lines(config, layout, device=device, ...): logger.info(line)
for line in end_lines(dump_folder, "done", ...): logger.info(line)
"""

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_lite.compiler.receipt import Receipt, describe, exposed, milliseconds, write_receipts
from titan_lite.config import Config
from titan_lite.distributed.pipeline_plan import bubble_fraction, order_of
from titan_lite.layout import Layout
from titan_lite.logging import logger
from titan_lite.metrics.records import read_metrics
from titan_lite.metrics.timelines import write_timelines

ROWS, BOXES, IN_A_BOX, IN_THE_ONLY_BOX = 4, 4, 4, 16  # of the picture; more are left out in the middle


def start_lines(
    config: Config,
    layout: Layout,
    *,
    device: torch.device,
    parameters: Iterable[Tensor],
    without_effect: Sequence[str],
    priced: bool,
) -> list[str]:
    """parameters: of this rank's stages; without_effect: lines about keys that do nothing here; priced: whether the compile stage
    knows the machine."""
    training, parallelism, degrees, plan = config.training, config.parallelism, layout.degrees, layout.pipeline
    threads = torch.get_num_threads()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {threads} thread{'s' * (threads > 1)}"
    how = f"{config.compile.backend} ({', '.join(config.compile.components)})" if config.compile.enable else "eager"
    axes = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1)
    notes = ["; ".join(short_names(plan.modules[stage]) for stage in plan.stages_of(rank)) for rank in range(degrees["pp"])]
    lines = [
        *([config.job.description] if config.job.description else []),
        *without_effect,
        f"model: {config.model.name} {config.model.flavor}, {layout.parameters:,} parameters; torch {torch.__version__}, {how}",
        f"layout: {layout.world_size} rank{'s' * (layout.world_size > 1)}{f' = {axes}' if axes else ''}, each one {name}",
        *mesh_picture(degrees, notes),
        f"batch: {layout.tokens:,} tokens a step = {layout.rows} sequences of {layout.seq_len}, "
        f"in {layout.accumulation} local batch{'es' * (layout.accumulation > 1)} of {layout.local_batch_size} a rank",
    ]
    if config.compile.compiles("model") and not priced:
        lines.append(f"no prices for {name}: what communication costs is not estimated (compile.machine)")
    if degrees["pp"] > 1:
        schedule = parallelism.pipeline_parallel_schedule_csv or parallelism.pipeline_parallel_schedule
        lines.append(
            f"pipeline: {len(plan.modules)} stages, {schedule}, {plan.microbatches} microbatches of "
            f"{layout.sequences}; ranks wait {100 * bubble_fraction(order_of(parallelism, plan)):.1f}% of the time (the "
            "bubble), if all stages are equally fast"
        )
    own = list(parameters)
    shards = sum((each.to_local() if isinstance(each, DTensor) else each).numel() for each in own)
    size = getattr(torch, training.dtype).itemsize
    memory = f"memory: {4 * size * shards / 2**30:.2f} GiB a rank for parameters, gradients and optimizer state"
    if layout.gathers_once:
        dtypes = (getattr(torch, name).itemsize for name in (training.mixed_precision_param, training.mixed_precision_reduce))
        held = sum(each.numel() for each in own) / degrees["tp"] * sum(dtypes) / 2**30
        memory += f", {held:.2f} GiB for weights and gradients that are whole for a step"
    saves = f"every {config.checkpoint.interval} steps and at the end" if config.checkpoint.enable else "none"
    return [
        *lines,
        f"{memory}; activations beside that",
        f"checkpoints: {saves} (checkpoint.{'interval' if config.checkpoint.enable else 'enable = false'})",
        *(["compiling comes first: the first step and the first validation take longer"] if config.compile.enable else []),
    ]


def show_receipts(receipts: Sequence[Receipt], tried: Sequence[str], folder: Path) -> None:
    """Log what the compile stage did, and write compile.json and the timelines. tried: lines about ways to bucket."""
    if not receipts:
        return
    for line in (*tried, *describe(receipts)):
        logger.info(line)
    write_receipts(receipts, folder)
    write_timelines(receipts, folder)


def mesh_picture(degrees: Mapping[str, int], notes: Sequence[str] = ()) -> list[str]:
    """The ranks of a mesh in boxes, axes from the outermost to the innermost; a note for each rank along pp. Of one rank nothing.

           dp_shard 0  dp_shard 1
          +-----------+-----------+
    pp 0  |   0   1   |   2   3   |  tok_embeddings, layers 0-2
    pp 1  |   4   5   |   6   7   |  layers 3-5, norm, output
          +-----------+-----------+
    """
    active = [axis for axis, degree in degrees.items() if degree > 1]
    if not active:
        return []
    rest = [axis for axis in active if axis != "pp"]
    down, across, inside = [axis for axis in active if axis not in rest[-2:]], rest[-2:-1], rest[-1:]
    sizes = list(degrees.values())
    strides = {axis: math.prod(sizes[place + 1 :]) for place, axis in enumerate(degrees)}
    width = len(str(math.prod(sizes) - 1))

    def places(axes: Sequence[str], most: int) -> list[dict[str, int] | None]:
        """Where one can be along these axes; None for what is left out."""
        every = [dict(zip(axes, place, strict=True)) for place in itertools.product(*(range(degrees[axis]) for axis in axes))]
        return list(every) if len(every) <= most else [*every[: most - 2], None, every[-1]]

    def called(place: dict[str, int] | None) -> str:
        return "..." if place is None else ", ".join(f"{axis} {number}" for axis, number in place.items())

    def rank(*where: dict[str, int] | None) -> str:
        if None in where:
            return ".."
        return str(sum(number * strides[axis] for place in where if place for axis, number in place.items()))

    rows, boxes, slots = (
        places(down, ROWS),
        places(across, BOXES),
        places(inside, IN_A_BOX if across or down else IN_THE_ONLY_BOX),
    )
    cells = [[" ".join(rank(row, box, slot).rjust(width) for slot in slots) for box in boxes] for row in rows]
    wide = max(*(len(cell) for line in cells for cell in line), *(len(called(box)) for box in boxes))
    left = max(len(called(row)) for row in rows)
    border = f"  {'':{left}}  +{'+'.join('-' * (wide + 2) for _ in boxes)}+"
    lines = [f"  {'':{left}}   {' '.join(called(box).center(wide + 2) for box in boxes)}".rstrip()] if across else []
    lines.append(border)
    for row, line in zip(rows, cells, strict=True):
        note = notes[row["pp"]] if notes and row and "pp" in row else ""
        lines.append(f"  {called(row):{left}}  |{'|'.join(f' {cell.center(wide)} ' for cell in line)}|  {note}".rstrip())
    lines.append(border if not inside else f"{border}  in a box: {inside[0]} 0 to {degrees[inside[0]] - 1}")
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
            words.append(f"layers {layers[0]}-{layers[-1]}" if len(layers) > 1 else f"layer {layers[0]}")
            layers = []
        words += [name] if name else []
    return ", ".join(words)


def end_lines(
    dump_folder: Path,
    how: str,
    *,
    step: int,
    tokens: int,
    skipped: int,
    receipts: Sequence[Receipt],
    steps_on_disk: Sequence[int],
    left_out: str = "",
) -> list[str]:
    """how: "done" or "stopped". Figures are of the whole run, resumed parts included, from its metrics.jsonl."""
    rows = read_metrics(dump_folder / "metrics.jsonl").values()
    column = {
        name: [row[name] for row in rows if row.get(name) is not None]
        for name in ("loss", "validation_loss", "tps", "mfu", "data_wait", "memory_gib")
    }
    losses = [f"; {name.replace('_', ' ')} {column[name][-1]:.4f}" for name in ("loss", "validation_loss") if column[name]]
    lines = [f"{how}: step {step}, {tokens:,} tokens, {skipped} step{'s' * (skipped != 1)} skipped{left_out}{''.join(losses)}"]
    if column["tps"]:
        mfu = f"{statistics.median(column['mfu']):.1f}%" if column["mfu"] else "n/a (the device's peak is not known)"
        lines.append(
            f"speed: {statistics.median(column['tps']):,.0f} tokens a second and device, MFU {mfu}, waiting for data "
            f"{statistics.median(column['data_wait']):.1f}% (medians); peak memory {max(column['memory_gib']):.2f} GiB"
        )
    if times := exposed(receipts):
        lines.append(f"communication: {milliseconds(times[0])} of {milliseconds(times[1])} exposed, as estimated (compile.json)")
    lines.append(f"checkpoints: {', '.join(f'step-{step}' for step in steps_on_disk) or 'none'}")
    lines.append(f"to look at: python -m titan_lite.report {dump_folder}; tensorboard --logdir {dump_folder}")
    return lines
