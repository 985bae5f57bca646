"""An optimizer step put together from the figures of its stages: what takes how long, and who waits for whom.

    step = simulate_step(layout, stages, machine)             # stages: of each pipeline stage, its figures (figures.py)
    step.seconds, step.parts["exposed.tp"]

A pipeline is run action by action in its schedule's own order, with what each stage really costs.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from titan_lite.compiler.hardware import Machine
from titan_lite.distributed.pipeline_plan import Timetable, order_of, run_order
from titan_lite.plan.costs import Figures
from titan_lite.plan.trace import PlannedLayout

FORWARD, BACKWARD = ("forward.", "loss_forward."), ("backward.", "loss_backward.")
ROUND = ("gather.", "reduce.")
# Times that 4 bytes, or what training.dtype has, of each local parameter are read or written: the norm reads gradients, clipping
# reads and writes them; AdamW reads parameter, gradient and both moments, and writes all but the gradient.
CLIPPING, UPDATE = 3, 7
SMALL_SUMS = 3  # of one number over all ranks: tokens, the gradients' norm, the loss


@dataclass(frozen=True)
class Step:
    """parts: seconds on average over pipeline ranks, which add up to `seconds`: compute, exposed.<axis>, bubble, optimizer. sent,
    across: bytes of the pipeline rank that sends most, by axis; across: of these, to other nodes. matmul, attention:
    floating-point operations of a rank, on average. run: of the pipeline, one local batch. ends: of each pipeline rank, seconds
    of what is done once a step, before (gather) and after it (reduce, optimizer)."""

    seconds: float
    parts: dict[str, float]
    sent: dict[str, float]
    across: dict[str, float]
    matmul: float
    attention: float
    run: Timetable
    ends: Sequence[Mapping[str, float]] = ()


def simulate_step(layout: PlannedLayout, stages: Sequence[Figures], machine: Machine) -> Step:
    """Of `stages`, in their order, all with the figures for `machine`."""
    degree, itemsize = layout.degrees["pp"], getattr(torch, layout.config.training.dtype).itemsize
    forward = [seconds_of(figures, FORWARD) for figures in stages]
    backward = [seconds_of(figures, BACKWARD) + accumulate(layout, figures, machine) for figures in stages]

    def seconds(kind: str, stage: int) -> float:
        return {"F": forward[stage], "B": backward[stage]}.get(kind, backward[stage] / 2)

    neighbours = (0, layout.world_size // degree)
    travel = machine.send(stages[0]["activations.between"], *neighbours) if degree > 1 else 0.0
    run = run_order(order_of(layout.config.parallelism, layout.pipeline), seconds, travel)

    ranks = [layout.pipeline.stages_of(rank) for rank in range(degree)]
    own: list[dict[str, float]] = []
    for mine in ranks:
        parts: dict[str, float] = defaultdict(float)
        for stage in mine:
            for prefixes, times in (((*FORWARD, *BACKWARD), layout.microbatches), (ROUND, 1)):
                for part, value in waits_of(stages[stage], prefixes).items():
                    parts[part] += times * value
            parts["compute"] += layout.microbatches * accumulate(layout, stages[stage], machine)
            moved = (CLIPPING + UPDATE) * itemsize * stages[stage]["held"]
            parts["optimizer"] += machine.memory_traffic(moved)
        parts["optimizer"] += SMALL_SUMS * machine.collective("all_reduce", 8, range(layout.world_size))
        own.append(parts)
    ends = [
        {what: sum(seconds_of(stages[stage], (f"{what}.",)) for stage in mine) for what in ("gather", "reduce")}
        | {"optimizer": own[rank]["optimizer"]}
        for rank, mine in enumerate(ranks)
    ]
    total = layout.accumulation * run.seconds + max(sum(each.values()) for each in ends)
    mean: dict[str, float] = defaultdict(float)
    for parts in own:
        for part, value in parts.items():
            mean[part] += value / degree
    mean["bubble"] = total - sum(mean.values())

    def largest(what: str) -> dict[str, float]:
        sums: list[dict[str, float]] = []
        for mine in ranks:
            by_axis: dict[str, float] = defaultdict(float)
            for stage in mine:
                for key, value in stages[stage].items():
                    graph, _, figure = key.partition(".")
                    if figure.startswith(f"{what}."):
                        by_axis[figure.removeprefix(f"{what}.")] += value * (1 if f"{graph}." in ROUND else layout.microbatches)
            sums.append(by_axis)
        result = max(sums, key=lambda by_axis: sum(by_axis.values()))
        if degree > 1:
            crosses = len({rank // machine.ranks_per_node for rank in neighbours}) > 1
            hops = 2 * layout.microbatches * stages[0]["activations.between"] * max(map(len, ranks))
            result["pp"] = hops if what == "bytes" or crosses else 0.0
        return dict(result)

    def operations(what: str) -> float:
        each = [figures.get(f"{graph}{what}", 0.0) for figures in stages for graph in (*FORWARD, *BACKWARD)]
        return layout.microbatches * sum(each) / degree

    return Step(total, dict(mean), largest("bytes"), largest("across"), operations("matmul"), operations("attention"), run, ends)


def waits_of(figures: Figures, prefixes: Sequence[str]) -> dict[str, float]:
    """Seconds of computation, and exposed along each axis, of the graphs whose names are `prefixes`."""
    found: dict[str, float] = defaultdict(float)
    for key, value in figures.items():
        graph, _, figure = key.partition(".")
        if f"{graph}." in prefixes and (figure == "compute" or figure.startswith("exposed.")):
            found[figure] += value
    return found


def seconds_of(figures: Figures, prefixes: Sequence[str]) -> float:
    return sum(waits_of(figures, prefixes).values())


def accumulate(layout: PlannedLayout, figures: Figures, machine: Machine) -> float:
    """Seconds in which a microbatch's gradients are added to those before: of whole weights, or of shards."""
    if layout.microbatches == 1:
        return 0.0
    training = layout.config.training
    computed, summed = (
        getattr(torch, name).itemsize for name in (training.mixed_precision_param, training.mixed_precision_reduce)
    )
    if layout.gathers_once:
        return machine.memory_traffic(figures["whole"] * (computed + 2 * summed))
    return machine.memory_traffic(3 * getattr(torch, training.dtype).itemsize * figures["held"])
