"""The stages of a pipeline and the actions of every rank: those of all schedules are right, changed
ones are not.
"""

import itertools

import pytest

from titan_lite.config import Parallelism
from titan_lite.config.schedules import SCHEDULES
from titan_lite.distributed.pipeline_schedule import PipelineSchedule, order_of
from titan_lite.tools.verify import actions
from titan_lite.tools.verify.actions import wrong_actions, wrong_stages


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
    assert list(wrong_stages(pipeline, n_layers=24)) == []


@pytest.mark.parametrize(
    ("last", "words"),
    [
        (["layers.2", "norm", "output"], "none has layers.1"),
        (["layers.2", "layers.1", "norm", "output"], "they are in another order, or twice"),
        (["layers.0", "layers.1", "layers.2", "norm", "output"], "another order, or twice"),
    ],
)
def test_stages_have_each_module_once_and_in_order(last, words):
    first = ("tok_embeddings", "layers.0")
    pipeline = PipelineSchedule((first, tuple(last)), rank_of=(0, 1), microbatches=1)
    (found,) = wrong_stages(pipeline, n_layers=3)
    assert words in found


def test_a_stage_that_has_no_module_of_the_model_is_named():
    modules = ("tok_embeddings", "layers.0", "layers.1", "norm", "output")
    found = list(wrong_stages(PipelineSchedule((modules,), (0,), 1), n_layers=1))
    assert found[0].endswith("there is no layers.1")
    assert found[1:] == ["stage 0 lacks layers.1"]


def test_a_stage_that_keeps_modules_of_others_is_named(monkeypatch):
    right = actions.keep_modules
    monkeypatch.setattr(
        actions, "keep_modules", lambda model, fqns: right(model, [*fqns, "layers.1"])
    )
    _, pipeline = split("1F1B")
    found = list(wrong_stages(pipeline, n_layers=24))
    assert found[0] == "stage 1 has layers.1, which are of others"
    assert len(found) == 3


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
