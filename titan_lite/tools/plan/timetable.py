"""Simulate the order of a pipeline schedule: when each action begins and ends.

timetable = run_order(order, lambda kind, stage: 2.0 if kind == "B" else 1.0)
timetable.seconds, timetable.actions[0]
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from titan_lite.distributed.pipeline_schedule import Order, computations

# kind of action -> actions that must be done before it: (stage relative to its own, kind). I counts
# as B for the stage before.
NEEDS = {"F": [(-1, "F")], "B": [(0, "F"), (1, "B")], "I": [(0, "F"), (1, "B")], "W": [(0, "B")]}


@dataclass(frozen=True)
class Timetable:
    """Times of the computations of a schedule, by rank."""

    # by rank: (F, B, I or W; stage; microbatch; begin in s; end in s)
    actions: Mapping[int, Sequence[tuple[str, int, int, float, float]]]

    @property
    def seconds(self) -> float:
        ends = [end for actions in self.actions.values() for *_, end in actions]
        return max(ends, default=0.0)


def run_order(order: Order, seconds: Callable[[str, int], float], travel: float = 0.0) -> Timetable:
    """Simulate a schedule.

    seconds: (F, B, I or W; stage) -> duration; travel: seconds to send a result to another rank,
    which computes nothing else while it waits.

    Raises ValueError if actions wait for each other, or for one that is missing.
    """
    queues = {rank: computations(actions) for rank, actions in order.items()}
    rank_of = {stage: rank for rank, queue in queues.items() for _, stage, _ in queue}
    last_stage = max(rank_of, default=0)
    ends: dict[tuple[int, str, int | None], float] = {}  # (stage, F, B or W, microbatch) -> end
    free = dict.fromkeys(queues, 0.0)  # by rank: the end of its last action
    timetable: dict[int, list] = {rank: [] for rank in queues}

    def start_of(rank: int, kind: str, stage: int, microbatch: int | None) -> float | None:
        """Return the earliest start of an action; None if one that it needs is not done."""
        start = free[rank]
        for offset, needed_kind in NEEDS[kind]:
            needed = (stage + offset, needed_kind, microbatch)
            if not 0 <= stage + offset <= last_stage:
                continue
            if needed not in ends:
                return None
            arrival = ends[needed] + (travel if rank_of[needed[0]] != rank else 0.0)
            start = max(start, arrival)
        return start

    while any(queues.values()):
        progress = False
        for rank, queue in queues.items():
            while queue:
                kind, stage, microbatch = queue[0]
                start = start_of(rank, kind, stage, microbatch)
                if start is None:
                    break
                end = start + seconds(kind, stage)
                free[rank] = end
                ends[stage, "B" if kind == "I" else kind, microbatch] = end
                timetable[rank].append((kind, stage, microbatch, start, end))
                queue.pop(0)
                progress = True
        if not progress:
            waiting = [f"{rank} at {queue[0]}" for rank, queue in queues.items() if queue]
            raise ValueError(f"pipeline ranks wait for each other: {', '.join(waiting)}")
    return Timetable(timetable)
