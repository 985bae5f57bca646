"""Search for the fastest layout that fits on a number of ranks: estimate all layouts by formula,
and plan the fastest of them until enough fit.

    changes = space(config, world_size, machine, sequences)     # [{"section.key": "8", ...}, ...]
    search = Search(lay_out, machine)
    search.run(changes, count=12)
    search.lines(config)
    step_seconds(layout, machine)   # rough, in a millisecond
    least_bytes(layout)             # a lower bound
    why_lost(plan, best)            # "12% slower: waiting for tensor parallelism +0.31 s per step"

The formulas only choose what is planned; their results are not shown. Their bytes are at most those
of a plan, so no layout that fits is excluded by them. Later is planned what would not fit with as
much more as plans of its kind need at least. What is in flight in a pipeline takes seconds to find
out, so only the fastest layouts are asked for it.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from tqdm import tqdm

from titan_lite.config import Config, ConfigError, Parallelism, flatten
from titan_lite.config.load import option
from titan_lite.config.schedules import SCHEDULES
from titan_lite.cost.machine import GIB, Machine
from titan_lite.distributed.layout import DEGREES
from titan_lite.distributed.pipeline_schedule import (
    PipelineSchedule,
    computations,
    order_of,
    runs_halves,
)
from titan_lite.feature import KeptNumbers, features_of, low_precision
from titan_lite.models.shapes import block_weights, shape_of
from titan_lite.tools.plan.changes import Change, Row, Words, fitting, plan_changes, ranked, table
from titan_lite.tools.plan.memory import outside_of_tensors
from titan_lite.tools.plan.plan import Plan
from titan_lite.tools.plan.rank_bytes import (
    STORED_BYTES,
    itemsizes,
    kept_by_features,
    kept_bytes_of_block,
    moment_bytes,
    owner_bytes,
    recomputed_share,
)
from titan_lite.tools.plan.simulate import table_seconds
from titan_lite.tools.plan.summary import describe_degrees, part_name, what_binds
from titan_lite.tools.plan.trace import PROCESSES, PlannedLayout, blocks_in

MODE = "activation_checkpoint.mode"
OPTION = "activation_checkpoint.selective_ac_option"
# From the most memory and the least recomputation to the opposite.
CHECKPOINTING: tuple[Change, ...] = (
    {MODE: "none"},
    {MODE: "selective", OPTION: "op"},
    {MODE: "selective", OPTION: "op/2"},
    {MODE: "full"},
)
# Ranks of a pipeline: the order of a longer one takes seconds to find out. A recipe's own is tried.
MOST_PIPELINE_RANKS = 16
MOST_PLANS = 16  # for each that is asked for
MOST_UNLIKELY = 4  # plans of layouts that are not expected to fit, where none fits so far
LONG_SEQUENCE = 32768  # tokens; shorter sequences are not split over ranks


@dataclass(eq=False)
class Candidate:
    """A layout that may fit, by formula."""

    change: Change
    layout: PlannedLayout
    seconds: float  # of a step
    plan: Plan | None = None  # once there is one

    @functools.cached_property
    def nbytes(self) -> float:
        """The bytes of a rank, a lower bound. Of many microbatches it takes a second."""
        return least_bytes(self.layout)


@dataclass
class Search:
    """A search: its layouts, and what has been planned of them."""

    lay_out: Callable[[Change], PlannedLayout]
    machine: Machine
    full: bool = False
    layouts: int = 0
    refused: int = 0  # cannot run
    too_large: int = 0  # by the lower bound
    waiting: list[Candidate] = field(default_factory=list)  # the fastest first
    planned: list[Candidate] = field(default_factory=list)
    unlikely: int = 0  # of them, those that were not expected to fit
    rows: list[Row] = field(default_factory=list)

    def run(self, changes: Sequence[Change], count: int) -> None:
        """Plan the fastest of the layouts of `space` until `count` fit with room, or MOST_PLANS for
        each of them are planned.
        """
        self.estimate_all(changes)
        while (missing := count - len(with_room(self.rows))) > 0:
            chosen = self.next_candidates(max(missing, PROCESSES))
            if not chosen or len(self.planned) >= MOST_PLANS * count:
                return
            self.plan(chosen)

    def estimate_all(self, changes: Sequence[Change]) -> None:
        """Estimate layouts by formula, and drop those that cannot run, or hold their state."""
        self.layouts = len(changes)
        for change in tqdm(changes, desc="estimated by formula", leave=False, mininterval=1):
            try:
                layout = self.lay_out(change)
                seconds = step_seconds(layout, self.machine)
            except ConfigError:
                self.refused += 1
                continue
            if least_bytes(layout, in_flight=False) > self.capacity:
                self.too_large += 1
            else:
                self.waiting.append(Candidate(change, layout, seconds))
        self.waiting.sort(key=lambda candidate: candidate.seconds)

    def next_candidates(self, count: int) -> list[Candidate]:
        """Return the fastest layouts that are expected to fit.

        If none fits of the first few, the smallest of the others is looked at as well.
        """
        needs = self.least_needs()

        def expected(candidate: Candidate) -> float:
            return candidate.nbytes * needs.get(kind_of(candidate.layout), 1.0)

        chosen: list[Candidate] = []
        others: list[Candidate] = []
        for candidate in list(self.waiting):
            if candidate.nbytes > self.capacity:
                self.too_large += 1
                self.waiting.remove(candidate)
            elif expected(candidate) > self.capacity:
                others.append(candidate)
            else:
                chosen.append(candidate)
            if len(chosen) == count:
                break
        is_late = not chosen or len(self.planned) >= 2 * PROCESSES
        if is_late and others and not fitting(self.rows) and self.unlikely < MOST_UNLIKELY:
            chosen.append(min(others, key=expected))
            self.unlikely += 1
        return chosen

    def least_needs(self) -> dict[tuple[object, ...], float]:
        """Return by how many times planned layouts exceed their lower bounds at least, by kind."""
        needs: dict[tuple[object, ...], float] = {}
        for candidate in self.planned:
            if candidate.plan is not None:
                kind = kind_of(candidate.layout)
                times = candidate.plan.memory.total / candidate.nbytes
                needs[kind] = min(times, needs.get(kind, math.inf))
        return needs

    def plan(self, chosen: Sequence[Candidate]) -> None:
        changes = [candidate.change for candidate in chosen]
        rows = plan_changes(self.lay_out, changes, self.machine, self.full, words_of)
        for candidate, row in zip(chosen, rows, strict=True):
            _, plan = row
            candidate.plan = plan if isinstance(plan, Plan) else None
            self.waiting.remove(candidate)
            self.planned.append(candidate)
            self.rows = ranked([*self.rows, row])

    @property
    def capacity(self) -> float:
        """Bytes of a device."""
        return self.machine.memory * GIB

    def lines(self, config: Config) -> list[str]:
        """Return what was looked at, a ranked table, and why others are slower."""
        return [
            f"{self.layouts:,} layouts: {self.refused:,} cannot run, {self.too_large:,} cannot fit,"
            f" {len(self.planned):,} planned, {len(self.waiting):,} not (slower or too large, by"
            " formula)",
            "",
            *table(self.rows, words_of, functools.partial(reason, fitting(self.rows))),
            *outcome(config, self.rows, len(self.waiting)),
        ]


def kind_of(layout: PlannedLayout) -> tuple[object, ...]:
    """Return what layouts have in common whose plans exceed their lower bounds about alike."""
    checkpointing = layout.config.activation_checkpoint
    return (
        checkpointing.mode,
        checkpointing.selective_ac_option,
        layout.gathers_once,
        layout.degrees["tp"],
        layout.expert_parallel,
        layout.degrees["pp"] > 1,
        layout.config.parallelism.pipeline_parallel_schedule,
    )


def with_room(rows: Sequence[Row]) -> list[Plan]:
    """Return the plans that fit, and are not tight."""
    return [plan for _, plan in fitting(rows) if not plan.is_tight]


def outcome(config: Config, rows: Sequence[Row], not_planned: int = 0) -> list[str]:
    """Return the lines below a table: published runs like the best plan, and its keys.

    not_planned: layouts that may fit by formula and were not planned.
    """
    fit = fitting(rows)
    if not fit:
        none = f"none of the {len(rows):,} planned fits" if not_planned else "no layout fits"
        return ["", none]
    best_change, best = fit[0]
    keys = " ".join(option(*each) for each in differing(config, best_change).items())
    evidence = best.evidence.in_words()
    if not best.evidence.is_known:
        evidence = f"speeds are a guess: {evidence}"
    return ["", evidence, f"best: {keys}"]


def powers_of_two(most: int) -> list[int]:
    return [2**exponent for exponent in range(most.bit_length())]


def space(config: Config, world_size: int, machine: Machine, sequences: int) -> Iterator[Change]:
    """Yield combinations of degrees, local batch size, checkpointing, schedule and
    fsdp_communication at `sequences` per step, with tensor and expert parallelism inside a node.
    Some are refused when they are laid out. What would have no effect is turned off.
    """
    features = features_of(config)
    for degrees in degrees_on(config, world_size, machine, sequences):
        of_rank = sequences // (degrees["dp_replicate"] * degrees["dp_shard"])
        has_pipeline = degrees["pp"] > 1
        schedules: list[str] = [config.parallelism.pipeline_parallel_schedule]
        if has_pipeline:
            halved = sorted(name for name in SCHEDULES if SCHEDULES[name].splits_backward)
            schedules = ["1F1B", "Interleaved1F1B", *halved]
        for batch, checkpointing, experts in itertools.product(
            _local_batches(of_rank, degrees["pp"]),
            CHECKPOINTING,
            expert_degrees(config, machine, world_size // degrees["pp"]),
        ):
            has_microbatches = batch < of_rank or has_pipeline
            communication = ("step", "microbatch") if has_microbatches else ("step",)
            for schedule, when in itertools.product(schedules, communication):
                change = {
                    **{
                        f"parallelism.{DEGREES[axis]}": str(degree)
                        for axis, degree in degrees.items()
                    },
                    "training.local_batch_size": str(batch),
                    "training.global_batch_size": str(sequences),
                    **checkpointing,
                    **experts,
                    "parallelism.pipeline_parallel_schedule": schedule,
                    "parallelism.fsdp_communication": when,
                    "compile.bucketing": config.compile.bucketing,
                }
                for feature in features:
                    change |= feature.turned_off_by(change)
                yield change


def expert_degrees(config: Config, machine: Machine, ranks: int) -> list[Change]:
    """Return the degrees of expert parallelism for so many ranks of a pipeline stage: none, or
    those inside a node.
    """
    if not shape_of(config.model).n_experts:
        return [{}]
    return [
        {"parallelism.expert_parallel_degree": str(degree)}
        for degree in powers_of_two(machine.ranks_per_node)
        if ranks % degree == 0
    ]


def degrees_on(
    config: Config, world_size: int, machine: Machine, sequences: int
) -> Iterator[dict[str, int]]:
    """Yield the degrees of parallelism that multiply to the world size and divide the sequences.

    FSDP is over all data-parallel ranks, or over those of a node.
    """
    shape = shape_of(config.model)
    contexts = {1, config.parallelism.context_parallel_degree}
    longest = max(MOST_PIPELINE_RANKS, config.parallelism.pipeline_parallel_degree)
    pipelines = powers_of_two(min(shape.n_layers, longest))
    if config.training.seq_len >= LONG_SEQUENCE:
        contexts |= {2, 4, 8, 16}
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


def words_of(change: Change) -> Words:
    """Describe a layout of `space` by subject."""
    degrees = {axis: int(change[f"parallelism.{key}"]) for axis, key in DEGREES.items()}
    checkpointing = " ".join(change[key] for key in (MODE, OPTION) if key in change)
    words = {
        "degrees": describe_degrees(degrees),
        "batch": f"batch {change['training.local_batch_size']}",
        "checkpointing": f"checkpointing {checkpointing}",
    }
    if int(change.get("parallelism.expert_parallel_degree", "1")) > 1:
        words["experts"] = f"experts over {change['parallelism.expert_parallel_degree']}"
    if degrees["pp"] > 1:
        words["schedule"] = change["parallelism.pipeline_parallel_schedule"]
    words["communication"] = f"FSDP once per {change['parallelism.fsdp_communication']}"
    words["buckets"] = f"{change['compile.bucketing']} buckets"
    return words


def differing(config: Config, change: Change) -> Change:
    """Return the keys of a change that differ from the recipe."""
    own = {
        key: str(value).lower() if isinstance(value, bool) else str(value)  # as in an option
        for key, value in flatten(config).items()
    }
    return {key: value for key, value in change.items() if own[key] != value}


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
    block: float  # elements of a block's matrices, when they are gathered
    multiplied: float  # of them, those that a token is multiplied by
    sharded: float  # elements of a block's matrices that a rank has
    recomputed: float  # share of blocks that run twice
    # Of a block's microbatch, lower bounds. Activations, from forward to backward:
    kept_bytes: float
    # What the half of backward for weights needs, from the other half on:
    between_bytes: float
    hidden_bytes: float  # that a stage receives of a microbatch


def _sizes(layout: PlannedLayout) -> _Sizes:
    model = layout.model
    tp = layout.degrees["tp"]
    computed, _ = itemsizes(layout.config.training)
    tokens = layout.tokens_per_microbatch
    hidden_dim = model.hidden_dim * max(1, model.experts_per_token)  # units of a token
    # Inputs of matmuls, where those of the same input count once, and the gradients of results.
    factors = 3 * model.dim + hidden_dim
    gradients = 3 * model.dim + 2 * model.n_kv_heads * model.head_dim + 2 * hidden_dim
    low = low_precision(layout.config)
    itemsize = getattr(torch, low.dtype).itemsize if low else computed
    weights = block_weights(model)
    return _Sizes(
        tokens=tokens,
        vocabulary=model.vocab_size * model.dim / tp,
        block=weights.dense / tp + weights.experts / layout.expert_parallel,
        multiplied=(weights.dense + weights.active_experts) / tp,
        sharded=(weights.dense + weights.experts) / layout.expert_ranks,
        recomputed=recomputed_share(layout.config.activation_checkpoint),
        kept_bytes=kept_bytes_of_block(layout.config, layout),
        between_bytes=itemsize * tokens / tp * (factors + gradients),
        hidden_bytes=computed * tokens / tp * model.dim,
    )


@dataclass(frozen=True)
class _BlockSeconds:
    """Seconds of a block, for a microbatch."""

    forward: float
    backward: float
    weights: float  # the part of backward that computes their gradients
    gather: float  # of its weights
    reduce: float  # of its gradients


def _block_seconds(layout: PlannedLayout, machine: Machine, sizes: _Sizes) -> _BlockSeconds:
    config = layout.config
    tp = layout.degrees["tp"]
    computed, summed = itemsizes(config.training)
    peak = machine.flops(getattr(torch, config.training.mixed_precision_param))
    low = low_precision(config)
    peak_of_matmuls = machine.flops(getattr(torch, low.dtype)) if low else peak
    matmuls = 2 * sizes.multiplied * sizes.tokens / (peak_of_matmuls * machine.matmul_efficiency)
    attended = layout.seq_len / 2  # tokens that a token attends to, on average
    heads = layout.model.n_heads * layout.model.head_dim
    attention_flops = 4 * sizes.tokens * attended * heads / tp
    attention = attention_flops / (peak * machine.attention_efficiency)
    forward = matmuls + attention
    backward = 2 * matmuls + 2.5 * attention + sizes.recomputed * forward
    hidden_bytes = computed * sizes.tokens * layout.model.dim

    def exchange_seconds(nbytes: float, ranks: int) -> float:
        """Return the seconds to gather tokens of neighbours, and to sum and scatter results."""
        return machine.collective("all_gather", nbytes, range(ranks)) + machine.collective(
            "reduce_scatter", nbytes, range(ranks)
        )

    exchange = 2 * exchange_seconds(hidden_bytes, tp)
    if layout.expert_parallel > 1:
        of_ranks = layout.expert_parallel * hidden_bytes / tp
        exchange += exchange_seconds(of_ranks, layout.expert_parallel)
    fsdp_ranks = range(0, layout.fsdp_degree * tp, tp)  # inside a pipeline rank
    gather = machine.collective("all_gather", computed * sizes.block, fsdp_ranks)
    reduce = machine.collective("reduce_scatter", summed * sizes.block, fsdp_ranks)
    if not layout.gathers_once:  # overlapped with computation
        forward = max(forward, gather)
        backward = max(backward, gather + reduce)
    return _BlockSeconds(
        forward=forward + exchange,
        backward=backward + exchange * (1 + sizes.recomputed),
        weights=matmuls,
        gather=gather,
        reduce=reduce,
    )


def least_bytes(layout: PlannedLayout, *, in_flight: bool = True) -> float:
    """Return a lower bound of a rank's bytes. in_flight: with the activations of microbatches."""
    sizes = _sizes(layout)
    kept = kept_by_features(layout.config, layout)
    nbytes = max(
        _least_bytes(layout, sizes, rank, stages, kept, in_flight)
        for rank, stages in enumerate(_parts_of_ranks(layout, sizes))
    )
    return nbytes + owner_bytes(layout.config, layout) + outside_of_tensors(layout)


class _Part(NamedTuple):
    """The part of the model in a pipeline stage, or in all stages of a rank."""

    blocks: int
    outputs: int  # 1 if it has the output
    elements: float  # of matrices, embedding and output, when they are gathered
    sharded: float  # of them, those that a rank has
    copied: float  # of these, those that the optimizer does not update: a copy of a tied table


def _parts_of_ranks(layout: PlannedLayout, sizes: _Sizes) -> list[list[_Part]]:
    """Return the part in each stage of each pipeline rank."""
    modules = layout.pipeline.modules
    return [
        [_part_of_stage(layout, sizes, modules[stage]) for stage in layout.pipeline.stages_of(rank)]
        for rank in range(layout.degrees["pp"])
    ]


def _together(stages: Sequence[_Part]) -> _Part:
    return _Part(*map(sum, zip(*stages, strict=True)))


def _part_of_stage(layout: PlannedLayout, sizes: _Sizes, modules: Sequence[str]) -> _Part:
    has_output = "output" in modules
    has_embedding = "tok_embeddings" in modules
    is_one = layout.model.tied_embeddings and not layout.copies_table
    tables = 1 if is_one else has_embedding + has_output
    blocks = blocks_in(modules)
    table_shard = sizes.vocabulary / layout.fsdp_degree
    return _Part(
        blocks,
        int(has_output),
        elements=blocks * sizes.block + tables * sizes.vocabulary,
        sharded=blocks * sizes.sharded + tables * table_shard,
        copied=table_shard if has_output and layout.copies_table else 0.0,
    )


def step_seconds(layout: PlannedLayout, machine: Machine) -> float:
    """Return the approximate seconds of a step."""
    sizes = _sizes(layout)
    parts = [_together(stages) for stages in _parts_of_ranks(layout, sizes)]
    of_block = _block_seconds(layout, machine, sizes)
    peak = machine.flops(getattr(torch, layout.config.training.mixed_precision_param))
    of_output = 6 * sizes.vocabulary * sizes.tokens / (peak * machine.matmul_efficiency)
    slowest = max(
        part.blocks * (of_block.forward + of_block.backward) + part.outputs * of_output
        for part in parts
    )
    pp = layout.degrees["pp"]
    stages_of_rank = len(layout.pipeline.modules) / pp
    waits = (pp - 1) / stages_of_rank  # in turns of a microbatch
    if runs_halves(layout.config.parallelism):  # gradients of weights fill them
        both = of_block.forward + of_block.backward
        waits *= 1 - 2 * of_block.weights / both
    in_turn = layout.pipeline.microbatches + waits
    seconds = layout.accumulation * slowest * in_turn
    exchanged = 1.0  # blocks whose weights and gradients nothing hides
    times = layout.microbatches
    if layout.gathers_once:
        exchanged = max(part.elements for part in parts) / sizes.block
        times = 1
    seconds += times * exchanged * (of_block.gather + of_block.reduce)
    _, summed = itemsizes(layout.config.training)
    added = 3 * summed * max(part.sharded for part in parts)  # bytes to add a gradient to the sum
    seconds += (times - 1) * machine.memory_traffic(added)
    return seconds + table_seconds(layout, machine)


def _least_bytes(
    layout: PlannedLayout,
    sizes: _Sizes,
    rank: int,
    stages: Sequence[_Part],
    kept: KeptNumbers,
    in_flight: bool,
) -> float:
    """Return a lower bound of a pipeline rank's bytes in tensors, without complete matrices of the
    optimizer: the most of two moments of a step.

    stages: the parts in the rank's stages. kept: by features. in_flight: with the activations of
    microbatches.
    """
    config = layout.config
    _, summed = itemsizes(config.training)
    part = _together(stages)
    own = part.sharded
    updated = own - part.copied
    in_blocks = part.blocks * sizes.sharded
    state = STORED_BYTES * (own + kept.always)
    state += moment_bytes(config.optimizer, updated, in_blocks)
    state += _received_bytes(layout, sizes, rank)
    before_update = summed * updated + STORED_BYTES * kept.before_update
    if not in_flight:
        return state + before_update
    parallelism = Parallelism(
        pipeline_parallel_degree=layout.degrees["pp"],
        pipeline_parallel_schedule=config.parallelism.pipeline_parallel_schedule,
    )
    pipeline = layout.pipeline
    by_rank = in_flight_by_rank(parallelism, pipeline.rank_of, pipeline.microbatches)
    in_microbatches = max(
        sum(
            _bytes_in_flight(layout, sizes, stage, counts)
            for stage, counts in zip(stages, moment, strict=True)
        )
        for moment in by_rank[rank]
    )
    if layout.gathers_once:
        in_microbatches += _gathered_bytes(layout, part)

    return state + max(in_microbatches, before_update)


class InFlight(NamedTuple):
    """The microbatches of a stage at a moment of a step."""

    forward: int = 0  # those that wait for their backward
    halves: int = 0  # those that wait for the second half of it
    has_gradients: bool = False  # those of weights


@functools.cache
def in_flight_by_rank(
    parallelism: Parallelism, rank_of: tuple[int, ...], microbatches: int
) -> list[set[tuple[InFlight, ...]]]:
    """Return the moments of a step, by rank: a value for each of its stages.

    Moments before a forward are left out, since more is in flight after it. rank_of, microbatches:
    as in PipelineSchedule.
    """
    pipeline = PipelineSchedule(((),) * len(rank_of), rank_of, microbatches)
    found = []
    for rank, actions in sorted(order_of(parallelism, pipeline).items()):
        now = {stage: InFlight() for stage in pipeline.stages_of(rank)}
        moments: set[tuple[InFlight, ...]] = set()
        for kind, stage, _ in computations(actions):
            before = now[stage]
            if kind != "F":
                moments.add(tuple(now.values()))
            if kind == "F":
                now[stage] = before._replace(forward=before.forward + 1)
            elif kind == "B":
                now[stage] = before._replace(forward=before.forward - 1, has_gradients=True)
            elif kind == "I":
                now[stage] = before._replace(forward=before.forward - 1, halves=before.halves + 1)
            else:
                now[stage] = before._replace(halves=before.halves - 1, has_gradients=True)
        moments.add(tuple(now.values()))
        found.append(moments)
    return found


def _bytes_in_flight(layout: PlannedLayout, sizes: _Sizes, stage: _Part, counts: InFlight) -> float:
    """Return a lower bound of the bytes of a stage's microbatches, and of its gradients."""
    nbytes = stage.blocks * (
        counts.forward * sizes.kept_bytes + counts.halves * sizes.between_bytes
    )
    if counts.forward and stage.outputs:
        nbytes += _logits_bytes(layout, sizes)
    # In a second local batch, gradients of the first exist.
    if counts.has_gradients or layout.accumulation > 1:
        _, summed = itemsizes(layout.config.training)
        nbytes += summed * (stage.elements if layout.gathers_once else stage.sharded)
    return nbytes


def _received_bytes(layout: PlannedLayout, sizes: _Sizes, rank: int) -> float:
    """Return the bytes of buffers for what comes from neighbouring stages."""
    stages = layout.pipeline.stages_of(rank)
    last = len(layout.pipeline.modules) - 1
    neighbours = sum((stage > 0) + (stage < last) for stage in stages)
    return neighbours * layout.pipeline.microbatches * sizes.hidden_bytes


def _gathered_bytes(layout: PlannedLayout, part: _Part) -> float:
    """Return the least bytes of weights that are gathered for a step."""
    config = layout.config
    computed, _ = itemsizes(config.training)
    if layout.fsdp_degree == 1 and computed == STORED_BYTES:  # they are no copies
        return 0.0
    low = low_precision(config)
    itemsize = getattr(torch, low.dtype).itemsize if low and low.is_gathered else computed
    return itemsize * part.elements


def _logits_bytes(layout: PlannedLayout, sizes: _Sizes) -> float:
    """Return the bytes of the logits of as many tokens as the loss has at a time."""
    computed, _ = itemsizes(layout.config.training)
    tokens = layout.loss_chunk or sizes.tokens
    return computed * tokens * layout.model.vocab_size / layout.degrees["tp"]


def reason(fit: Sequence[tuple[Change, Plan]], plan: Plan) -> str:
    """Return the bottleneck of the best plan, and why another one lost.

    fit: the plans that fit, the best first.
    """
    if not fit or plan is fit[0][1]:
        return what_binds(plan)
    return why_lost(plan, fit[0][1])


def why_lost(plan: Plan, best: Plan) -> str:
    """Return why a plan is not the best one: its excess of memory, that it is tight though faster,
    or the largest additional wait for the same tokens.
    """
    if not plan.fits:
        excess = (plan.memory.total - plan.capacity) / GIB
        return f"{excess:.1f} GiB too many, mostly {plan.memory.largest_part}"
    own = plan.nominal
    other = best.nominal
    slower = own.seconds * best.layout.tokens / plan.layout.tokens / other.seconds - 1
    if slower < 0 and plan.is_tight:
        free = (plan.capacity - plan.memory.total) / GIB
        return f"tight, {free:.1f} GiB free; it would take {-100 * slower:.1f}% less time"
    longer = {part: seconds - other.parts.get(part, 0.0) for part, seconds in own.parts.items()}
    longest = max(longer, key=lambda part: longer[part])
    return f"{100 * slower:.1f}% slower: {part_name(longest)} {longer[longest]:+.2g} s per step"
