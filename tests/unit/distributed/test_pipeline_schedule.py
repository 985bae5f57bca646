"""The split of a model into stages, and schedules as orders of actions."""

import dataclasses

import pytest
from torch.distributed.pipelining.schedules import _Action

from titan_lite.config import Parallelism
from titan_lite.distributed.pipeline_schedule import (
    PipelineSchedule,
    backwards_of,
    computations,
    one_stage_order,
)
from titan_lite.models.shapes import module_fqns


def plan(n_layers=6, local_batch_size=8, **keys):
    parallelism = Parallelism(**{f"pipeline_parallel_{key}": value for key, value in keys.items()})
    return PipelineSchedule.from_config(
        parallelism, n_layers=n_layers, local_batch_size=local_batch_size
    )


def layers_of(modules):
    return [sum(fqn.startswith("layers.") for fqn in stage) for stage in modules]


@pytest.mark.parametrize(
    ("n_layers", "keys", "layers"),
    [
        (6, dict(degree=1), [6]),
        (6, dict(degree=2), [3, 3]),
        (7, dict(degree=2), [3, 4]),
        (126, dict(degree=16, microbatch_size=1), [7, *[8] * 14, 7]),
        (6, dict(degree=2, schedule="Interleaved1F1B"), [1, 2, 2, 1]),
        (5, dict(degree=2, schedule="Interleaved1F1B"), [0, 2, 2, 1]),
        (
            6,
            dict(degree=2, schedule="Interleaved1F1B", stages_per_rank=4),
            [0, 1, 1, 1, 1, 1, 1, 0],
        ),
        (8, dict(degree=4, first_stage_less_layers=0, last_stage_less_layers=0), [2, 2, 2, 2]),
        (10, dict(degree=4, first_stage_less_layers=0, last_stage_less_layers=2), [3, 3, 3, 1]),
        (6, dict(degree=2, split_points=("layers.5",)), [5, 1]),
        (6, dict(degree=3, split_points=("layers.0", "norm")), [0, 6, 0]),
    ],
)
def test_layers_are_shared_out(n_layers, keys, layers):
    modules = plan(n_layers, local_batch_size=16, **keys).modules
    assert layers_of(modules) == layers
    assert [fqn for stage in modules for fqn in stage] == module_fqns(n_layers)


@pytest.mark.parametrize(
    ("keys", "rank_of"),
    [
        (dict(degree=3), (0, 1, 2)),
        (dict(degree=2, schedule="Interleaved1F1B", stages_per_rank=3), (0, 1, 0, 1, 0, 1)),
        (dict(degree=2, schedule="InterleavedZeroBubble"), (0, 1, 0, 1)),
        (dict(degree=2, schedule="ZBVZeroBubble"), (0, 1, 1, 0)),
        (dict(degree=2, schedule="DualPipeV"), (0, 1, 1, 0)),
    ],
)
def test_stages_go_to_ranks_as_the_schedule_wants(keys, rank_of):
    found = plan(**keys)
    assert found.rank_of == rank_of
    assert [found.stages_of(rank) for rank in range(2)] == [
        [s for s, r in enumerate(rank_of) if r == rank] for rank in range(2)
    ]


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize(("degree", "microbatches"), [(2, 2), (4, 8), (4, 5)])
def test_a_stage_runs_each_microbatch_forward_and_backward_in_order(schedule, degree, microbatches):
    for rank, actions in one_stage_order(schedule, degree, microbatches).items():
        for kind in "FB":
            own = [action for action in actions if action.computation_type.value == kind]
            assert [(action.stage_index, action.microbatch_index) for action in own] == [
                (rank, m) for m in range(microbatches)
            ]


def test_one_forward_one_backward_has_few_microbatches_in_flight():
    def most_in_flight(actions):
        alive = [0]
        for action in actions:
            alive.append(alive[-1] + (1 if action.computation_type.value == "F" else -1))
        return max(alive)

    assert [most_in_flight(actions) for actions in one_stage_order("1F1B", 4, 8).values()] == [
        4,
        3,
        2,
        1,
    ]
    assert [most_in_flight(actions) for actions in one_stage_order("GPipe", 4, 8).values()] == [
        8,
        8,
        8,
        8,
    ]


def order_of(text):
    return {
        rank: [_Action.from_str(word) for word in row.split(",")]
        for rank, row in enumerate(text.split("\n"))
    }


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"])
def test_a_stage_has_the_backwards_of_its_actions(name, degree):
    parallelism = Parallelism(pipeline_parallel_degree=degree, pipeline_parallel_schedule=name)
    pipeline = PipelineSchedule.from_config(parallelism, n_layers=16, local_batch_size=16)
    first, *others = backwards_of(parallelism, pipeline)
    expected = {"ZBVZeroBubble": {"I"}, "DualPipeV": {"B", "I"}}.get(name, {"B"})
    assert first == {"B"}
    assert others == [expected] * (len(pipeline.modules) - 1)


def test_torch_runs_all_of_the_first_stages_backward_at_the_second_half():
    ((_, row),) = order_of("0F0,0F1,1F0,1I0,0I0,1W0,0W0,0B1").items()
    assert computations(row) == [
        ("F", 0, 0),
        ("F", 0, 1),
        ("F", 1, 0),
        ("I", 1, 0),
        ("W", 1, 0),
        ("B", 0, 0),
        ("B", 0, 1),
    ]


def test_plans_are_plain_values():
    found = plan(degree=2)
    assert dataclasses.asdict(found)["microbatches"] == 8
    assert hash(found) == hash(plan(degree=2))
