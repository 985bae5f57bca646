"""Check the actions of every rank of a pipeline: pure Python, no tensors.

    for what in wrong_actions(order_of(config.parallelism, layout.pipeline), layout.pipeline):
        ...                                 # in words; none if the schedule is right

Each rank goes through its own list, as in a plan (tools/plan/timetable.py), and all must come to
their ends.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator

from titan_lite.distributed.pipeline_schedule import Order, PipelineSchedule, computations
from titan_lite.tools.plan.timetable import run_order


def wrong_actions(order: Order, pipeline: PipelineSchedule) -> Iterator[str]:
    """Yield what is wrong with the actions of each rank: missing, doubled, of another rank's stage,
    or in an order in which ranks wait for ever.
    """
    for rank, actions in order.items():
        own = set(itertools.product(pipeline.stages_of(rank), range(pipeline.microbatches)))
        kinds: dict[tuple[int, int | None], list[str]] = defaultdict(list)
        for kind, stage, microbatch in computations(actions):
            kinds[stage, microbatch].append(kind)
        for stage, microbatch in kinds:
            if (stage, microbatch) not in own:
                yield (
                    f"pipeline rank {rank} has microbatch {microbatch} of stage {stage}, which is"
                    " not its own"
                )
        for stage, microbatch in sorted(own):
            done = "".join(sorted(kinds[stage, microbatch]))
            if done not in ("BF", "FIW"):
                yield (
                    f"pipeline rank {rank}: microbatch {microbatch} of stage {stage} has"
                    f" {done or 'nothing'}, not F and B, or F, I and W"
                )
    try:
        run_order(order, lambda kind, stage: 1.0)
    except ValueError as stuck:
        yield str(stuck)
