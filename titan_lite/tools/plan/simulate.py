"""Simulate an optimizer step from the costs of its pipeline stages: the time of each part, and all
waits.

    step = simulate_step(layout, stages, machine)       # stages: StageCosts of each pipeline stage
    step.seconds, step.parts["exposed.tp"]

A pipeline is simulated action by action in the order of its schedule, with the cost of each stage.
On GPUs, a step takes as long as on the slowest of all ranks (`slowest_of`).
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from titan_lite.config import Config
from titan_lite.cost.costs import ByAxis, Costs
from titan_lite.cost.machine import Machine
from titan_lite.distributed.pipeline_schedule import Order, computations, order_of
from titan_lite.tools.plan.costs import GRAPH_OF_ACTION, StageCosts
from titan_lite.tools.plan.owned import Owned, owned_matrices
from titan_lite.tools.plan.rank_bytes import (
    STORED_BYTES,
    algorithms_of,
    copied_table_shard,
    itemsizes,
    share_of_matrices,
    update_bytes,
)
from titan_lite.tools.plan.timetable import Timetable, run_order
from titan_lite.tools.plan.trace import PlannedLayout

SCALAR_ALL_REDUCES = 3  # of one number: tokens, gradient norm, loss
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
    sent: ByAxis  # bytes of the pipeline rank that sends most
    across: ByAxis  # the part of `sent` to other nodes
    flops: float  # floating-point operations of a rank, on average
    run: Timetable  # of the pipeline, for one local batch
    # Seconds once per step by pipeline rank: gather before the microbatches, others after them.
    ends: Sequence[Mapping[str, float]] = ()


@dataclass(frozen=True)
class _Rank:
    """The work of a pipeline rank in a step."""

    busy: float  # seconds of forward and backward of a local batch
    step: Costs  # without accumulation, update and pipeline
    accumulating: float  # seconds
    update: dict[str, float]  # seconds, by part
    ends: dict[str, float]  # as in StepTimes

    @property
    def parts(self) -> dict[str, float]:
        """Seconds, as in StepTimes."""
        exposed = {f"exposed.{axis}": seconds for axis, seconds in self.step.exposed.items()}
        return {"compute": self.step.compute + self.accumulating, **exposed, **self.update}


def simulate_step(
    layout: PlannedLayout, stages: Sequence[StageCosts], machine: Machine
) -> StepTimes:
    """Simulate a step. stages: the costs of each stage, in order, on `machine`."""
    degree = layout.degrees["pp"]
    owned = owned_matrices(layout, machine)
    order = order_of(layout.config.parallelism, layout.pipeline)
    accumulation = [accumulation_seconds(layout, stage, machine) for stage in stages]
    run = _run_pipeline(layout, order, stages, accumulation, machine)
    ranks = []
    for rank in range(degree):
        own = layout.pipeline.stages_of(rank)
        costs = [stages[stage] for stage in own]
        step = _sum_of_step(layout, stages, rank, order)
        accumulating = layout.microbatches * sum(accumulation[stage] for stage in own)
        update = _update_parts(layout, rank, costs, owned, machine)
        busy = sum(end - begin for *_, begin, end in run.actions[rank])
        ranks.append(_Rank(busy, step, accumulating, update, _ends_of_step(costs, update)))

    pipeline = layout.accumulation * run.seconds
    if machine.ranks_per_core > 1:  # while a rank waits, others have its core
        busiest = layout.accumulation * max(times.busy for times in ranks)
        pipeline = max(pipeline / machine.ranks_per_core, busiest)
    seconds = pipeline + max(sum(times.ends.values()) for times in ranks)

    mean: dict[str, float] = defaultdict(float)
    for times in ranks:
        for part, value in times.parts.items():
            mean[part] += value / degree
    mean["bubble"] = max(0.0, seconds - sum(mean.values()))  # rounding may leave less
    all_ends = [times.ends for times in ranks]
    if machine.multiprocessors:  # what a run measured is of its slowest rank
        slowest = seconds * (slowest_of(layout.world_size) - 1)
        mean["exposed.slowest"] = slowest
        seconds += slowest
        all_ends = [{**ends, "slowest": slowest} for ends in all_ends]

    sent = _of_rank_with_most([times.step.sent for times in ranks])
    across = _of_rank_with_most([times.step.sent_to_other_nodes for times in ranks])
    if degree > 1:
        # Of each microbatch, a stage sends hidden states to the next one and gradients back. All
        # ranks have as many stages.
        hidden = 2 * layout.microbatches * stages[0].hidden_bytes * (len(stages) // degree)
        sent["pp"] = hidden
        across["pp"] = hidden if machine.nodes(_neighbours(layout)) > 1 else 0.0
    if layout.sends_table:
        table_bytes = STORED_BYTES * copied_table_shard(layout)
        sent["pp"] += table_bytes
        across["pp"] += table_bytes if machine.nodes(_ends_of_pipeline(layout)) > 1 else 0.0
    if owned.sent:
        sent["owners"] = owned.sent
        across["owners"] = owned.across
    return StepTimes(
        seconds=seconds,
        parts=dict(mean),
        sent=sent,
        across=across,
        flops=sum(times.step.flops for times in ranks) / degree,
        run=run,
        ends=all_ends,
    )


def _sum_of_step(
    layout: PlannedLayout, stages: Sequence[StageCosts], rank: int, order: Order
) -> Costs:
    """Return the costs of a pipeline rank's stages in a step."""
    total = Costs()
    actions = Counter((kind, stage) for kind, stage, _ in computations(order[rank]))
    for (kind, stage), count in actions.items():
        total.add(stages[stage].of_action(kind), layout.accumulation * count)
    for stage in layout.pipeline.stages_of(rank):
        for costs in stages[stage].once.values():
            total.add(costs)
    return total


def _run_pipeline(
    layout: PlannedLayout,
    order: Order,
    stages: Sequence[StageCosts],
    accumulation: Sequence[float],
    machine: Machine,
) -> Timetable:
    """Return when the actions of a local batch run. accumulation: seconds of each stage."""
    of_action = {
        kind: [stage.of_action(kind).seconds for stage in stages] for kind in GRAPH_OF_ACTION
    }

    def seconds(kind: str, stage: int) -> float:
        makes_weight_gradients = kind in ("B", "W")
        return of_action[kind][stage] + (accumulation[stage] if makes_weight_gradients else 0.0)

    travel = 0.0
    if layout.degrees["pp"] > 1:
        travel = machine.send(stages[0].hidden_bytes, *_neighbours(layout))
    return run_order(order, seconds, travel)


def _neighbours(layout: PlannedLayout) -> tuple[int, int]:
    """Return the first global rank of the first pipeline rank, and that of the second one."""
    return 0, layout.world_size // layout.degrees["pp"]


def _ends_of_pipeline(layout: PlannedLayout) -> tuple[int, int]:
    """Return the first global ranks of the pipeline ranks with the first and the last stage."""
    _, stride = _neighbours(layout)
    return stride * layout.pipeline.rank_of[0], stride * layout.pipeline.rank_of[-1]


def table_seconds(layout: PlannedLayout, machine: Machine) -> float:
    """Return the seconds in which a tied table's gradients are added up, and the table is copied to
    the last stage (distributed/tied_table.py): two transfers that nothing hides.
    """
    if not layout.copies_table:
        return 0.0
    nbytes = STORED_BYTES * copied_table_shard(layout)
    additions = machine.memory_traffic(3 * nbytes)  # reads two gradients, writes one
    if layout.sends_table:
        return additions + 2 * machine.send(nbytes, *_ends_of_pipeline(layout))
    return additions + machine.memory_traffic(2 * nbytes)


def _update_parts(
    layout: PlannedLayout,
    rank: int,
    stages: Sequence[StageCosts],
    owned: Owned,
    machine: Machine,
) -> dict[str, float]:
    """Return the seconds of the parts of a pipeline rank's update, by part."""
    matrices = share_of_matrices(layout.shapes_of_rank)
    per_element = updated_bytes(layout.config, matrices)
    elements = sum(stage.shard_elements for stage in stages)
    first, last = layout.pipeline.rank_of[0], layout.pipeline.rank_of[-1]
    if rank == last:
        elements -= copied_table_shard(layout)
    sums = SCALAR_ALL_REDUCES * machine.collective("all_reduce", 8, range(layout.world_size))
    parts = {"optimizer": machine.memory_traffic(per_element * elements) + sums}
    if layout.copies_table and rank in (first, last):
        part = "exposed.pp" if layout.sends_table else "optimizer"
        parts[part] = parts.get(part, 0.0) + table_seconds(layout, machine)
    if owned.computing:
        parts["owners"] = owned.computing
        parts["exposed.owners"] = owned.waiting
    return parts


def _ends_of_step(stages: Sequence[StageCosts], update: Mapping[str, float]) -> dict[str, float]:
    """Return a rank's seconds once per step, as in StepTimes."""
    ends = {
        name: sum(stage.once[name].seconds for stage in stages if name in stage.once)
        for name in ("gather", "reduce", "after_backward")
    }
    ends["optimizer"] = sum(update.values())
    return ends


def _of_rank_with_most(by_rank: Sequence[ByAxis]) -> ByAxis:
    most = max(by_rank, key=lambda by_axis: sum(by_axis.values()))
    return dict(most)


def slowest_of(ranks: int) -> float:
    """Return the expected maximum of so many normal step times, relative to the mean (Blom,
    Statistical Estimates, 1958).
    """
    if ranks == 1:
        return 1.0
    return 1 + DEVIATION * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


def updated_bytes(config: Config, matrices: float = 0.0) -> float:
    """Return the bytes that clipping and the optimizer read and write per local parameter.

    matrices: share of the parameters in matrices within blocks.

    The norm reads gradients, clipping reads and writes them.
    """
    clipping = 3 * STORED_BYTES
    optimizer = config.optimizer
    of_matrix, of_other = (update_bytes(optimizer, each) for each in algorithms_of(optimizer))
    return clipping + (1 - matrices) * of_other + matrices * of_matrix


def accumulation_seconds(layout: PlannedLayout, stage: StageCosts, machine: Machine) -> float:
    """Return the seconds to add a microbatch's gradients to those before it.

    They are of full weights if these are gathered once a step, else of shards.
    """
    if layout.microbatches == 1:
        return 0.0
    if layout.gathers_once:
        computed, summed = itemsizes(layout.config.training)
        return machine.memory_traffic(stage.full_elements * (computed + 2 * summed))
    return machine.memory_traffic(3 * STORED_BYTES * stage.shard_elements)
