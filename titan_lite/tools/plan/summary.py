"""Make the plan of a recipe, as one screen of text or one JSON object.

    plan = make_plan(layout, machine.nominal_slow_fast())
    print("\\n".join(describe(plan)))
    print(as_json(plan))

Speeds are ranges. The machine's peaks, links and memory come from its datasheet, but the
efficiencies of real kernels are uncertain. So everything is simulated three times: nominal, and
with all efficiencies at the slow and at the fast end of the uncertainty in cost/machine.py.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Future
from dataclasses import dataclass, field
from typing import Any

import torch

from titan_lite.compile.compile import CompileError
from titan_lite.config import ConfigError
from titan_lite.cost.machine import GIB, JOINT_SHARE, UNCERTAINTY, Machine
from titan_lite.cost.timeline import Timeline
from titan_lite.distributed.axes import WORDS as AXIS_WORDS
from titan_lite.metrics.start_lines import describe_ramp
from titan_lite.models.llama3 import flops_per_token
from titan_lite.models.shapes import shape_words
from titan_lite.optim.state import costs_of
from titan_lite.tools.plan.memory import Memory, memory_of
from titan_lite.tools.plan.published import bias_of
from titan_lite.tools.plan.simulate import StepTimes, simulate_step
from titan_lite.tools.plan.tape import Stage, stage_of
from titan_lite.tools.plan.trace import (
    Kind,
    PlannedLayout,
    Traced,
    figures_at,
    kind_of_stage,
    layers_of,
    names_blocks,
    start_trace,
    start_tracing,
)

WORDS = {
    "compute": "computation",
    "bubble": "waiting for other pipeline ranks",
    "optimizer": "clipping and optimizer",
    "host": "the host",
    "slowest": "the slowest rank",
    "owners": "whole matrices of the optimizer",
    **AXIS_WORDS,
}


UNITS = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}


@dataclass(frozen=True)
class Plan:
    layout: PlannedLayout
    machine: Machine
    steps: tuple[StepTimes, ...]  # on each machine: nominal, slow, fast
    memory: Memory
    depths: dict[Kind, tuple[int, ...]]  # traced numbers of blocks
    seconds: float  # of planning
    timelines: Mapping[Kind, Sequence[Timeline]] = field(
        default_factory=dict
    )  # graphs with most blocks

    @property
    def capacity(self) -> float:
        return self.machine.memory * GIB

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.capacity

    def tokens_per_second(self, step: StepTimes) -> float:
        """Return the tokens per second of one rank."""
        return self.layout.tokens / step.seconds / self.layout.world_size

    def model_flops(self, step: StepTimes) -> float:
        """Return the model FLOP/s of a rank, without recomputation."""
        return self.tokens_per_second(step) * flops_per_token(
            self.layout.model, self.layout.seq_len
        )

    def mfu(self, step: StepTimes) -> float:
        return self.model_flops(step) / self.peak_flops

    def mfu_full_attention(self, step: StepTimes) -> float:
        """Return the MFU with attention counted as full instead of causal."""
        flops = flops_per_token(self.layout.model, self.layout.seq_len, full_attention=True)
        return self.tokens_per_second(step) * flops / self.peak_flops

    def hfu(self, step: StepTimes) -> float:
        """Return the share of peak FLOP/s with recomputation counted (HFU)."""
        return (step.matmul + step.attention) / step.seconds / self.peak_flops

    @property
    def peak_flops(self) -> float:
        return self.machine.flops(getattr(torch, self.layout.config.training.mixed_precision_param))


def make_plan(layout: PlannedLayout, machines: Sequence[Machine], full: bool = False) -> Plan:
    """Return the plan of a layout, with a step for each machine. full: trace every block.

    Raises ConfigError if it cannot be planned.
    """
    (plan,) = make_plans([layout], machines, full)
    if isinstance(plan, CompileError):
        raise ConfigError(str(plan)) from plan
    return plan


def make_plans(
    layouts: Sequence[PlannedLayout],
    machines: Sequence[Machine],
    full: bool,
) -> Iterator[Plan | CompileError]:
    """Yield the plans of layouts of one world size, in order, with a step for each machine.

    Raises ConfigError.

    full: trace every block.
    """
    if not layouts:
        return
    started = time.perf_counter()
    with start_tracing(layouts[0].world_size) as processes:
        shared: dict[Any, Future[Traced]] = {}
        tasks = [start_trace(processes, layout, machines, full, shared) for layout in layouts]
        for layout, task in zip(layouts, tasks, strict=True):
            try:
                traced = {
                    kind: {depth: each.result() for depth, each in depths.items()}
                    for kind, depths in task.items()
                }
            except CompileError as error:
                yield error
                continue
            except BrokenExecutor:
                raise ConfigError(
                    "a tracing process was killed, perhaps because this machine is out of memory;"
                    " use fewer layers with --full, or leave --full out"
                ) from None
            stages = [
                [
                    figures_at(traced[kind_of_stage(modules)], layers_of(modules), number)
                    for modules in layout.pipeline.modules
                ]
                for number in range(len(machines))
            ]
            steps = tuple(
                simulate_step(layout, each, machine)
                for each, machine in zip(stages, machines, strict=True)
            )
            depths = {kind: tuple(sorted(each)) for kind, each in traced.items()}
            timelines = {kind: each[max(each)].timelines for kind, each in traced.items()}
            memory = memory_of(layout, stages_of(layout, traced), machines[0])
            seconds = time.perf_counter() - started
            yield Plan(layout, machines[0], steps, memory, depths, seconds, timelines)


def stages_of(layout: PlannedLayout, traced: Mapping[Kind, Mapping[int, Traced]]) -> list[Stage]:
    """Return the tensors of each stage. Alike stages share one object."""
    pipelined, found = layout.degrees["pp"] > 1, dict[tuple[Kind, int], Stage]()
    keys = [(kind_of_stage(modules), layers_of(modules)) for modules in layout.pipeline.modules]
    for kind, n_layers in keys:
        if (kind, n_layers) not in found:
            depths = traced[kind]
            found[kind, n_layers] = stage_of(
                depths.get(n_layers, depths[max(depths)]).tensors, n_layers, pipelined
            )
    return [found[key] for key in keys]


def describe(plan: Plan, token_budget: float = 0.0, lighter: Plan | None = None) -> list[str]:
    """Return the plan as lines of one screen.

    token_budget: tokens to give time and GPU-hours for; 0: those of training.steps.
    lighter: the plan of the same recipe with less activation checkpointing.
    """
    layout, machine, memory = plan.layout, plan.machine, plan.memory
    config, (stated, slow, fast) = layout.config, plan.steps
    axes = (
        " x ".join(f"{axis} {degree}" for axis, degree in layout.degrees.items() if degree > 1)
        or "one rank"
    )
    compiled = (
        f"{config.compile.backend}, {config.compile.bucketing} buckets"
        if config.compile.compiles("model")
        else "eager"
    )

    def slow_to_fast(figure: Callable[[StepTimes], float], scale: float = 1.0) -> str:
        return f"{scale * figure(slow):,.0f} to {scale * figure(fast):,.0f}"

    budget = token_budget or layout.tokens_until(config.training.steps)
    takes = [budget / layout.tokens * step.seconds for step in (fast, slow)]
    gpu_hours = " to ".join(rounded(layout.world_size * each / 3600) for each in takes)
    bias = bias_of(config.compile, machine, config.float8.enable)
    of_what = "" if token_budget else f" ({config.training.steps:,} steps)"
    lines = [
        (
            f"{shape_words(config.model)} on {layout.world_size} {machine.name} ({axes});"
            f" {compiled}, activation checkpointing {config.activation_checkpoint.mode}"
        ),
        (
            f"batch: {layout.sequences_per_step:,} sequences of {layout.seq_len:,} tokens per step ="
            f" {layout.tokens:,} tokens, {layout.microbatches}"
            f" microbatch{'es' * (layout.microbatches > 1)} of {layout.microbatch_size} per rank"
        ),
        *(
            [
                f"planned for the end of the ramp: {describe_ramp(layout)}"
                " (training.global_batch_ramp)"
            ]
            if layout.ramp
            else []
        ),
        "",
        f"  step time        {fast.seconds:.3g} to {slow.seconds:.3g} s",
        f"  tokens/s per GPU {slow_to_fast(plan.tokens_per_second)}{bias and f'; {bias}'}",
        f"  TFLOP/s per GPU  {slow_to_fast(plan.model_flops, 1e-12)}",
        (
            f"  MFU              {slow_to_fast(plan.mfu, 100)}%"
            f" ({slow_to_fast(plan.mfu_full_attention, 100)}% with attention counted as full), HFU"
            f" {slow_to_fast(plan.hfu, 100)}%"
        ),
        f"  {budget:.3g} tokens{of_what}: {in_units(*takes)}, {gpu_hours} GPU-hours, without stops",
        "",
        "nominal breakdown of the step",
    ]
    shares = {
        part: seconds / stated.seconds
        for part, seconds in sorted(stated.parts.items(), key=lambda item: -item[1])
    }
    lines += [
        f"  {100 * share:5.1f}%  {name_of(part)}" for part, share in shares.items() if share >= 5e-4
    ]
    lines += ["", "sent per rank and step, GB            total   to other nodes"]
    for axis, nbytes in stated.sent.items():
        if nbytes:
            lines.append(
                f"  {WORDS[axis]:<28} {nbytes / 1e9:12,.1f}"
                f" {stated.across.get(axis, 0.0) / 1e9:16,.1f}"
            )

    where = f" of pipeline rank {memory.rank}" if layout.degrees["pp"] > 1 else ""
    lines += ["", f"peak memory{where} ({memory.moment}), GiB"]
    rows = {
        **memory.rows,
        "kept by the allocator, unused": memory.reserved - memory.peak,
        "outside of tensors (CUDA, NCCL)": memory.outside,
    }
    lines += [f"  {name:<40} {nbytes / GIB:8.2f}" for name, nbytes in rows.items()]
    margin = (plan.capacity - memory.total) / GIB
    verdict = f"fits, {margin:.1f} free" if plan.fits else f"does not fit: {-margin:.1f} too many"
    lines.append(
        f"  {'of ' + format(machine.memory, 'g') + ' on the device':<40} {memory.total / GIB:8.2f} "
        f" {verdict}"
    )
    uncertain = ", ".join(
        f"{name.removesuffix('_efficiency')} {100 * share:.0f}%"
        for name, share in UNCERTAINTY.items()
    )
    uncertain += ", clock at the power limit" if machine.power else ""
    optimizer = plan.layout.config.optimizer
    guessed = machine.multiprocessors and costs_of(optimizer).eigendecomposition_cubes((1, 1))
    uncertain += ", eigendecompositions by a guess without a range" if guessed else ""
    traced = " and ".join(
        map(str, sorted({depth for depths in plan.depths.values() for depth in depths}))
    )
    several = len(plan.layout.pipeline.modules) > 1 and names_blocks(plan.layout.config)
    numbered = "; keys that name blocks count them from each stage's first" if several else ""
    return [
        *lines,
        "",
        f"bottleneck: {what_binds(plan)}",
        *([spare(plan, lighter)] if lighter and plan.fits else ()),
        (
            f"ranges (80%): efficiencies of {uncertain}, {JOINT_SHARE:g} of each; stages of {traced}"
            f" blocks traced; no waiting for the loader{numbered}; planned in {plan.seconds:.0f} s"
        ),
    ]


def spare(plan: Plan, lighter: Plan) -> str:
    """Return a line on free memory, and on `lighter`, a plan that uses it to recompute less."""
    mode, needs = lighter.layout.config.activation_checkpoint.mode, lighter.memory.total / GIB
    saves = 100 * (1 - lighter.steps[0].seconds / plan.steps[0].seconds)
    why = f"would take {saves:.0f}% less time per step" if lighter.fits else "would not fit"
    left = (plan.capacity - plan.memory.total) / GIB
    return (
        f"free memory: {left:.1f} GiB; activation_checkpoint.mode = {mode} needs {needs:.1f} GiB in"
        f" total, and {why}"
    )


def name_of(part: str) -> str:
    kind, _, axis = part.partition(".")
    return f"waiting for {WORDS[axis]}" if kind == "exposed" else WORDS[part]


def what_binds(plan: Plan) -> str:
    """Return the bottleneck of a plan in words."""
    step, layout, memory = plan.steps[0], plan.layout, plan.memory
    if not plan.fits:
        largest = max(memory.rows, key=lambda row: memory.rows[row])
        where = f"pipeline rank {memory.rank}'s " if layout.degrees["pp"] > 1 else ""
        return f"memory: {where}{largest}, {memory.rows[largest] / GIB:.1f} GiB"
    waits = {part: seconds for part, seconds in step.parts.items() if part != "compute"}
    part = max(waits, key=lambda part: waits[part])
    share = waits[part] / step.seconds
    if share < 0.1:
        recomputed = 1 - plan.mfu(step) / plan.hfu(step)
        recomputes = f", {100 * recomputed:.0f}% of it recomputation" if recomputed > 0.05 else ""
        return (
            f"computation{recomputes}; the longest wait is {name_of(part)}, {100 * share:.0f}% of"
            " the step"
        )
    axis = part.removeprefix("exposed.")
    between = ", between nodes" if step.across.get(axis) else ""
    return f"{name_of(part)}{between}: {100 * share:.0f}% of the step"


def as_json(plan: Plan) -> str:
    """Return the plan as JSON, in seconds, bytes and FLOP/s; ranges are {stated, slow, fast},
    stated being nominal.
    """
    layout, memory = plan.layout, plan.memory

    def each(figure: Callable[[StepTimes], float]) -> dict[str, float]:
        return dict(zip(("stated", "slow", "fast"), map(figure, plan.steps), strict=True))

    stated = plan.steps[0]
    found: dict[str, Any] = {
        "flavor": shape_words(layout.config.model),
        "world_size": layout.world_size,
        "degrees": layout.degrees,
        "machine": plan.machine.name,
        "tokens_per_step": layout.tokens,
        "microbatches": layout.microbatches,
        "ramp": describe_ramp(layout),
        "step_seconds": each(lambda step: step.seconds),
        "tokens_per_second": each(plan.tokens_per_second),
        "model_flops": each(plan.model_flops),
        "mfu": each(plan.mfu),
        "mfu_full_attention": each(plan.mfu_full_attention),
        "hfu": each(plan.hfu),
        "bias": bias_of(layout.config.compile, plan.machine, layout.config.float8.enable),
        "parts_seconds": stated.parts,
        "sent_bytes": stated.sent,
        "sent_to_other_nodes_bytes": stated.across,
        "memory": {
            "pipeline_rank": memory.rank,
            "moment": memory.moment,
            "rows": memory.rows,
            "peak": memory.peak,
            "reserved": memory.reserved,
            "total": memory.total,
            "device": plan.capacity,
            "fits": plan.fits,
        },
        "what_binds": what_binds(plan),
        "uncertainty": {name: round(JOINT_SHARE * share, 4) for name, share in UNCERTAINTY.items()},
        "traced_blocks": {
            " ".join(kind) or "blocks": depths for kind, depths in plan.depths.items()
        },
        "planning_seconds": round(plan.seconds, 1),
    }
    return json.dumps(found, indent=1)


def in_units(*seconds: float) -> str:
    """Return a duration, or a range of durations, in the unit that fits the longest."""
    unit = next((unit for unit, size in UNITS.items() if max(seconds) >= 2 * size), "seconds")
    return f"{' to '.join(rounded(each / UNITS[unit]) for each in seconds)} {unit}"


def rounded(number: float) -> str:
    """Return a number with three significant digits, or all digits before the point."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
