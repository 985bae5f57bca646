"""Check the actions of every rank of a pipeline: pure Python, no tensors.

    for what in wrong_actions(config.parallelism, layout.pipeline):
        ...                                 # in words; none if the schedule is right

Each rank goes through its own list, as in a plan (tools/plan/timetable.py), and all must come to
their ends.
"""

from collections import Counter
from collections.abc import Iterator

from titan_lite.config import Parallelism
from titan_lite.distributed.pipeline_schedule import Order, PipelineSchedule, computations, order_of
from titan_lite.tools.plan.timetable import run_order


def wrong_actions(parallelism: Parallelism, pipeline: PipelineSchedule) -> Iterator[str]:
    """Yield what is wrong with the schedule of a recipe, in words."""
    yield from wrong_in(order_of(parallelism, pipeline), pipeline)


def wrong_in(order: Order, pipeline: PipelineSchedule) -> Iterator[str]:
    """Yield what is wrong with the actions of each rank."""
    yield from _wrong_counts(order, pipeline)
    try:
        run_order(order, lambda kind, stage: 1.0)
    except ValueError as stuck:
        yield str(stuck)


def _wrong_counts(order: Order, pipeline: PipelineSchedule) -> Iterator[str]:
    """Yield actions that are missing, on another rank, or done twice."""
    for rank, actions in order.items():
        stages = pipeline.stages_of(rank)
        counts = Counter(computations(actions))
        for kind, stage, microbatch in counts:
            if stage not in stages:
                yield f"pipeline rank {rank} has {kind} of stage {stage}, which is not its own"
            if microbatch not in range(pipeline.microbatches):
                yield f"pipeline rank {rank} has {kind} of microbatch {microbatch}, which is none"
            if counts[kind, stage, microbatch] > 1:
                yield f"pipeline rank {rank} has {kind}{microbatch} of stage {stage} twice"
        for stage in stages:
            for microbatch in range(pipeline.microbatches):
                done = "".join(kind for kind in "FBIW" if counts[kind, stage, microbatch])
                if done not in ("FB", "FIW"):
                    yield (
                        f"pipeline rank {rank}: microbatch {microbatch} of stage {stage} has"
                        f" {done or 'nothing'}, not F and B, or F, I and W"
                    )
