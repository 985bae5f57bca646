"""Search for the fastest layout on a number of ranks: estimate all layouts by formula, and plan the
best of them.

    changes = space(config, world_size, machine, sequences)        # [{"parallelism.tensor_parallel_degree": "8", ...}, ...]
    guess(layout, machine)                                         # rough seconds and bytes, in a millisecond
    why_lost(plan, best)                                           # "12% slower: waiting for tensor parallelism +0.31 s per step"

The formulas only choose what is planned; their figures are not shown. Their bytes are a lower bound
(states, and what is kept for backward, without temporary memory), so no layout that fits is
excluded.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence

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
from titan_lite.tools.plan.summary import Plan, name_of
from titan_lite.tools.plan.trace import PlannedLayout, layers_of

LONG = 32768  # tokens; shorter sequences are not split


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
    sequences = config.training.global_batch_size
    if sequences == -1:
        try:
            sequences = lay_out({}).sequences_per_step
        except ConfigError as error:
            raise ConfigError(
                f"--search needs the tokens of a step; use --training.global_batch_size=N: {error}"
            ) from error
    found: list[tuple[float, Change]] = []
    refused = large = 0
    tried = list(space(config, world_size, machine, sequences))
    for change in tqdm(tried, desc="estimated by formula", leave=False, mininterval=1):
        try:
            seconds, nbytes = guess(lay_out(change), machine)
        except ConfigError:
            refused += 1
            continue
        if nbytes <= machine.memory * GIB:
            found.append((seconds, change))
        else:
            large += 1
    found.sort(key=lambda each: each[0])
    lines = [
        (
            f"{len(tried):,} layouts of {world_size} ranks with {sequences:,} sequences per step:"
            f" {refused:,} cannot run, {large:,} cannot fit (parameters, optimizer and kept"
            f" activations alone); of {len(found):,} the {min(count, len(found))} fastest by"
            " formula are planned, then the best one of them with other buckets"
        ),
        "",
    ]
    rows: list[Row] = []
    try:
        rows = plan_changes(lay_out, [change for _, change in found[:count]], machine, full, label)
        if fit := fitting(rows):
            change, best = fit[0]
            rows = ranked(
                [
                    *rows,
                    *plan_changes(
                        lay_out, other_buckets(change, best.layout), machine, full, label
                    ),
                ]
            )
    except Stopped as stopped:
        stopped = Stopped(ranked([*rows, *stopped.rows]), len(rows) + stopped.wanted)
        stopped.said = [
            *lines,
            f"PARTIAL: {stopped}",
            *table(stopped.rows, label),
            *outcome(config, stopped.rows),
        ]
        raise stopped from None
    return [*lines, *table(rows, label), *outcome(config, rows)]


def outcome(config: Config, rows: Sequence[Row]) -> list[str]:
    """Return the lines below a table: why the others are slower, and the keys of the best."""
    if not rows:
        return ["", "none was planned yet"]
    if not (fit := fitting(rows)):
        return ["", "no layout fits; use more ranks, fewer sequences per step, or shorter ones"]
    (change, best), *_ = fit
    lost = [
        f"  {why_lost(plan, best)}: {label(its)}"
        for its, plan in rows
        if isinstance(plan, Plan) and plan is not best
    ]
    keys = " ".join(option(key, value) for key, value in differing(config, change).items())
    return ["", "why the others lost", *lost, "", f"best: {keys}"]


def lighter(plan: Plan, lay_out: Callable[[Change], PlannedLayout]) -> list[Change]:
    """Return the least activation checkpointing that should fit, if less than the plan's.

    Formulas scale the planned memory.
    """
    mode = plan.layout.config.activation_checkpoint.mode
    lower_bound = guess(plan.layout, plan.machine)[1]
    for less in CHECKPOINTING[: CHECKPOINTING.index(mode)] if mode in CHECKPOINTING else ():
        change = {"activation_checkpoint.mode": less}
        if (
            plan.memory.total * guess(lay_out(change), plan.machine)[1] / lower_bound
            <= plan.capacity
        ):
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
    flavor, compression = shape_of(config.model), config.parallelism.replicate_compression
    contexts = {1, config.parallelism.context_parallel_degree}
    if config.training.seq_len >= LONG:
        contexts |= {2, 4, 8, 16}
    pipelines = [1] if flavor.tied_embeddings else powers_of_two(flavor.n_layers)
    for tp, pp, cp in itertools.product(
        powers_of_two(machine.ranks_per_node), pipelines, sorted(contexts)
    ):
        dp, rest = divmod(world_size, tp * pp * cp)
        if rest or not dp:
            continue
        inside = min(dp, max(1, machine.ranks_per_node // (tp * cp)))
        for shard in {dp, inside}:
            rows, rest = divmod(sequences, dp)
            if rest or not rows or dp % shard:
                continue
            degrees = {"tp": tp, "pp": pp, "cp": cp, "dp_shard": shard, "dp_replicate": dp // shard}
            for batch, mode in itertools.product(_local_batches(rows, pp), CHECKPOINTING):
                several = batch < rows or pp > 1
                schedules = (
                    ("1F1B", "Interleaved1F1B")
                    if pp > 1
                    else (config.parallelism.pipeline_parallel_schedule,)
                )
                for schedule, when in itertools.product(
                    schedules, ("step", "microbatch") if several else ("step",)
                ):
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
                        "parallelism.replicate_compression": compression if shard < dp else "none",
                    }


def label(change: Change) -> str:
    """Describe a layout of `space` in a few words."""
    degrees = {axis: int(change[f"parallelism.{key}"]) for axis, key in DEGREES.items()}
    words = [
        " x ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1)
        or "one rank"
    ]
    words += [
        f"batch {change['training.local_batch_size']}",
        f"checkpointing {change['activation_checkpoint.mode']}",
    ]
    words += [change["parallelism.pipeline_parallel_schedule"]] if degrees["pp"] > 1 else []
    return ", ".join(
        [
            *words,
            f"FSDP once per {change['parallelism.fsdp_communication']}",
            f"{change['compile.bucketing']} buckets",
        ]
    )


def differing(config: Config, change: Change) -> Change:
    """Return the keys of a change that differ from the recipe."""
    own = flatten(config)
    return {key: value for key, value in change.items() if str(own[key]) != value}


def _local_batches(rows: int, pp: int) -> list[int]:
    """Return local batch sizes for `rows` sequences per rank and step: small ones, and with a
    pipeline those that fill it.
    """
    if pp == 1:
        return [batch for batch in powers_of_two(min(rows, 8)) if rows % batch == 0]
    return [rows // part for part in (1, 2, 4) if rows % part == 0 and rows // part >= pp]


def guess(layout: PlannedLayout, machine: Machine) -> tuple[float, float]:
    """Return the approximate seconds of a step, and a lower bound of a rank's bytes."""
    model, degrees, config = layout.model, layout.degrees, layout.config
    tp, pp, m = degrees["tp"], degrees["pp"], layout.pipeline.microbatches
    computed, summed = itemsizes(config.training)
    tokens = layout.microbatch_size * layout.seq_len // degrees["cp"]
    table = model.vocab_size * model.dim / tp
    block = (
        2 * model.dim * model.head_dim * (model.n_heads + model.n_kv_heads)
        + 3 * model.dim * model.hidden_dim
    ) / tp
    mode, option = (
        config.activation_checkpoint.mode,
        config.activation_checkpoint.selective_ac_option,
    )
    by_operator = mode == "selective" and option in ("op", "op/2")
    # fraction of blocks that run twice
    again = (
        1.0
        if mode == "full"
        else 1 / int(option)
        if mode == "selective" and not by_operator
        else 0.0
    )
    # Inputs of products, which selective checkpointing recomputes: the results of two norms and of
    # the feed-forward.
    inputs = 0.0 if by_operator else 2 * model.dim + model.hidden_dim
    # At least queries, keys, values, attention's result and its product, and both halves of the
    # feed-forward.
    every = 0.5 if by_operator and option == "op/2" else 1.0
    of_block = every * (
        3 * model.dim + 2 * model.n_kv_heads * model.head_dim + 2 * model.hidden_dim
    )
    keeps = computed * tokens / tp * (again * model.dim + (1 - again) * (of_block + inputs))
    shards = degrees["dp_shard"] * degrees["cp"]
    once = layout.gathers_once

    peak = machine.flops(getattr(torch, config.training.mixed_precision_param))
    peak_of_products = machine.flops(torch.float8_e4m3fn) if config.float8.enable else peak
    products = 2 * block * tokens / (peak_of_products * machine.matmul_efficiency)
    seen = layout.seq_len / 2  # tokens that a token attends to, on average
    attention = 4 * tokens * seen * model.dim / tp / (peak * machine.attention_efficiency)
    forward = products + attention
    backward = 2 * products + 2.5 * attention + again * forward
    group = range(tp)  # tensor parallelism: neighbouring ranks
    hidden = computed * tokens * model.dim
    exchange = 2 * (
        machine.collective("all_gather", hidden, group)
        + machine.collective("reduce_scatter", hidden, group)
    )
    around = range(0, shards * tp, tp)  # FSDP, inside a pipeline rank
    gather = machine.collective("all_gather", computed * block, around)
    reduce = machine.collective("reduce_scatter", summed * block, around)
    if not once:  # overlapped with computation
        forward, backward = max(forward, gather), max(backward, gather + reduce)
    forward, backward = forward + exchange, backward + exchange * (1 + again)

    slowest = largest = most = 0.0
    for rank in range(pp):
        mine = layout.pipeline.stages_of(rank)
        blocks = sum(layers_of(layout.pipeline.modules[stage]) for stage in mine)
        names = {name for stage in mine for name in layout.pipeline.modules[stage]}
        numbers = blocks * block + table * (
            ("tok_embeddings" in names) + ("output" in names and not model.tied_embeddings)
        )
        seconds = blocks * (forward + backward)
        if "output" in names:
            seconds += 6 * table * tokens / (peak * machine.matmul_efficiency)
        slowest, largest = max(slowest, seconds), max(largest, numbers)
        kept = STORED_BYTES * numbers / shards  # of weights, and of gradients
        state = kept + sum(
            moment_bytes(config.optimizer, numbers / shards, blocks * block / shards)
        )
        state += (computed + summed) * numbers if once else kept
        logits = computed * tokens * model.vocab_size / tp if "output" in names else 0.0
        most = max(most, state + min(pp - rank, m) * blocks * keeps + logits)
    stages_a_rank = len(layout.pipeline.modules) / pp
    step = layout.accumulation * slowest * (m + (pp - 1) / stages_a_rank)
    if once:
        step += largest / block * (gather + reduce)
    return step, most + owner_bytes(config, layout) + 2 * compression_error_bytes(
        config, layout
    ) + outside_of_tensors(layout)


def why_lost(plan: Plan, best: Plan) -> str:
    """Return why a plan is not the best one: its excess of memory, or the largest additional wait
    for the same tokens.
    """
    if not plan.fits:
        largest = max(plan.memory.rows, key=lambda row: plan.memory.rows[row])
        return f"{(plan.memory.total - plan.capacity) / GIB:.1f} GiB too many, mostly {largest}"
    mine, theirs = plan.steps[0], best.steps[0]
    slower = mine.seconds * best.layout.tokens / plan.layout.tokens / theirs.seconds - 1
    longer = {part: seconds - theirs.parts.get(part, 0.0) for part, seconds in mine.parts.items()}
    part = max(longer, key=lambda part: longer[part])
    return f"{100 * slower:.1f}% slower: {name_of(part)} {longer[part]:+.2g} s per step"
