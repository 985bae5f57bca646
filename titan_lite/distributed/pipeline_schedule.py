"""Split a model into pipeline stages, and order the actions of a schedule.

Needs no process group; torch is imported for the order alone.

    schedule = PipelineSchedule.from_config(config.parallelism, n_layers=32, local_batch_size=8)
    schedule.modules[0]                            # ("tok_embeddings", "layers.0", ..., "layers.6")
    order = order_of(config.parallelism, schedule)
    order[0]                                       # [0F0, 0F1, ...]: stage, kind, microbatch
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

from titan_lite.config import ConfigError, Parallelism
from titan_lite.config.errors import alternatives
from titan_lite.config.schedules import SCHEDULES
from titan_lite.models.shapes import module_fqns

if TYPE_CHECKING:  # torch is imported late: most recipes are checked without it
    from torch.distributed.pipelining.schedules import _Action

# The actions of each pipeline rank, in order.
Order: TypeAlias = "Mapping[int, Sequence[_Action | None]]"


class TooFewLayers(ConfigError):
    """The model has too few layers for the stages."""


@dataclass(frozen=True)
class PipelineSchedule:
    """The split of a model into stages, and their ranks."""

    modules: tuple[tuple[str, ...], ...]  # FQNs of each stage
    rank_of: tuple[int, ...]  # the pipeline rank of each stage
    microbatches: int  # of one local batch

    @classmethod
    def from_config(
        cls, parallelism: Parallelism, *, n_layers: int, local_batch_size: int
    ) -> "PipelineSchedule":
        """Return the modules and the rank of every stage, and the microbatches of a local batch.

        Raises ConfigError for a batch or layers that do not divide. Which schedules are
        possible is in rules/parallelism.py.
        """
        degree = parallelism.pipeline_parallel_degree
        modules = module_fqns(n_layers)
        if degree == 1:
            return cls(modules=(tuple(modules),), rank_of=(0,), microbatches=1)
        microbatch_size = parallelism.pipeline_parallel_microbatch_size
        if local_batch_size % microbatch_size:
            sizes = [n for n in range(1, local_batch_size + 1) if local_batch_size % n == 0]
            raise ConfigError(
                f"parallelism.pipeline_parallel_microbatch_size = {microbatch_size} does not divide"
                f" training.local_batch_size = {local_batch_size}; use"
                f" {alternatives(sizes)}"
            )
        ranks = _ranks_of_stages(parallelism)
        stages = _split(modules, len(ranks), parallelism)
        return cls(
            tuple(tuple(stage) for stage in stages), ranks, local_batch_size // microbatch_size
        )

    def stages_of(self, rank: int) -> list[int]:
        return [stage for stage, owner in enumerate(self.rank_of) if owner == rank]


def stages_per_rank(parallelism: Parallelism) -> int:
    """Return the stages of a rank: those that the recipe asks for, or the schedule's own number."""
    if parallelism.pipeline_parallel_stages_per_rank == -1:
        return SCHEDULES[parallelism.pipeline_parallel_schedule].stages_per_rank
    return parallelism.pipeline_parallel_stages_per_rank


def runs_halves(parallelism: Parallelism) -> bool:
    """Return True if the schedule splits backward in two."""
    is_split = parallelism.pipeline_parallel_degree > 1
    return is_split and SCHEDULES[parallelism.pipeline_parallel_schedule].splits_backward


def _ranks_of_stages(parallelism: Parallelism) -> tuple[int, ...]:
    """Return the rank of each stage."""
    degree = parallelism.pipeline_parallel_degree
    if SCHEDULES[parallelism.pipeline_parallel_schedule].is_v_shaped:
        return (*range(degree), *reversed(range(degree)))
    return tuple(range(degree)) * stages_per_rank(parallelism)


def _split(modules: list[str], stages: int, parallelism: Parallelism) -> list[list[str]]:
    """Cut `modules` into consecutive stages: at the split points, or else with equal layers."""
    if parallelism.pipeline_parallel_split_points:
        return _split_at_points(modules, stages, parallelism.pipeline_parallel_split_points)
    layers = modules[1:-2]
    less = [0] * stages
    less[0] += parallelism.pipeline_parallel_first_stage_less_layers
    less[-1] += parallelism.pipeline_parallel_last_stage_less_layers
    share, remainder = divmod(len(layers) + sum(less), stages)
    # The remainder goes to late stages, which have fewer microbatches in flight.
    counts = [share + (stage >= stages - remainder) - less[stage] for stage in range(stages)]
    if min(counts) < 0 or 0 in counts[1:-1]:
        instead = "fewer stages"
        if any(less):
            instead += (
                ", or smaller pipeline_parallel_first_stage_less_layers and"
                " pipeline_parallel_last_stage_less_layers"
            )
        raise TooFewLayers(
            f"parallelism.pipeline_parallel_degree = {parallelism.pipeline_parallel_degree}:"
            f" {stages} stages for {len(layers)} layers give {', '.join(map(str, counts))}; use"
            f" {instead}"
        )
    ends = itertools.accumulate(counts, initial=0)
    parts = [layers[start:end] for start, end in itertools.pairwise(ends)]
    parts[0] = ["tok_embeddings", *parts[0]]
    parts[-1] = [*parts[-1], "norm", "output"]
    return parts


def _split_at_points(modules: list[str], stages: int, points: Sequence[str]) -> list[list[str]]:
    """Cut `modules` before each of `points`. Raises ConfigError for points that make no stages."""
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
        in_order = sorted(set(points), key=modules.index)
        raise ConfigError(f"{key} are not in the order of the model; use {', '.join(in_order)}")
    return [modules[start:end] for start, end in itertools.pairwise([0, *starts, len(modules)])]


def one_stage_order(schedule: str, degree: int, microbatches: int) -> Order:
    """Return the order of "GPipe" or "1F1B"."""
    from torch.distributed.pipelining.schedules import _Action

    order = {}
    for rank in range(degree):
        # forwards before the first backward
        warmup = microbatches if schedule == "GPipe" else min(microbatches, degree - rank)
        kinds = "F" * warmup + "BF" * (microbatches - warmup) + "B" * warmup
        done = {"F": 0, "B": 0}
        actions = []
        for kind in kinds:
            actions.append(_Action.from_str(f"{rank}{kind}{done[kind]}"))
            done[kind] += 1
        order[rank] = actions
    return order


def order_of(parallelism: Parallelism, pipeline: PipelineSchedule) -> Order:
    """Return the actions of each pipeline rank. Needs no stages."""
    from torch.distributed.pipelining.schedules import get_schedule_class

    degree = parallelism.pipeline_parallel_degree
    name = parallelism.pipeline_parallel_schedule
    # Torch's classes of one stage a rank miscount the last stage's microbatches (torch 2.13), and
    # do not run by this order.
    if degree == 1 or SCHEDULES[name].stages_per_rank == 1:
        return one_stage_order(name, degree, pipeline.microbatches)
    stages: Any = [
        SimpleNamespace(  # what the schedule's constructor asks of a stage
            stage_index=stage,
            num_stages=len(pipeline.rank_of),
            group_size=degree,
            group_rank=0,
            submod=None,
            is_last=False,
        )
        for stage in pipeline.stages_of(0)
    ]
    schedule: Any = get_schedule_class(name)
    order: Order = schedule(stages, pipeline.microbatches).pipeline_order
    return order


def computations(actions: "Sequence[_Action | None]") -> list[tuple[str, int, int | None]]:
    """Return (F, B, I or W; stage; microbatch) of each computation of one rank.

    The first stage gives nobody a gradient, so torch runs all of its backward at W.
    """
    simple = [
        part for action in actions if action is not None for part in action.sub_actions or (action,)
    ]
    computed = []
    for action in simple:
        kind = action.computation_type.value
        if action.stage_index == 0 and kind == "I":
            continue
        if action.stage_index == 0 and kind == "W":
            kind = "B"
        if kind in "FBIW":
            computed.append((kind, action.stage_index, action.microbatch_index))
    return computed


def backward_kinds(
    actions: Iterable[tuple[str, int, int | None]],
) -> dict[tuple[int, int | None], str]:
    """Return B or I, by stage and microbatch: a full backward, or one in halves."""
    return {(stage, microbatch): kind for kind, stage, microbatch in actions if kind in "BI"}


def backwards_of(parallelism: Parallelism, pipeline: PipelineSchedule) -> list[frozenset[str]]:
    """Return the kinds of backward that each stage runs: B (full), I (in halves), or both."""
    if not runs_halves(parallelism):
        return [frozenset("B")] * len(pipeline.modules)
    found: list[set[str]] = [set() for _ in pipeline.modules]
    for actions in order_of(parallelism, pipeline).values():
        for (stage, _), kind in backward_kinds(computations(actions)).items():
            found[stage].add(kind)
    return [frozenset(kinds) for kinds in found]
