"""Compute a rank's peak memory and its moment, from liveness in the scheduled graphs and the order of the pipeline schedule.

memory = memory_of(layout, stages)                        # stages: the figures of each pipeline stage (costs.py)
memory.peak, memory.rows["activations"]                   # bytes
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from titan_lite.compiler.hardware import GIB
from titan_lite.distributed.pipeline_plan import computations, order_of
from titan_lite.layout import itemsizes
from titan_lite.plan.costs import Figures
from titan_lite.plan.trace import PlannedLayout

# Fraction of temporary memory: CUDA's caching allocator keeps blocks of sizes that nothing reuses.
SLACK = 0.04
# Bytes outside of tensors: CUDA's context and kernels, cuBLAS's workspaces, NCCL's buffers.
OUTSIDE = 2.0 * GIB


@dataclass(frozen=True)
class Memory:
    """The memory of the pipeline rank that needs most, in bytes."""

    rank: int  # of the pipeline
    moment: str  # of the peak
    rows: dict[str, float]  # parts of the peak
    slack: float  # reserved by the allocator in addition to the peak
    of_ranks: tuple[float, ...]  # peak of each pipeline rank

    @property
    def peak(self) -> float:
        return sum(self.rows.values())

    @property
    def reserved(self) -> float:
        """Return the expected `torch.cuda.max_memory_reserved`."""
        return self.peak + self.slack

    @property
    def total(self) -> float:
        return self.reserved + OUTSIDE


def memory_of(layout: PlannedLayout, stages: Sequence[Figures]) -> Memory:
    """Return the memory of a layout. stages: the figures of each stage, for any machine, since liveness does not depend on it."""
    found = [
        max(moments(layout, stages, rank), key=lambda moment: sum(moment[1].values())) for rank in range(layout.degrees["pp"])
    ]
    peaks = tuple(sum(rows.values()) for _, rows in found)
    rank = peaks.index(max(peaks))
    moment, rows = found[rank]
    steady = rows["parameters"] + rows["optimizer state"]
    return Memory(rank, moment, {name: value for name, value in rows.items() if value}, SLACK * (peaks[rank] - steady), peaks)


def moments(layout: PlannedLayout, stages: Sequence[Figures], rank: int) -> list[tuple[str, dict[str, float]]]:
    """Return (name, parts in bytes) of each moment of a step that may be the peak of pipeline rank `rank`."""
    held_as, computed, summed = itemsizes(layout.config.training)
    mine = layout.pipeline.stages_of(rank)

    def sum_of(key: str) -> float:
        return sum(stages[stage][key] for stage in mine)

    numbers = sum_of("held")
    steady = {
        "parameters": held_as * numbers + sum_of("buffers"),
        "optimizer state": 2 * held_as * numbers + 4 * sum_of("tensors"),  # two moments, and a step count per tensor
        "gradients": 0.0,
        "weights gathered for the step": computed * sum_of("whole") if layout.gathers_once else 0.0,
        "activations": 0.0,
        "working": 0.0,
    }
    found = []

    def moment(name: str, activations: float, working: float) -> None:
        found.append((name, {**steady, "activations": activations, "working": working, "gradients": gradients}))

    in_flight: dict[int, int] = defaultdict(int)
    gradients = 0.0
    after = summed * sum_of("whole") if layout.gathers_once else held_as * numbers if layout.microbatches > 1 else 0.0
    order = computations(order_of(layout.config.parallelism, layout.pipeline)[rank])
    for kind, stage, _ in order * min(2, layout.accumulation):  # in a second local batch, gradients of the first exist
        figures = stages[stage]
        pipeline, logits = _held_by_pipeline(layout, figures), figures.get("activations.logits", 0.0)
        in_flight[stage] -= kind in "BI"
        others = sum(count * kept(layout, stages[other]) for other, count in in_flight.items())
        here = others + figures["forward.saved"] + pipeline
        if kind == "F":
            moment("forward", others, peak(figures, "forward"))
            if logits:
                moment("loss", here, logits + peak(figures, "loss_forward"))
        elif kind in "BI":
            if logits:
                # freed after the loss, if its backward does not read them; a pipeline's stage keeps them
                read = min(logits, figures.get("loss_forward.inputs", 0.0)) if layout.degrees["pp"] == 1 else logits
                moment("backward of the loss", here, read + peak(figures, "loss_backward"))
            moment("backward, the last blocks", here, max(0.0, figures["backward.peak.start"] - figures["forward.saved"]))
            moment("backward, the first blocks", others + pipeline, figures["backward.peak.end"])
            gradients = after
        in_flight[stage] += kind == "F"
    gradients = held_as * numbers
    moment("optimizer step", 0.0, 0.0)
    return found


def peak(figures: Figures, graph: str) -> float:
    return max(figures[f"{graph}.peak.start"], figures[f"{graph}.peak.end"])


def kept(layout: PlannedLayout, figures: Figures) -> float:
    """Return the bytes kept for a microbatch between its forward and its backward."""
    logits = figures.get("activations.logits", 0.0) + figures.get("loss_forward.saved", 0.0)
    return figures["forward.saved"] + logits + _held_by_pipeline(layout, figures)


def _held_by_pipeline(layout: PlannedLayout, figures: Figures) -> float:
    """Return the bytes that torch's stages keep for a microbatch: the input and, except for logits, the output."""
    if layout.degrees["pp"] == 1:
        return 0.0
    return figures["activations.between"] * (2 if "activations.logits" not in figures else 1)
