"""Search for the fastest layout on a number of ranks: estimate all layouts by formula, and plan the
best of them.

    changes = space(config, world_size, machine, sequences)     # [{"section.key": "8", ...}, ...]
    estimate(layout, machine)       # rough seconds and bytes, in a millisecond
    why_lost(plan, best)            # "12% slower: waiting for tensor parallelism +0.31 s per step"

The formulas only choose what is planned; their results are not shown. Their bytes are a lower bound
(states, and what is kept for backward, without temporary memory), so no layout that fits is
excluded.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from tqdm import tqdm

from titan_lite.config import Config, ConfigError, flatten
from titan_lite.config.load import option
from titan_lite.cost.machine import GIB, Machine
from titan_lite.distributed.layout import DEGREES
from titan_lite.distributed.memory import (
    STORED_BYTES,
    compression_error_bytes,
    itemsizes,
    owner_bytes,
)
from titan_lite.models.shapes import shape_of
from titan_lite.optim.state import moment_bytes
from titan_lite.tools.plan.changes import (
    CHECKPOINTING,
    Change,
    Row,
    Stopped,
    fitting,
    plan_changes,
    ranked,
    table,
)
from titan_lite.tools.plan.memory import outside_of_tensors
from titan_lite.tools.plan.plan import Plan
from titan_lite.tools.plan.summary import describe_degrees, part_name
from titan_lite.tools.plan.trace import PlannedLayout, blocks_in

LONG_SEQUENCE = 32768  # tokens; shorter sequences are not split over ranks


def search(
    config: Config,
    world_size: int,
    lay_out: Callable[[Change], PlannedLayout],
    machine: Machine,
    count: int,
    full: bool,
) -> list[str]:
    """Return lines: the number of layouts, a ranked table, and why others are slower.

    count: number of layouts to plan.

    Raises ConfigError, and Stopped with the lines of what was planned.
    """
    sequences = sequences_per_step(config, lay_out)
    changes = list(space(config, world_size, machine, sequences))
    estimates: list[tuple[float, Change]] = []  # (seconds, change), of those that may fit
    refused = too_large = 0
    for change in tqdm(changes, desc="estimated by formula", leave=False, mininterval=1):
        try:
            seconds, nbytes = estimate(lay_out(change), machine)
        except ConfigError:
            refused += 1
            continue
        if nbytes <= machine.memory * GIB:
            estimates.append((seconds, change))
        else:
            too_large += 1
    estimates.sort(key=lambda estimated: estimated[0])
    fastest = [change for _, change in estimates[:count]]
    lines = [
        (
            f"{len(changes):,} layouts of {world_size} ranks with {sequences:,} sequences per step:"
            f" {refused:,} cannot run, {too_large:,} cannot fit (parameters, optimizer and kept"
            f" activations alone); of {len(estimates):,} the {len(fastest)} fastest by formula are"
            " planned, then the best one of them with other buckets"
        ),
        "",
    ]
    rows: list[Row] = []
    try:
        rows = plan_changes(lay_out, fastest, machine, full, label)
        fit = fitting(rows)
        if fit:
            change, best = fit[0]
            others = other_buckets(change, best.layout)
            rows = ranked([*rows, *plan_changes(lay_out, others, machine, full, label)])
    except Stopped as stopped:
        all_rows = ranked([*rows, *stopped.rows])
        partial = Stopped(all_rows, len(rows) + stopped.wanted)
        partial.lines = [
            *lines,
            f"PARTIAL: {partial}",
            *table(all_rows, label),
            *outcome(config, all_rows),
        ]
        raise partial from None
    return [*lines, *table(rows, label), *outcome(config, rows)]


def sequences_per_step(config: Config, lay_out: Callable[[Change], PlannedLayout]) -> int:
    """Return the sequences of a step, which all layouts of a search share. Raises ConfigError."""
    sequences = config.training.global_batch_size
    if sequences != -1:
        return sequences
    try:
        return lay_out({}).sequences_per_step
    except ConfigError as error:
        raise ConfigError(
            f"--search needs the tokens of a step; use --training.global_batch_size=N: {error}"
        ) from error


def outcome(config: Config, rows: Sequence[Row]) -> list[str]:
    """Return the lines below a table: why the others are slower, and the keys of the best."""
    if not rows:
        return ["", "none was planned yet"]
    fit = fitting(rows)
    if not fit:
        return ["", "no layout fits; use more ranks, fewer sequences per step, or shorter ones"]
    best_change, best = fit[0]
    lost = [
        f"  {why_lost(plan, best)}: {label(change)}"
        for change, plan in rows
        if isinstance(plan, Plan) and plan is not best
    ]
    keys = " ".join(option(key, value) for key, value in differing(config, best_change).items())
    return ["", "why the others lost", *lost, "", f"best: {keys}"]


def lighter(plan: Plan, lay_out: Callable[[Change], PlannedLayout]) -> list[Change]:
    """Return the least activation checkpointing that should fit, if less than the plan's.

    Formulas scale the planned memory.
    """
    mode = plan.layout.config.activation_checkpoint.mode
    if mode not in CHECKPOINTING:
        return []
    _, lower_bound = estimate(plan.layout, plan.machine)
    for less in CHECKPOINTING[: CHECKPOINTING.index(mode)]:
        change = {"activation_checkpoint.mode": less}
        _, nbytes = estimate(lay_out(change), plan.machine)
        if plan.memory.total * nbytes / lower_bound <= plan.capacity:
            return [change]
    return []


def other_buckets(change: Change, layout: PlannedLayout) -> list[Change]:
    """Return other bucketings than the recipe's; none if weights are gathered once per step, with
    buckets of its own.
    """
    if not layout.config.compile.compiles("model") or layout.gathers_once:
        return []
    return [
        change | {"compile.bucketing": way}
        for way in ("block", "greedy")
        if way != layout.config.compile.bucketing
    ]


def powers_of_two(most: int) -> list[int]:
    return [2**exponent for exponent in range(most.bit_length())]


def space(config: Config, world_size: int, machine: Machine, sequences: int) -> Iterator[Change]:
    """Yield combinations of degrees, local batch size, checkpointing, schedule and
    fsdp_communication at `sequences` per step, with tensor parallelism inside a node. Some are
    refused when they are laid out.
    """
    for degrees in degrees_on(config, world_size, machine, sequences):
        of_rank = sequences // (degrees["dp_replicate"] * degrees["dp_shard"])
        has_pipeline = degrees["pp"] > 1
        schedules = [config.parallelism.pipeline_parallel_schedule]
        if has_pipeline:
            schedules = ["1F1B", "Interleaved1F1B"]
        compression = "none"
        if degrees["dp_replicate"] > 1:
            compression = config.parallelism.replicate_compression
        for batch, mode in itertools.product(_local_batches(of_rank, degrees["pp"]), CHECKPOINTING):
            has_microbatches = batch < of_rank or has_pipeline
            communication = ("step", "microbatch") if has_microbatches else ("step",)
            for schedule, when in itertools.product(schedules, communication):
                yield {
                    **{
                        f"parallelism.{DEGREES[axis]}": str(degree)
                        for axis, degree in degrees.items()
                    },
                    "training.local_batch_size": str(batch),
                    "training.global_batch_size": str(sequences),
                    "activation_checkpoint.mode": mode,
                    "parallelism.pipeline_parallel_schedule": schedule,
                    "parallelism.fsdp_communication": when,
                    "compile.bucketing": config.compile.bucketing,
                    "parallelism.replicate_compression": compression,
                }


def degrees_on(
    config: Config, world_size: int, machine: Machine, sequences: int
) -> Iterator[dict[str, int]]:
    """Yield the degrees of parallelism that multiply to the world size and divide the sequences.

    FSDP is over all data-parallel ranks, or over those of a node.
    """
    shape = shape_of(config.model)
    contexts = {1, config.parallelism.context_parallel_degree}
    if config.training.seq_len >= LONG_SEQUENCE:
        contexts |= {2, 4, 8, 16}
    pipelines = [1] if shape.tied_embeddings else powers_of_two(shape.n_layers)
    for tp, pp, cp in itertools.product(
        powers_of_two(machine.ranks_per_node), pipelines, sorted(contexts)
    ):
        dp, rest = divmod(world_size, tp * pp * cp)
        if rest or not dp or sequences % dp or sequences < dp:
            continue
        in_node = min(dp, max(1, machine.ranks_per_node // (tp * cp)))
        for shard in {dp, in_node}:
            if dp % shard == 0:
                yield {"tp": tp, "pp": pp, "cp": cp, "dp_shard": shard, "dp_replicate": dp // shard}


def label(change: Change) -> str:
    """Describe a layout of `space` in a few words."""
    degrees = {axis: int(change[f"parallelism.{key}"]) for axis, key in DEGREES.items()}
    words = [
        describe_degrees(degrees),
        f"batch {change['training.local_batch_size']}",
        f"checkpointing {change['activation_checkpoint.mode']}",
    ]
    if degrees["pp"] > 1:
        words.append(change["parallelism.pipeline_parallel_schedule"])
    words.append(f"FSDP once per {change['parallelism.fsdp_communication']}")
    words.append(f"{change['compile.bucketing']} buckets")
    return ", ".join(words)


def differing(config: Config, change: Change) -> Change:
    """Return the keys of a change that differ from the recipe."""
    own = flatten(config)
    return {key: value for key, value in change.items() if str(own[key]) != value}


def _local_batches(sequences: int, pp: int) -> list[int]:
    """Return local batch sizes for `sequences` per rank and step: small ones, and with a pipeline
    those that fill it.
    """
    if pp == 1:
        return [batch for batch in powers_of_two(min(sequences, 8)) if sequences % batch == 0]
    return [
        sequences // part for part in (1, 2, 4) if sequences % part == 0 and sequences // part >= pp
    ]


@dataclass(frozen=True)
class _Sizes:
    """Sizes of a rank's part of the model, by formula."""

    tokens: int  # of a microbatch on this rank, before tensor parallelism
    vocabulary: float  # elements of the embedding, or of the output
    block: float  # elements of a block's matrices
    recomputed: float  # share of blocks that run twice
    kept_bytes: float  # of a block's activations of a microbatch, a lower bound


def _sizes(layout: PlannedLayout) -> _Sizes:
    model = layout.model
    tp = layout.degrees["tp"]
    computed, _ = itemsizes(layout.config.training)
    tokens = layout.microbatch_size * layout.seq_len // layout.degrees["cp"]
    attention = 2 * model.dim * model.head_dim * (model.n_heads + model.n_kv_heads)
    feed_forward = 3 * model.dim * model.hidden_dim
    mode = layout.config.activation_checkpoint.mode
    option = layout.config.activation_checkpoint.selective_ac_option
    by_operator = mode == "selective" and option in ("op", "op/2")
    recomputed = 0.0
    if mode == "full":
        recomputed = 1.0
    elif mode == "selective" and not by_operator:
        recomputed = 1 / int(option)
    # Inputs of products, which selective checkpointing recomputes: the results of two norms and of
    # the feed-forward.
    inputs = 0.0 if by_operator else 2 * model.dim + model.hidden_dim
    # At least queries, keys, values, attention's result and its product, and both halves of the
    # feed-forward.
    results = 3 * model.dim + 2 * model.n_kv_heads * model.head_dim + 2 * model.hidden_dim
    saved = 0.5 if by_operator and option == "op/2" else 1.0  # share of products
    per_token = recomputed * model.dim + (1 - recomputed) * (saved * results + inputs)
    return _Sizes(
        tokens=tokens,
        vocabulary=model.vocab_size * model.dim / tp,
        block=(attention + feed_forward) / tp,
        recomputed=recomputed,
        kept_bytes=computed * tokens / tp * per_token,
    )


@dataclass(frozen=True)
class _BlockSeconds:
    """Seconds of a block, for a microbatch."""

    forward: float
    backward: float
    gather: float  # of its weights
    reduce: float  # of its gradients


def _block_seconds(layout: PlannedLayout, machine: Machine, sizes: _Sizes) -> _BlockSeconds:
    config = layout.config
    tp = layout.degrees["tp"]
    computed, summed = itemsizes(config.training)
    peak = machine.flops(getattr(torch, config.training.mixed_precision_param))
    peak_of_products = machine.flops(torch.float8_e4m3fn) if config.float8.enable else peak
    products = 2 * sizes.block * sizes.tokens / (peak_of_products * machine.matmul_efficiency)
    attended = layout.seq_len / 2  # tokens that a token attends to, on average
    attention_flops = 4 * sizes.tokens * attended * layout.model.dim / tp
    attention = attention_flops / (peak * machine.attention_efficiency)
    forward = products + attention
    backward = 2 * products + 2.5 * attention + sizes.recomputed * forward
    tp_ranks = range(tp)  # neighbours
    hidden_bytes = computed * sizes.tokens * layout.model.dim
    exchange = 2 * (
        machine.collective("all_gather", hidden_bytes, tp_ranks)
        + machine.collective("reduce_scatter", hidden_bytes, tp_ranks)
    )
    fsdp_ranks = range(0, layout.fsdp_degree * tp, tp)  # inside a pipeline rank
    gather = machine.collective("all_gather", computed * sizes.block, fsdp_ranks)
    reduce = machine.collective("reduce_scatter", summed * sizes.block, fsdp_ranks)
    if not layout.gathers_once:  # overlapped with computation
        forward = max(forward, gather)
        backward = max(backward, gather + reduce)
    return _BlockSeconds(
        forward + exchange, backward + exchange * (1 + sizes.recomputed), gather, reduce
    )


def estimate(layout: PlannedLayout, machine: Machine) -> tuple[float, float]:
    """Return the approximate seconds of a step, and a lower bound of a rank's bytes."""
    model = layout.model
    config = layout.config
    pp = layout.degrees["pp"]
    microbatches = layout.pipeline.microbatches
    computed, summed = itemsizes(config.training)
    sizes = _sizes(layout)
    of_block = _block_seconds(layout, machine, sizes)
    peak = machine.flops(getattr(torch, config.training.mixed_precision_param))
    slowest = 0.0  # seconds of a microbatch
    most_elements = 0.0
    most_bytes = 0.0
    for rank in range(pp):
        modules = [
            name
            for stage in layout.pipeline.stages_of(rank)
            for name in layout.pipeline.modules[stage]
        ]
        has_output = "output" in modules
        blocks = blocks_in(modules)
        tables = ("tok_embeddings" in modules) + (has_output and not model.tied_embeddings)
        elements = blocks * sizes.block + sizes.vocabulary * tables
        seconds = blocks * (of_block.forward + of_block.backward)
        if has_output:
            seconds += 6 * sizes.vocabulary * sizes.tokens / (peak * machine.matmul_efficiency)
        slowest = max(slowest, seconds)
        most_elements = max(most_elements, elements)
        kept = STORED_BYTES * elements / layout.fsdp_degree  # of weights, and of gradients
        in_matrices = blocks * sizes.block / layout.fsdp_degree
        moments = moment_bytes(config.optimizer, elements / layout.fsdp_degree, in_matrices)
        state = kept + sum(moments)
        state += (computed + summed) * elements if layout.gathers_once else kept
        activations = min(pp - rank, microbatches) * blocks * sizes.kept_bytes
        if has_output:  # logits, of as many tokens as the loss has at a time
            tokens = layout.loss_chunk or sizes.tokens
            activations += computed * tokens * model.vocab_size / layout.degrees["tp"]
        most_bytes = max(most_bytes, state + activations)
    stages_of_rank = len(layout.pipeline.modules) / pp
    step = layout.accumulation * slowest * (microbatches + (pp - 1) / stages_of_rank)
    if layout.gathers_once:
        step += most_elements / sizes.block * (of_block.gather + of_block.reduce)
    beside = owner_bytes(config, layout) + 2 * compression_error_bytes(config, layout)
    return step, most_bytes + beside + outside_of_tensors(layout)


def why_lost(plan: Plan, best: Plan) -> str:
    """Return why a plan is not the best one: its excess of memory, or the largest additional wait
    for the same tokens.
    """
    if not plan.fits:
        excess = (plan.memory.total - plan.capacity) / GIB
        return f"{excess:.1f} GiB too many, mostly {plan.memory.largest_part}"
    own = plan.nominal
    other = best.nominal
    slower = own.seconds * best.layout.tokens / plan.layout.tokens / other.seconds - 1
    longer = {part: seconds - other.parts.get(part, 0.0) for part, seconds in own.parts.items()}
    longest = max(longer, key=lambda part: longer[part])
    return f"{100 * slower:.1f}% slower: {part_name(longest)} {longer[longest]:+.2g} s per step"
