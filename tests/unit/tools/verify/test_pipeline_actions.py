"""The actions of every rank of a pipeline: those of all schedules are right, changed ones are not."""

import itertools

import pytest

from titan_lite.config import Parallelism
from titan_lite.config.schedules import SCHEDULES
from titan_lite.distributed.pipeline_schedule import PipelineSchedule, computations, order_of
from titan_lite.tools.verify.actions import wrong_actions, wrong_lists


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
    assert list(wrong_actions(*split(schedule))) == []


def actions_of(schedule):
    parallelism, pipeline = split(schedule)
    order = order_of(parallelism, pipeline)
    return [list(computations(order[rank])) for rank in range(4)], pipeline


def dropped(own):
    del own[-1]


def doubled(own):
    own.append(own[0])


def swapped(own):
    own[0], own[-1] = own[-1], own[0]


def of_another_stage(own):
    kind, stage, microbatch = own[0]
    own[0] = (kind, stage + 1, microbatch)


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
    actions, pipeline = actions_of(schedule)
    fault(actions[rank])
    assert list(wrong_lists(actions, pipeline))


def test_a_rank_that_waits_for_ever_is_named():
    actions, pipeline = actions_of("1F1B")
    actions[2].sort(key=lambda action: action[0] != "B")
    assert "pipeline rank 2 waits for ever at B0 of stage 2" in wrong_lists(actions, pipeline)
