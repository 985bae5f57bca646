"""Describe the plan of a run, as one screen of text or one JSON object.

print(*describe(plan), sep="\\n")
print(as_json(plan))
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from titan_lite.config.sections import Phase
from titan_lite.cost.machine import GIB
from titan_lite.distributed.axes import AXIS_NAMES
from titan_lite.feature import features_of
from titan_lite.metrics.start_lines import counted
from titan_lite.models.shapes import shape_words
from titan_lite.tools.plan.plan import Plan
from titan_lite.tools.plan.rank_bytes import owner_costs
from titan_lite.tools.plan.simulate import StepTimes
from titan_lite.tools.plan.trace import names_blocks

# Of a part of a step, and of what is waited for.
PART_NAMES = {
    "compute": "computation",
    "bubble": "waiting for other pipeline ranks",
    "optimizer": "clipping and optimizer",
    "host": "the host",
    "slowest": "the slowest rank",
    "owners": "whole matrices at their owners",
    **AXIS_NAMES,
}
SECONDS_IN = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}
SHOWN_SHARE = 5e-4  # smaller parts of a step are left out
SHORT_WAIT = 0.1  # share of a step; with shorter waits, computation is the bottleneck


@dataclass(frozen=True)
class Budget:
    """The tokens of a training, the price of a GPU-hour, and the share of time that counts."""

    tokens: float = 0.0  # 0: those of training.steps
    price: float = 0.0  # of a GPU-hour; 0: not given
    goodput: float = 1.0  # share of the time that ends in kept steps (goodput.py)


def describe(plan: Plan, budget: Budget = Budget()) -> list[str]:
    """Return the plan as lines of one screen."""
    lines = [
        *recipe_lines(plan),
        "",
        *speed_lines(plan),
        *budget_lines(plan, budget),
        f"  {plan.evidence.in_words()}",
        "",
        "nominal breakdown of the step",
        *breakdown_lines(plan),
        "",
        "sent per rank and step, GB            total   to other nodes",
        *traffic_lines(plan),
        "",
        *memory_lines(plan),
        "",
        f"bottleneck: {what_binds(plan)}",
    ]
    for feature in features_of(plan.layout.config):
        lines += feature.plan_lines(plan.layout.config)
    if not plan.fits:
        lines.append(
            "to fit: --search finds the fastest layout that does; --sweep"
            " activation_checkpoint.mode=selective,full plans this one with less memory"
        )
    lines.append(uncertainty_line(plan))
    return lines


def recipe_lines(plan: Plan) -> list[str]:
    layout = plan.layout
    config = layout.config
    compiled = "eager"
    if config.compile.enable:
        compiled = f"{config.compile.backend}, {config.compile.bucketing} buckets"
    microbatches = counted(layout.microbatches, "microbatch", "microbatches")
    lines = [
        (
            f"{shape_words(config.model)} on {layout.world_size} {plan.machine.name}"
            f" ({describe_degrees(layout.degrees)}); {compiled}, activation checkpointing"
            f" {config.activation_checkpoint.mode}"
        ),
        (
            f"batch: {layout.sequences_per_step:,} sequences of {layout.seq_len:,} tokens per step"
            f" = {layout.tokens:,} tokens, {microbatches} of"
            f" {layout.microbatch_size} per rank"
        ),
    ]
    if layout.model.n_experts:
        split = f", over ep {layout.expert_parallel}" if layout.expert_parallel > 1 else ""
        load = "equally loaded"
        if layout.expert_imbalance > 1:
            load = f"{layout.expert_imbalance:g} times the mean on the rank with most"
        lines.append(
            f"{layout.model.n_experts} experts, {layout.model.experts_per_token} for a token,"
            f" {load}{split}: {layout.parameters:,} parameters,"
            f" {layout.active_parameters:,} of them for a token"
        )
    return lines


def describe_degrees(degrees: Mapping[str, int]) -> str:
    """Return the axes with several ranks, as in "dp_shard 64 x tp 8"."""
    axes = [f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1]
    return " x ".join(axes) or "one rank"


def speed_lines(plan: Plan) -> list[str]:
    slow = plan.slow
    fast = plan.fast

    def slow_to_fast(figure: Callable[[StepTimes], float], scale: float = 1.0) -> str:
        return f"{scale * figure(slow):,.0f} to {scale * figure(fast):,.0f}"

    speed = slow_to_fast(plan.tokens_per_second)
    if not plan.evidence.is_known:
        speed = f"{speed} (a guess)"
    mfu = slow_to_fast(plan.mfu, 100)
    mfu_full = slow_to_fast(plan.mfu_full_attention, 100)
    hfu = slow_to_fast(plan.hfu, 100)
    return [
        f"  step time        {fast.seconds:.3g} to {slow.seconds:.3g} s",
        f"  tokens/s per GPU {speed}",
        f"  TFLOP/s per GPU  {slow_to_fast(plan.model_flops, 1e-12)}",
        f"  MFU              {mfu}% ({mfu_full}% with attention counted as full), HFU {hfu}%",
    ]


def budget_lines(plan: Plan, budget: Budget) -> list[str]:
    """Return lines on the time, the GPU-hours and the price of a training."""
    layout = plan.layout
    steps = layout.config.training.steps
    tokens = budget.tokens or steps * layout.tokens
    words = f"{tokens:.3g} tokens" + ("" if budget.tokens else f" ({steps:,} steps)")
    durations = [tokens / layout.tokens * step.seconds for step in (plan.fast, plan.slow)]

    def with_goodput(share: float) -> str:
        seconds = [each / share for each in durations]
        hours = [layout.world_size * each / 3600 for each in seconds]
        costs = f"{in_units(*seconds)}, {' to '.join(map(rounded, hours))} GPU-hours"
        if not budget.price:
            return costs
        money = " to ".join(rounded(budget.price * each) for each in hours)
        return f"{costs}, {money} at {budget.price:g} a GPU-hour"

    lines = [f"  {words}: {with_goodput(1.0)}, without stops"]
    if budget.goodput < 1:
        lines.append(
            f"    with GPUs that fail, {budget.goodput:.1%} of the time counts"
            f" (checkpoint.interval = {layout.config.checkpoint.interval}):"
            f" {with_goodput(budget.goodput)}"
        )
    return lines


def breakdown_lines(plan: Plan) -> list[str]:
    step = plan.nominal
    parts = sorted(step.parts.items(), key=lambda item: -item[1])
    shares = [(part, seconds / step.seconds) for part, seconds in parts]
    return [
        f"  {100 * share:5.1f}%  {part_name(part)}"
        for part, share in shares
        if share >= SHOWN_SHARE
    ]


def traffic_lines(plan: Plan) -> list[str]:
    step = plan.nominal
    return [
        f"  {PART_NAMES[axis]:<28} {nbytes / 1e9:12,.1f} {step.across.get(axis, 0.0) / 1e9:16,.1f}"
        for axis, nbytes in step.sent.items()
        if nbytes
    ]


class PlannedPhase(NamedTuple):
    """A phase of a recipe, and the plan of its steps."""

    text: str  # what it is
    phase: Phase
    plan: Plan

    @property
    def tokens(self) -> int:
        return (self.phase.end - self.phase.begin) * self.plan.layout.tokens

    @property
    def seconds(self) -> list[float]:
        """The shortest and the longest time of the phase, without stops."""
        steps = self.phase.end - self.phase.begin
        return [steps * times.seconds for times in (self.plan.fast, self.plan.slow)]


def describe_phases(phases: Sequence[PlannedPhase], price: float) -> list[str]:
    """Return two lines on each phase, and one on their sum. price: of a GPU-hour; 0: not known."""
    lines = []
    for phase in phases:
        lines += [phase.text, f"  {steps_in_words(phase)}; {verdict_of(phase.plan)}"]
    seconds = [sum(each) for each in zip(*(phase.seconds for phase in phases), strict=True)]
    hours = [phases[0].plan.layout.world_size * each / 3600 for each in seconds]
    tokens = sum(phase.tokens for phase in phases)
    line = f"all phases: {tokens:.3g} tokens in {in_units(*seconds)}, without stops; "
    line += f"{' to '.join(map(rounded, hours))} GPU-hours"
    if price:
        line += f", {' to '.join(rounded(price * each) for each in hours)} at {price:g} a GPU-hour"
    return [*lines, line]


def steps_in_words(phase: PlannedPhase) -> str:
    fast, slow = phase.plan.fast.seconds, phase.plan.slow.seconds
    known = "" if phase.plan.evidence.is_known else " (a guess)"
    return (
        f"step time {fast:.3g} to {slow:.3g} s{known}; {phase.tokens:.3g} tokens in"
        f" {in_units(*phase.seconds)}"
    )


def verdict_of(plan: Plan) -> str:
    """Return the memory of a plan in words."""
    verdict = "tight" if plan.is_tight else "fits" if plan.fits else "does not fit"
    return f"{plan.memory.total / GIB:.2f} of {plan.machine.memory:g} GiB, {verdict}"


def memory_lines(plan: Plan) -> list[str]:
    memory = plan.memory
    where = f" of pipeline rank {memory.rank}" if plan.layout.degrees["pp"] > 1 else ""
    parts = {
        **memory.parts,
        "kept by the allocator, unused": memory.reserved - memory.peak,
        "outside of tensors (CUDA, NCCL)": memory.outside,
    }
    free = (plan.capacity - memory.total) / GIB
    verdict = f"fits, {free:.1f} free"
    if plan.is_tight:
        verdict = (
            f"tight, {free:.1f} free: published runs reserved up to"
            f" {100 * plan.evidence.memory_error:.0f}% more than planned"
        )
    elif not plan.fits:
        verdict = f"does not fit: {-free:.1f} too many"
    total = f"of {plan.machine.memory:g} on the device"
    return [
        f"peak memory{where} ({memory.phase}), GiB",
        *(f"  {name:<40} {nbytes / GIB:8.2f}" for name, nbytes in parts.items()),
        f"  {total:<40} {memory.total / GIB:8.2f}  {verdict}",
    ]


def uncertainty_line(plan: Plan) -> str:
    """Return what the ranges are made of, and how the plan was made."""
    costs = owner_costs(plan.layout.config)
    guessed = ""
    if plan.machine.multiprocessors and costs is not None and costs.has_roots:
        guessed = "; eigendecompositions by a guess without a range"
    depths = sorted({depth for depths in plan.depths.values() for depth in depths})
    traced = " and ".join(map(str, depths))
    numbered = ""
    if len(plan.layout.pipeline.modules) > 1 and names_blocks(plan.layout.config):
        numbered = "; keys that name blocks count them from each stage's first"
    return (
        f"ranges (80%): errors of plans of published runs{guessed}; stages of {traced} blocks"
        f" traced; no waiting for the loader{numbered}"
    )


def part_name(part: str) -> str:
    """Return a part of a step in words."""
    kind, _, axis = part.partition(".")
    return f"waiting for {PART_NAMES[axis]}" if kind == "exposed" else PART_NAMES[part]


def what_binds(plan: Plan) -> str:
    """Return the bottleneck of a plan in words."""
    step = plan.nominal
    memory = plan.memory
    if not plan.fits:
        largest = memory.largest_part
        where = f"pipeline rank {memory.rank}'s " if plan.layout.degrees["pp"] > 1 else ""
        return f"memory: {where}{largest}, {memory.parts[largest] / GIB:.1f} GiB"
    waits = {part: seconds for part, seconds in step.parts.items() if part != "compute"}
    longest = max(waits, key=lambda part: waits[part])
    share = waits[longest] / step.seconds
    if share < SHORT_WAIT:
        recomputed = 1 - plan.mfu(step) / plan.hfu(step)
        recomputes = f", {100 * recomputed:.0f}% of it recomputation" if recomputed > 0.05 else ""
        name = part_name(longest).removeprefix("waiting for ")
        return f"computation{recomputes}; longest wait: {name}, {100 * share:.0f}%"
    axis = longest.removeprefix("exposed.")
    between = ", between nodes" if step.across.get(axis) else ""
    return f"{part_name(longest)}{between}: {100 * share:.0f}% of the step"


def as_json(plan: Plan) -> str:
    """Return the plan as JSON, in seconds, bytes and FLOP/s; ranges are {stated, slow, fast},
    stated being nominal.
    """
    layout = plan.layout
    memory = plan.memory
    step = plan.nominal

    def each(figure: Callable[[StepTimes], float]) -> dict[str, float]:
        steps = (plan.nominal, plan.slow, plan.fast)
        return dict(zip(("stated", "slow", "fast"), map(figure, steps), strict=True))

    values: dict[str, Any] = {
        "flavor": shape_words(layout.config.model),
        "world_size": layout.world_size,
        "degrees": layout.degrees,
        "expert_parallel": layout.expert_parallel,
        "parameters": layout.parameters,
        "active_parameters": layout.active_parameters,
        "machine": plan.machine.name,
        "tokens_per_step": layout.tokens,
        "microbatches": layout.microbatches,
        "step_seconds": each(lambda step: step.seconds),
        "tokens_per_second": each(plan.tokens_per_second),
        "model_flops": each(plan.model_flops),
        "mfu": each(plan.mfu),
        "mfu_full_attention": each(plan.mfu_full_attention),
        "hfu": each(plan.hfu),
        "evidence": {
            "runs": [run.name for run in plan.evidence.runs],
            "differ_in": plan.evidence.differ_in,
            "error": plan.evidence.error,
            "is_known": plan.evidence.is_known,
            "memory_error": plan.evidence.memory_error,
            "words": plan.evidence.in_words(),
        },
        "parts_seconds": step.parts,
        "sent_bytes": step.sent,
        "sent_to_other_nodes_bytes": step.across,
        "memory": {
            "pipeline_rank": memory.rank,
            "moment": memory.phase,
            "rows": memory.parts,
            "peak": memory.peak,
            "reserved": memory.reserved,
            "total": memory.total,
            "device": plan.capacity,
            "fits": plan.fits,
            "tight": plan.is_tight,
        },
        "what_binds": what_binds(plan),
        "traced_blocks": {
            " ".join(beside) or "blocks": depths for beside, depths in plan.depths.items()
        },
    }
    return json.dumps(values, indent=1)


def in_units(*seconds: float) -> str:
    """Return a duration, or a range of durations, in the unit that fits the longest."""
    fitting = [unit for unit, size in SECONDS_IN.items() if max(seconds) >= 2 * size]
    unit = fitting[0] if fitting else "seconds"
    numbers = " to ".join(rounded(each / SECONDS_IN[unit]) for each in seconds)
    return f"{numbers} {unit}"


def rounded(number: float) -> str:
    """Return a number with three significant digits, or all digits before the point."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
