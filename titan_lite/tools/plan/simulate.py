"""Simulate an optimizer step from the figures of its pipeline stages: the time of each part, and
all waits.

    step = simulate_step(layout, stages, machine)             # stages: the figures of each pipeline stage (costs.py)
    step.seconds, step.parts["exposed.tp"]

A pipeline is simulated action by action in the order of its schedule, with the cost of each stage.
On GPUs, a step takes as long as on the slowest of all ranks (`slowest_of`).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from titan_lite.config import Config
from titan_lite.cost.machine import Machine
from titan_lite.distributed.memory import STORED_BYTES, itemsizes
from titan_lite.distributed.pipeline_schedule import Timetable, order_of, run_order
from titan_lite.optim.state import costs_of, share_of_matrices
from titan_lite.tools.plan.costs import Figures
from titan_lite.tools.plan.owned import owned_matrices
from titan_lite.tools.plan.trace import PlannedLayout

FORWARD, BACKWARD = ("forward", "loss_forward"), ("backward", "loss_backward")
ROUND = ("gather", "reduce", "copies")
UPDATE = ("optimizer", "owners", "exposed.owners")  # parts of a step after the gradients
SMALL_SUMS = 3  # all-reduces of one number: tokens, gradient norm, loss
# GPUs of one kind are 8% apart on average without outliers (arXiv 2208.11035), the whiskers of a
# box plot, which are at 2.7 standard deviations on either side of a normal distribution.
DEVIATION = 0.08 / 5.4


@dataclass(frozen=True)
class StepTimes:
    """The times of a step."""

    seconds: float
    # Means over pipeline ranks, with the sum `seconds`: compute, bubble, optimizer, owners, and
    # exposed. with an axis, owners, host or slowest.
    parts: dict[str, float]
    sent: dict[str, float]  # bytes of the pipeline rank that sends most, by axis
    across: dict[str, float]  # the part of `sent` to other nodes
    matmul: float  # floating-point operations of a rank, on average
    attention: float  # the same
    run: Timetable  # of the pipeline, for one local batch
    ends: Sequence[
        Mapping[str, float]
    ] = ()  # seconds once per step by pipeline rank: gather before; others after


def simulate_step(layout: PlannedLayout, stages: Sequence[Figures], machine: Machine) -> StepTimes:
    """Simulate a step. stages: the figures of each stage, in order, for `machine`."""
    degree, owned = layout.degrees["pp"], owned_matrices(layout, machine)
    per_parameter = updated_bytes(layout.config, share_of_matrices(layout.shapes_of_rank))
    accumulating = [accumulate(layout, figures, machine) for figures in stages]
    forward = [seconds_of(figures, FORWARD) for figures in stages]
    backward = [
        seconds_of(figures, BACKWARD) + extra
        for figures, extra in zip(stages, accumulating, strict=True)
    ]

    def seconds(kind: str, stage: int) -> float:
        return {"F": forward[stage], "B": backward[stage]}.get(kind, backward[stage] / 2)

    neighbours = (0, layout.world_size // degree)
    travel = machine.send(stages[0]["activations.between"], *neighbours) if degree > 1 else 0.0
    run = run_order(order_of(layout.config.parallelism, layout.pipeline), seconds, travel)

    ranks = [layout.pipeline.stages_of(rank) for rank in range(degree)]

    def of_step(mine: Sequence[int], *what: str) -> dict[str, float]:
        """Return sums over a rank's stages and over a step."""
        found: dict[str, float] = defaultdict(float)
        for stage in mine:
            for graphs, times in (((*FORWARD, *BACKWARD), layout.microbatches), (ROUND, 1)):
                for figure, value in sums_of(stages[stage], graphs, what).items():
                    found[figure] += times * value
        return found

    mean: dict[str, float] = defaultdict(float)
    ends = []
    for mine in ranks:
        parts = of_step(mine, "compute", "exposed.")
        parts["compute"] += layout.microbatches * sum(accumulating[stage] for stage in mine)
        own = sum(stages[stage]["held"] for stage in mine)
        sums = SMALL_SUMS * machine.collective("all_reduce", 8, range(layout.world_size))
        parts["optimizer"] = machine.memory_traffic(per_parameter * own) + sums
        parts |= (
            {"owners": owned.computing, "exposed.owners": owned.waiting} if owned.computing else {}
        )
        for part, value in parts.items():
            mean[part] += value / degree
        end = {graph: sum(seconds_of(stages[stage], (graph,)) for stage in mine) for graph in ROUND}
        ends.append(end | {"optimizer": sum(parts.get(part, 0.0) for part in UPDATE)})
    pipeline = layout.accumulation * run.seconds
    if machine.ranks_per_core > 1:  # while a rank waits, others have its core
        busy = (sum(forward[stage] + backward[stage] for stage in mine) for mine in ranks)
        pipeline = max(pipeline / machine.ranks_per_core, layout.microbatches * max(busy))
    total = pipeline + max(sum(each.values()) for each in ends)
    mean["bubble"] = total - sum(mean.values())
    if machine.multiprocessors:  # figures that a run measured are those of its slowest rank
        mean["exposed.slowest"] = total * (slowest_of(layout.world_size) - 1)
        total += mean["exposed.slowest"]
        ends = [end | {"slowest": mean["exposed.slowest"]} for end in ends]

    def largest(what: str) -> dict[str, float]:
        by_axis = max((of_step(mine, what) for mine in ranks), key=lambda sums: sum(sums.values()))
        result = {figure.removeprefix(what): value for figure, value in by_axis.items()}
        if degree > 1:
            crosses = len({rank // machine.ranks_per_node for rank in neighbours}) > 1
            hops = 2 * layout.microbatches * stages[0]["activations.between"] * max(map(len, ranks))
            result["pp"] = hops if what == "bytes." or crosses else 0.0
        if owned.sent:
            result["owners"] = owned.sent if what == "bytes." else owned.across
        return result

    operations = of_step(range(len(stages)), "matmul", "attention")
    matmul, attention = (operations[what] / degree for what in ("matmul", "attention"))
    return StepTimes(
        total, dict(mean), largest("bytes."), largest("across."), matmul, attention, run, ends
    )


def slowest_of(ranks: int) -> float:
    """Return the expected maximum of so many normal step times, relative to the mean (Blom,
    Statistical Estimates, 1958).
    """
    return (
        1 + DEVIATION * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 1.0
    )


def updated_bytes(config: Config, matrices: float = 0.0) -> float:
    """Return the bytes that clipping and the optimizer read and write per local parameter.

    matrices: their share of parameters.

    The norm reads gradients, clipping reads and writes them; AdamW reads parameter, gradient and
    both moments, and writes all but the gradient.
    """
    clipping, by_adamw = 3 * STORED_BYTES, 7 * STORED_BYTES
    costs = costs_of(config.optimizer)
    by_owners = costs.update_bytes if costs.has_owners else by_adamw
    return clipping + (1 - matrices) * by_adamw + matrices * by_owners


def sums_of(figures: Figures, graphs: Sequence[str], what: tuple[str, ...]) -> dict[str, float]:
    """Return the sum over these graphs of each figure with a name that begins with one of `what`."""
    found: dict[str, float] = defaultdict(float)
    for key, value in figures.items():
        graph, _, figure = key.partition(".")
        if graph in graphs and figure.startswith(what):
            found[figure] += value
    return found


def seconds_of(figures: Figures, graphs: Sequence[str]) -> float:
    return sum(sums_of(figures, graphs, ("compute", "exposed.")).values())


def accumulate(layout: PlannedLayout, figures: Figures, machine: Machine) -> float:
    """Return the seconds to add a microbatch's gradients to those before, for full weights or for
    shards.
    """
    if layout.microbatches == 1:
        return 0.0
    computed, summed = itemsizes(layout.config.training)
    if layout.gathers_once:
        return machine.memory_traffic(figures["whole"] * (computed + 2 * summed))
    return machine.memory_traffic(3 * STORED_BYTES * figures["held"])
