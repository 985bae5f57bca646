"""Make the plan of a run: trace its pipeline stages, then compute a step's time and memory.

    plan = make_plan(layout, machine)
    plan.nominal.seconds, plan.memory.total, plan.fits

How the seconds of a step come about:

    trace.py            the graphs of each kind of stage, by the trainer's own `parallelize`
    cost/op_cost.py     the seconds of each node of a graph on the machine
    cost/timeline.py    the seconds of a graph, whose collectives overlap with computation
    costs.py            these as figures of a stage, linear in the number of its blocks
    simulate.py         a step: the pipeline's schedule of stages, accumulation, the update
    published.py        how far off plans of published runs like it were

Speeds are ranges: the step is as much faster or slower as plans of published runs like it were.
"""

import dataclasses
from collections.abc import Hashable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Future
from dataclasses import dataclass, field

import torch

from titan_lite.compile.errors import CompileError
from titan_lite.config import ConfigError
from titan_lite.cost.machine import GIB, Machine
from titan_lite.cost.timeline import Timeline
from titan_lite.models.shapes import flops_per_token
from titan_lite.tools.plan.memory import Memory, memory_of
from titan_lite.tools.plan.published import Evidence, evidence_for
from titan_lite.tools.plan.simulate import StepTimes, simulate_step
from titan_lite.tools.plan.tape import Stage, stage_of
from titan_lite.tools.plan.trace import (
    PlannedLayout,
    StageModules,
    TracedStage,
    blocks_in,
    costs_at,
    modules_beside_blocks,
    start_tracing,
    submit_traces,
)

TracedStages = Mapping[StageModules, Mapping[int, TracedStage]]  # then by number of blocks


@dataclass(frozen=True)
class Plan:
    """The plan of a run: a step's time and memory."""

    layout: PlannedLayout
    machine: Machine
    nominal: StepTimes
    memory: Memory
    evidence: Evidence
    depths: dict[StageModules, tuple[int, ...]]  # traced numbers of blocks
    # Of the graphs of the stage with most blocks.
    timelines: Mapping[StageModules, Sequence[Timeline]] = field(default_factory=dict)

    @property
    def slow(self) -> StepTimes:
        """The step at the slow end of the range."""
        seconds = self.nominal.seconds * self.evidence.error
        return dataclasses.replace(self.nominal, seconds=seconds)

    @property
    def fast(self) -> StepTimes:
        """The step at the fast end of the range."""
        seconds = self.nominal.seconds / self.evidence.error
        return dataclasses.replace(self.nominal, seconds=seconds)

    @property
    def capacity(self) -> float:
        """Bytes of a device."""
        return self.machine.memory * GIB

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.capacity

    @property
    def is_tight(self) -> bool:
        """Return True if it fits, but by less than published runs like it exceeded their plans."""
        exceeding = self.memory.reserved * self.evidence.memory_error
        return self.fits and self.memory.total + exceeding > self.capacity

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
        return step.flops / step.seconds / self.peak_flops

    @property
    def peak_flops(self) -> float:
        return self.machine.flops(getattr(torch, self.layout.config.training.mixed_precision_param))


def make_plan(layout: PlannedLayout, machine: Machine, full: bool = False) -> Plan:
    """Return the plan of a layout on a machine. full: trace every block.

    Raises ConfigError if it cannot be planned.
    """
    (plan,) = make_plans([layout], machine, full)
    if isinstance(plan, CompileError):
        raise ConfigError(str(plan)) from plan
    return plan


def make_plans(
    layouts: Sequence[PlannedLayout], machine: Machine, full: bool
) -> Iterator[Plan | CompileError]:
    """Yield the plans of layouts of one world size, in order.

    full: trace every block. Raises ConfigError.
    """
    if not layouts:
        return
    with start_tracing(layouts[0].world_size) as processes:
        shared: dict[Hashable, Future[TracedStage]] = {}
        all_tasks = [submit_traces(processes, layout, machine, full, shared) for layout in layouts]
        for layout, tasks in zip(layouts, all_tasks, strict=True):
            try:
                traced = {
                    beside: {depth: task.result() for depth, task in by_depth.items()}
                    for beside, by_depth in tasks.items()
                }
            except CompileError as error:
                yield error
                continue
            except BrokenExecutor:
                raise ConfigError(
                    "a tracing process was killed, perhaps because this machine is out of memory;"
                    " use fewer layers with --full, or leave --full out"
                ) from None
            yield plan_of(layout, machine, traced)


def plan_of(layout: PlannedLayout, machine: Machine, traced: TracedStages) -> Plan:
    """Return the plan of a layout from its traced stages."""
    costs = [
        costs_at(traced[modules_beside_blocks(modules)], blocks_in(modules))
        for modules in layout.pipeline.modules
    ]
    return Plan(
        layout,
        machine,
        simulate_step(layout, costs, machine),
        memory_of(layout, stages_of(layout, traced), machine),
        evidence_for(layout, machine),
        depths={beside: tuple(sorted(by_depth)) for beside, by_depth in traced.items()},
        timelines={
            beside: by_depth[max(by_depth)].timelines for beside, by_depth in traced.items()
        },
    )


def stages_of(layout: PlannedLayout, traced: TracedStages) -> list[Stage]:
    """Return the tensors of each stage. Alike stages share one object."""
    pipelined = layout.degrees["pp"] > 1
    alike: dict[tuple[StageModules, int], Stage] = {}
    stages = []
    for modules in layout.pipeline.modules:
        beside = modules_beside_blocks(modules)
        n_layers = blocks_in(modules)
        if (beside, n_layers) not in alike:
            by_depth = traced[beside]
            nearest = by_depth.get(n_layers, by_depth[max(by_depth)])
            alike[beside, n_layers] = stage_of(nearest.tensors, n_layers, pipelined)
        stages.append(alike[beside, n_layers])
    return stages
