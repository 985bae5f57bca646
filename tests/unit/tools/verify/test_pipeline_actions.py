"""The actions of every rank of a pipeline: those of all schedules are right, changed ones are not."""

import itertools

import pytest

from titan_lite.config import Parallelism
from titan_lite.config.schedules import SCHEDULES
from titan_lite.distributed.pipeline_schedule import PipelineSchedule, order_of
from titan_lite.tools.verify.actions import wrong_actions


def split(schedule, degree=4, sequences=16):
    parallelism = Parallelism(
        data_parallel_shard_degree=1,
        pipeline_parallel_degree=degree,
        pipeline_parallel_schedule=schedule,
    )
    pipeline = PipelineSchedule.from_config(parallelism, n_layers=24, local_batch_size=sequences)
    return parallelism, pipeline


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_actions_of_a_schedule_are_right(schedule):
    parallelism, pipeline = split(schedule)
    assert list(wrong_actions(order_of(parallelism, pipeline), pipeline)) == []


def order_and_split(schedule):
    parallelism, pipeline = split(schedule)
    order = order_of(parallelism, pipeline)
    return {rank: [*filter(None, actions)] for rank, actions in order.items()}, pipeline


def dropped(own):
    del own[-1]


def doubled(own):
    own.append(own[0])


def swapped(own):
    own[0], own[-1] = own[-1], own[0]


def of_another_stage(own):
    own[0] = own[0]._replace(stage_index=own[0].stage_index + 1)


@pytest.mark.parametrize(
    ("schedule", "rank", "fault"),
    [
        *itertools.product(
            ("1F1B", "Interleaved1F1B", "DualPipeV"),
            (0, 3),
            (dropped, doubled, swapped, of_another_stage),
        )
    ],
)
def test_changed_actions_are_wrong(schedule, rank, fault):
    order, pipeline = order_and_split(schedule)
    fault(order[rank])
    assert list(wrong_actions(order, pipeline))


def test_a_rank_that_waits_for_ever_is_named():
    order, pipeline = order_and_split("1F1B")
    order[2].sort(key=lambda action: action.computation_type.value != "B")
    (stuck,) = wrong_actions(order, pipeline)
    assert "wait for each other" in stuck
    assert "2 at ('B', 2, 0)" in stuck
