"""The schedules of a pipeline: the stages of a rank, and the halves of a backward. Needs no torch.

    SCHEDULES["Interleaved1F1B"].stages_per_rank        # 2

torch.distributed.pipelining has them by these names. Features have other ones, whose rows they add
(SCHEDULES in their keys.py, as dicts: keys are imported before this table).
"""

from dataclasses import dataclass

from titan_lite.features import part_of_each


@dataclass(frozen=True)
class ScheduleKind:
    """A schedule, but for the order of its actions."""

    about: str  # stages per rank, in words for the help
    stages_per_rank: int  # its own number
    # stages go round the ranks, stages_per_rank times or more
    goes_round: bool = False
    # stages go down the ranks and back, so that the first and the last one share a rank
    is_v_shaped: bool = False
    # backward is split in two, which may run apart: gradients of inputs, and of weights
    splits_backward: bool = False


SCHEDULES = {  # by parallelism.pipeline_parallel_schedule
    "1F1B": ScheduleKind("one", 1),
    "GPipe": ScheduleKind("one, all forwards first", 1),
    "Interleaved1F1B": ScheduleKind("two or more", 2, goes_round=True),
}
for _keys in part_of_each("keys"):
    for _name, _row in getattr(_keys, "SCHEDULES", {}).items():
        SCHEDULES[_name] = ScheduleKind(**_row)
