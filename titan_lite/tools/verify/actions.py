"""Check the actions of every rank of a pipeline: pure Python, no tensors.

    for what in wrong_actions(config.parallelism, layout.pipeline):
        ...                                 # in words; none if the schedule is right

Each rank goes through its own list. Forward F of a microbatch needs that of the stage before; a
backward, B or its half I, needs its own forward and the backward of the stage behind; the half W
needs its I. All ranks must come to their ends.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from titan_lite.config import Parallelism
from titan_lite.distributed.pipeline_schedule import PipelineSchedule, computations, order_of

Action = tuple[str, int, int | None]  # F, B, I or W; stage; microbatch


def wrong_actions(parallelism: Parallelism, pipeline: PipelineSchedule) -> Iterator[str]:
    """Yield what is wrong with the schedule of a recipe, in words."""
    order = order_of(parallelism, pipeline)
    actions = [computations(order[rank]) for rank in range(parallelism.pipeline_parallel_degree)]
    yield from wrong_lists(actions, pipeline)


def wrong_lists(actions: Sequence[Sequence[Action]], pipeline: PipelineSchedule) -> Iterator[str]:
    """Yield what is wrong with the actions of each rank."""
    yield from _wrong_counts(actions, pipeline)
    yield from _stuck(actions, len(pipeline.modules))


def _wrong_counts(actions: Sequence[Sequence[Action]], pipeline: PipelineSchedule) -> Iterator[str]:
    """Yield actions that are missing, on another rank, or done twice."""
    for rank, own in enumerate(actions):
        stages = pipeline.stages_of(rank)
        counts = Counter(own)
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


def _stuck(actions: Sequence[Sequence[Action]], stages: int) -> Iterator[str]:
    """Yield the action at which each rank waits for ever."""
    done: set[Action] = set()
    left = [list(own) for own in actions]
    moves = True
    while moves:
        moves = False
        for own in left:
            while own and _can_run(own[0], done, stages):
                done.add(own.pop(0))
                moves = True
    for rank, own in enumerate(left):
        if own:
            kind, stage, microbatch = own[0]
            yield f"pipeline rank {rank} waits for ever at {kind}{microbatch} of stage {stage}"


def _can_run(action: Action, done: set[Action], stages: int) -> bool:
    kind, stage, microbatch = action
    if kind == "F":
        return stage == 0 or ("F", stage - 1, microbatch) in done
    if kind == "W":
        return ("I", stage, microbatch) in done
    behind = stage == stages - 1 or any(
        (half, stage + 1, microbatch) in done for half in ("B", "I")
    )
    return ("F", stage, microbatch) in done and behind
