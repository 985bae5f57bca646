"""Plan a pipeline: the modules and the rank of each stage, and the order of actions.

Needs no process group.

plan = plan_pipeline(config.parallelism, n_layers=32, tied=False, local_batch_size=8, ...)
plan.modules[0]                                # ("tok_embeddings", "layers.0", ..., "layers.6")
order = order_of(config.parallelism, plan)     # {0: [0F0, 0F1, ...], 1: ...}: stage, kind, microbatch
bubble_fraction(order)                         # the share of time in which ranks are idle
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

from titan_lite.config import ConfigError, Parallelism

if TYPE_CHECKING:  # torch is imported late: most plans are checked without it
    from torch.distributed.pipelining.schedules import _Action

Order: TypeAlias = (
    "Mapping[int, Sequence[_Action | None]]"  # the actions of each pipeline rank, in order
)
STAGES_PER_RANK = {
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "ZBVZeroBubble": 2,
}  # Interleaved1F1B: or more
# kind of action -> actions that must be done before it: (stage relative to its own, kind). I counts
# as B for the stage before.
NEEDS = {"F": [(-1, "F")], "B": [(0, "F"), (1, "B")], "I": [(0, "F"), (1, "B")], "W": [(0, "B")]}


class TooFewLayers(ConfigError):
    """The model has too few layers for the stages."""


@dataclass(frozen=True)
class PipelineSchedule:
    """The split of a model into stages, and their ranks."""

    modules: tuple[tuple[str, ...], ...]  # FQNs of each stage
    rank_of: tuple[int, ...]  # the pipeline rank of each stage
    microbatches: int  # of one local batch

    def stages_of(self, rank: int) -> list[int]:
        return [stage for stage, owner in enumerate(self.rank_of) if owner == rank]


def plan_pipeline(
    parallelism: Parallelism,
    *,
    n_layers: int,
    tied: bool,
    local_batch_size: int,
    compiled: bool,
    checkpointed: bool,
) -> PipelineSchedule:
    """Return the modules and the rank of every stage.

    Raises ConfigError for a pipeline that cannot run.

    tied: embedding and output share a weight. compiled: stages or the loss are. checkpointed:
    activations are.
    """
    degree = parallelism.pipeline_parallel_degree
    wrong = f"parallelism.pipeline_parallel_degree = {degree}"
    modules = module_fqns(n_layers)
    if degree == 1:
        return PipelineSchedule((tuple(modules),), (0,), 1)
    if tied:
        raise ConfigError(
            f"{wrong}: this flavor's embedding and output are one weight, which the first and the"
            " last stage would both need; use pipeline_parallel_degree = 1, an untied flavor such"
            ' as 8B, or model.tied_embeddings = "no"'
        )
    size = parallelism.pipeline_parallel_microbatch_size
    if local_batch_size % size:
        fix = " or ".join(
            str(n) for n in range(1, local_batch_size + 1) if local_batch_size % n == 0
        )
        raise ConfigError(
            f"parallelism.pipeline_parallel_microbatch_size = {size} does not divide"
            f" training.local_batch_size = {local_batch_size}; use {fix}"
        )
    microbatches = local_batch_size // size
    name = parallelism.pipeline_parallel_schedule
    key = f'parallelism.pipeline_parallel_schedule = "{name}"'
    rank_of = _ranks_of_stages(parallelism, microbatches)
    halves = name == "ZBVZeroBubble"
    if halves and compiled:
        raise ConfigError(
            f"{key} cuts backward in two, which a compiled graph cannot be (compile.enable = true);"
            ' use compile.enable = false or "Interleaved1F1B"'
        )
    if halves and checkpointed:
        raise ConfigError(
            f"{key} cuts backward in two, and each half would recompute every block, the second one"
            ' once for each weight; use activation_checkpoint.mode = "none" or "Interleaved1F1B"'
        )
    stages = _split(modules, len(rank_of), parallelism)
    return PipelineSchedule(tuple(map(tuple, stages)), rank_of, microbatches)


def module_fqns(n_layers: int) -> list[str]:
    """Return the modules that stages are made of, in the order of forward."""
    return ["tok_embeddings", *(f"layers.{i}" for i in range(n_layers)), "norm", "output"]


def _ranks_of_stages(parallelism: Parallelism, microbatches: int) -> tuple[int, ...]:
    """Return the rank of each stage.

    Raises ConfigError for a schedule that does not fit the microbatches or the degree.
    """
    degree, name = parallelism.pipeline_parallel_degree, parallelism.pipeline_parallel_schedule
    given, usual = parallelism.pipeline_parallel_stages_per_rank, STAGES_PER_RANK[name]
    per_rank = usual if given == -1 else given
    if per_rank != usual and (name != "Interleaved1F1B" or per_rank < 2):
        raise ConfigError(
            f"parallelism.pipeline_parallel_stages_per_rank = {given}: pipeline_parallel_schedule ="
            f' "{name}" has {usual}'
            f"{' or more' if name == 'Interleaved1F1B' else ''}; use -1 or {usual}"
            + (
                ""
                if name == "Interleaved1F1B"
                else ', or "Interleaved1F1B"'
                if per_rank > 1
                else ', or "1F1B"'
            )
        )
    key = f'parallelism.pipeline_parallel_schedule = "{name}"'
    batch = (
        f"training.local_batch_size / pipeline_parallel_microbatch_size = {microbatches}"
        " microbatches"
    )
    if name == "1F1B" and microbatches < degree:
        raise ConfigError(
            f"{key} needs as many microbatches as stages, {degree}, but {batch}; use {degree} of"
            ' them, or "GPipe"'
        )
    rounds = max(1, microbatches // degree)
    if name == "Interleaved1F1B" and microbatches % rounds:
        raise ConfigError(
            f"{key} with {degree} ranks goes in {rounds} rounds, which do not divide {batch}; use"
            f" {microbatches // degree * degree} or {(microbatches // degree + 1) * degree} of them"
        )
    if name == "ZBVZeroBubble":
        return (*range(degree), *reversed(range(degree)))
    return tuple(range(degree)) * per_rank


def _split(modules: list[str], stages: int, parallelism: Parallelism) -> list[list[str]]:
    """Cut `modules` into `stages` consecutive parts, at the split points or else with equal numbers
    of layers.
    """
    points = parallelism.pipeline_parallel_split_points
    if points:
        key = f"parallelism.pipeline_parallel_split_points = [{', '.join(points)}]"
        unknown = [point for point in points if point not in modules[1:]]
        if unknown:
            raise ConfigError(
                f"{key}: there is no module {unknown[0]} to begin a stage with; use {modules[1]} to"
                f" {modules[-3]}, norm or output"
            )
        if len(points) != stages - 1:
            raise ConfigError(
                f"{key} makes {len(points) + 1} stages, but the schedule has {stages}; use"
                f" {stages - 1} points"
            )
        starts = [modules.index(point) for point in points]
        if starts != sorted(set(starts)):
            raise ConfigError(
                f"{key} are not in the order of the model; use"
                f" {', '.join(sorted(set(points), key=modules.index))}"
            )
        return [modules[start:end] for start, end in itertools.pairwise([0, *starts, len(modules)])]
    layers = modules[1:-2]
    less = [0] * stages
    less[0] += parallelism.pipeline_parallel_first_stage_less_layers
    less[-1] += parallelism.pipeline_parallel_last_stage_less_layers
    share, more = divmod(len(layers) + sum(less), stages)
    # The remainder goes to late stages, which have fewer microbatches in flight.
    counts = [share + (stage >= stages - more) - less[stage] for stage in range(stages)]
    if min(counts) < 0 or 0 in counts[1:-1]:
        raise TooFewLayers(
            f"parallelism.pipeline_parallel_degree = {parallelism.pipeline_parallel_degree}:"
            f" {stages} stages for {len(layers)} layers give {', '.join(map(str, counts))}; use"
            " fewer stages, smaller pipeline_parallel_first_stage_less_layers and"
            " pipeline_parallel_last_stage_less_layers, or pipeline_parallel_split_points"
        )
    parts = [
        layers[start:end]
        for start, end in itertools.pairwise(itertools.accumulate(counts, initial=0))
    ]
    parts[0] = ["tok_embeddings", *parts[0]]
    parts[-1] = [*parts[-1], "norm", "output"]
    return parts


def one_stage_order(schedule: str, degree: int, microbatches: int) -> Order:
    """Return the order of "GPipe" or "1F1B"."""
    from torch.distributed.pipelining.schedules import _Action

    order = {}
    for rank in range(degree):
        ahead = (
            microbatches if schedule == "GPipe" else min(microbatches, degree - rank)
        )  # forwards before the first backward
        kinds = "F" * ahead + "BF" * (microbatches - ahead) + "B" * ahead
        order[rank] = [
            _Action.from_str(f"{rank}{kind}{kinds[:i].count(kind)}") for i, kind in enumerate(kinds)
        ]
    return order


def order_of(parallelism: Parallelism, plan: PipelineSchedule) -> Order:
    """Return the actions of each pipeline rank. Needs no stages, only their plan."""
    from torch.distributed.pipelining.schedules import get_schedule_class

    degree, name = parallelism.pipeline_parallel_degree, parallelism.pipeline_parallel_schedule
    # Torch's classes of one stage a rank miscount the last stage's microbatches (torch 2.13), and
    # do not run by this order.
    if degree == 1 or STAGES_PER_RANK[name] == 1:
        return one_stage_order(name, degree, plan.microbatches)
    counts = dict(
        num_stages=len(plan.rank_of), group_size=degree, group_rank=0, submod=None, is_last=False
    )
    stages: Any = [SimpleNamespace(stage_index=stage, **counts) for stage in plan.stages_of(0)]
    schedule: Any = get_schedule_class(name)
    order: Order = schedule(stages, plan.microbatches).pipeline_order
    return order


@dataclass(frozen=True)
class Timetable:
    """Times of the computations of a schedule, by rank."""

    actions: Mapping[
        int, Sequence[tuple[str, int, int, float, float]]
    ]  # (F, B, I or W; stage; microbatch; begin s; end s)

    @property
    def seconds(self) -> float:
        return max((end for row in self.actions.values() for *_, end in row), default=0.0)


def computations(actions: "Sequence[_Action | None]") -> list[tuple[str, int, int | None]]:
    """Return (F, B, I or W; stage; microbatch) of each computation of one rank."""
    each = [
        part for action in actions if action is not None for part in action.sub_actions or (action,)
    ]
    found = [
        (part.computation_type.value, part.stage_index, part.microbatch_index) for part in each
    ]
    return [computation for computation in found if computation[0] in "FBIW"]


def run_order(order: Order, seconds: Callable[[str, int], float], travel: float = 0.0) -> Timetable:
    """Simulate a schedule.

    seconds: (F, B, I or W; stage) -> duration; travel: seconds to send a result to another rank,
    which computes nothing else while it waits.

    Raises AssertionError if actions wait for each other, or for one that is missing.
    """
    queues = {rank: computations(actions) for rank, actions in order.items()}
    owner = {stage: rank for rank, queue in queues.items() for _, stage, _ in queue}
    last = max(owner, default=0)
    done: dict[tuple[int, str, int | None], float] = {}  # (stage, F, B or W, microbatch) -> end
    free = dict.fromkeys(queues, 0.0)
    found: dict[int, list] = {rank: [] for rank in queues}
    while any(queues.values()):
        progress = False
        for rank, queue in queues.items():
            while queue:
                kind, stage, microbatch = queue[0]
                needs = [
                    (stage + on, before, microbatch)
                    for on, before in NEEDS[kind]
                    if 0 <= stage + on <= last
                ]
                if any(need not in done for need in needs):
                    break
                begin = max(
                    [
                        free[rank],
                        *(
                            done[need] + (travel if owner[need[0]] != rank else 0.0)
                            for need in needs
                        ),
                    ]
                )
                free[rank] = done[stage, "B" if kind == "I" else kind, microbatch] = (
                    begin + seconds(kind, stage)
                )
                found[rank].append((kind, stage, microbatch, begin, free[rank]))
                queue.pop(0)
                progress = True
        waiting = [(rank, *queue[0]) for rank, queue in queues.items() if queue]
        stuck = ", ".join(
            f"rank {rank} at {stage}{kind}{microbatch}" for rank, kind, stage, microbatch in waiting
        )
        assert progress or not stuck, f"actions wait for each other: {stuck}"
    return Timetable(found)


def bubble_fraction(order: Order) -> float:
    """Return the share of time in which ranks are idle, if F, I and W take 1, B takes 2 and sending
    takes 0.

    Raises AssertionError as `run_order` does.
    """
    timetable = run_order(order, lambda kind, stage: 2.0 if kind == "B" else 1.0)
    busy = sum(end - begin for row in timetable.actions.values() for *_, begin, end in row)
    return 1 - busy / (timetable.seconds * len(order))
