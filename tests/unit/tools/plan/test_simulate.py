"""A step from costs by hand: the bubbles of the schedules against their formulas, shares that add
up.
"""

import dataclasses

import pytest
import torch
from torch.distributed.pipelining.schedules import _Action

from titan_lite.config import Config, Optimizer, Parallelism, Training
from titan_lite.config.families import LLAMA3
from titan_lite.config.optimizers import OPTIMIZERS
from titan_lite.cost.costs import Costs
from titan_lite.cost.machine import Link
from titan_lite.cost.profiles import load_machine
from titan_lite.distributed.pipeline_schedule import PipelineSchedule, order_of
from titan_lite.tools.plan.costs import StageCosts
from titan_lite.tools.plan.owned import all_to_all, owned_matrices
from titan_lite.tools.plan.simulate import simulate_step, updated_bytes
from titan_lite.tools.plan.timetable import run_order
from titan_lite.tools.plan.trace import PlannedLayout

H100 = load_machine("H100")
AT_ONCE = dataclasses.replace(
    H100, collective_launch=0.0, intra_node=Link(450, 0.0), inter_node=Link(50, 0.0)
)


def layout(
    degree=1, microbatches=1, schedule="1F1B", accumulation=1, gathers_once=False, n_layers=32
):
    parallelism = Parallelism(
        pipeline_parallel_degree=degree,
        pipeline_parallel_schedule=schedule,
        pipeline_parallel_first_stage_less_layers=0,
        pipeline_parallel_last_stage_less_layers=0,
    )
    pipeline = PipelineSchedule.from_config(
        parallelism, n_layers=n_layers, local_batch_size=microbatches
    )
    config = Config(
        parallelism=parallelism, training=Training(local_batch_size=microbatches, seq_len=64)
    )
    degrees = {"pp": degree, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1}
    model = dataclasses.replace(LLAMA3.flavors["debug"], n_layers=n_layers, max_seq_len=64)
    return PlannedLayout(
        config=config,
        model=model,
        degrees=degrees,
        pipeline=pipeline,
        local_batch_size=microbatches,
        accumulation=accumulation,
        gathers_once=gathers_once,
    )


def stage(forward=1.0, backward=2.0, forward_costs=None, once=None, elements=0.0, hidden_bytes=0.0):
    """A stage whose graphs compute for so many seconds. forward_costs: beside them."""
    return StageCosts(
        graphs={
            "forward": dataclasses.replace(forward_costs or Costs(), compute=forward),
            "backward": Costs(backward),
        },
        once=once or {},
        shard_elements=elements,
        full_elements=elements,
        hidden_bytes=hidden_bytes,
    )


def stages_of(layout, **costs):
    return [stage(**costs) for _ in layout.pipeline.modules]


@pytest.mark.parametrize(("degree", "microbatches"), [(2, 2), (4, 8), (16, 32), (3, 7)])
@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
def test_the_bubble_of_one_stage_a_rank(schedule, degree, microbatches):
    mine = layout(degree, microbatches, schedule)
    step = simulate_step(mine, stages_of(mine), AT_ONCE)
    assert step.parts["compute"] == pytest.approx(3.0 * microbatches)
    assert step.run.seconds == pytest.approx(3.0 * (microbatches + degree - 1))
    share = step.parts["bubble"] / (step.parts["bubble"] + step.parts["compute"])
    assert share == pytest.approx((degree - 1) / (microbatches + degree - 1), rel=1e-9)


@pytest.mark.parametrize(("degree", "microbatches"), [(2, 4), (4, 8), (4, 16)])
def test_the_bubble_of_interleaved_stages(degree, microbatches):
    mine = layout(degree, microbatches, "Interleaved1F1B")
    step = simulate_step(mine, stages_of(mine), AT_ONCE)
    share = step.parts["bubble"] / (step.parts["bubble"] + step.parts["compute"])
    assert share == pytest.approx(
        (degree - 1) / (2 * microbatches + degree - 1), rel=1e-9
    )  # arXiv 2104.04473, section 2.2


def test_backward_in_halves_fills_the_bubble():
    def seconds(text):
        order = {
            rank: [_Action.from_str(word) for word in row.split(",")]
            for rank, row in enumerate(text.split("\n"))
        }
        return run_order(order, lambda kind, stage: 2.0 if kind == "B" else 1.0).seconds

    whole = seconds("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1")
    halves = seconds("0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1")
    assert whole == 2 * 3 + 3  # a third of it is the bubble
    assert halves < whole


@pytest.mark.parametrize(("input", "weight"), [(1.0, 1.0), (2.0, 1.0), (1.5, 0.5)])
def test_a_backward_in_halves_takes_the_seconds_of_both_graphs(input, weight):
    mine = layout(4, 8, "ZBVZeroBubble")
    halves = {
        "forward": Costs(1.0),
        "backward_input": Costs(input),
        "backward_weight": Costs(weight),
        "backward": Costs(input + weight),  # of the first stage, at W
    }
    stages = [dataclasses.replace(stage(), graphs=halves) for _ in mine.pipeline.modules]
    step = simulate_step(mine, stages, AT_ONCE)
    assert step.parts["compute"] == pytest.approx(2 * 8 * (1.0 + input + weight))
    seconds = {
        (kind, end - begin) for row in step.run.actions.values() for kind, _, _, begin, end in row
    }
    assert seconds == {("F", 1.0), ("I", input), ("W", weight), ("B", input + weight)}
    assert {
        stage for row in step.run.actions.values() for kind, stage, *_ in row if kind == "B"
    } == {0}
    if input == weight == 1.0:  # a V is idle while the first microbatch goes down it
        assert step.parts["bubble"] == pytest.approx(3.0)


def test_the_order_is_that_which_torch_runs():
    mine = layout(2, 4, "Interleaved1F1B")
    order = order_of(mine.config.parallelism, mine.pipeline)
    ran = run_order(order, lambda kind, stage: 1.0).actions
    for rank, actions in order.items():
        assert [(kind, where, microbatch) for kind, where, microbatch, *_ in ran[rank]] == [
            (action.computation_type.value, action.stage_index, action.microbatch_index)
            for action in actions
            if action is not None
        ]


def test_a_slow_stage_and_slow_links_hold_the_others_up():
    mine = layout(2, 4)
    even = simulate_step(mine, stages_of(mine), AT_ONCE)
    uneven = simulate_step(mine, [stage(), stage(2.0, 4.0)], AT_ONCE)
    assert uneven.run.seconds == pytest.approx(
        1.0 + 4 * 6.0 + 2.0
    )  # fill, the slow one's work, drain
    hidden = 45e9 * AT_ONCE.link_efficiency  # a tenth of a second
    travel = (
        simulate_step(mine, stages_of(mine, hidden_bytes=hidden), AT_ONCE).run.seconds
        - even.run.seconds
    )
    assert AT_ONCE.send(hidden, 0, 1) == pytest.approx(0.1)
    assert travel >= 2 * 0.1 * (1 - 1e-9)  # there and back, at least once


def test_while_a_rank_waits_the_others_have_its_core():
    mine = layout(4, 8)
    alone, shared = (
        simulate_step(
            mine,
            stages_of(mine),
            dataclasses.replace(AT_ONCE, ranks_per_core=ranks, multiprocessors=0),
        )
        for ranks in (1.0, 2.0)
    )
    assert alone.seconds == pytest.approx(3.0 * (8 + 3), rel=1e-4)
    assert shared.seconds == pytest.approx(3.0 * 8, rel=1e-4)  # the cores always work
    assert shared.parts["bubble"] == pytest.approx(0.0, abs=1e-4)


def test_a_step_is_the_sum_of_its_parts():
    mine = layout(4, 8, accumulation=2, gathers_once=True)
    stages = stages_of(
        mine,
        elements=1e9,
        forward_costs=Costs(exposed={"tp": 0.5}),
        once={"gather": Costs(exposed={"dp_shard": 3.0}), "reduce": Costs(0.25)},
    )
    step = simulate_step(mine, stages, H100)
    assert sum(step.parts.values()) == pytest.approx(step.seconds)
    assert step.parts["exposed.tp"] == pytest.approx(16 * 0.5)
    assert step.parts["exposed.dp_shard"] == pytest.approx(3.0)  # once a step
    # clipping 3 and AdamW 7 times 4 bytes of each parameter
    assert step.parts["optimizer"] == pytest.approx(40e9 / (3350e9 * 0.85), rel=1e-2)


def test_a_tied_table_is_sent_to_the_last_stage_and_its_gradient_to_the_first():
    table = 2048 * 256  # of the debug flavor
    costs = dict(elements=float(table), hidden_bytes=1.0)
    parts = {}
    for schedule in ("1F1B", "ZBVZeroBubble"):
        untied = layout(4, 8, schedule)
        tied = dataclasses.replace(
            untied, model=dataclasses.replace(untied.model, tied_embeddings=True)
        )
        apart, both = (
            simulate_step(mine, stages_of(mine, **costs), AT_ONCE) for mine in (untied, tied)
        )
        assert sum(both.parts.values()) == pytest.approx(both.seconds)
        parts[schedule] = apart.parts, both.parts
        sends = schedule == "1F1B"
        assert both.sent["pp"] - apart.sent["pp"] == 4 * table * sends
        assert ("exposed.pp" in both.parts) == sends

    moved = 4 * table / (3350e9 * AT_ONCE.memory_efficiency)
    sent = 4 * table / (450e9 * AT_ONCE.link_efficiency)
    untied, tied = parts["1F1B"]
    # of both ends, on average over four ranks: two transfers, and a sum
    assert tied["exposed.pp"] == pytest.approx((2 * sent + 3 * moved) / 2)
    assert untied["optimizer"] - tied["optimizer"] == pytest.approx(10 * moved / 4)
    untied, tied = parts["ZBVZeroBubble"]
    assert untied["optimizer"] - tied["optimizer"] == pytest.approx((10 - 5) * moved / 4)


def test_a_step_takes_as_long_as_on_the_slowest_rank():
    one = simulate_step(layout(), stages_of(layout()), H100)
    assert one.parts.get("exposed.slowest", 0.0) == 0.0
    many = simulate_step(layout(4, 8), stages_of(layout(4, 8)), H100)
    # the largest of four standard normals is 1.03 on average
    assert many.parts["exposed.slowest"] / (
        many.seconds - many.parts["exposed.slowest"]
    ) == pytest.approx(1.03 * 0.08 / 5.4, rel=0.03)
    measured = dataclasses.replace(H100, multiprocessors=0)
    assert (
        "exposed.slowest"
        not in simulate_step(layout(4, 8), stages_of(layout(4, 8)), measured).parts
    )


def test_bytes_of_a_fused_update_are_those_of_its_tensors():
    assert updated_bytes(Config()) == 10 * 4
    lion = Config().replace(optimizer=Optimizer(name="Lion"))
    assert updated_bytes(lion) == 3 * 4 + OPTIMIZERS["Lion"].update_bytes
    rounded = Config().replace(optimizer=Optimizer(state_dtype="bfloat16"))
    assert updated_bytes(rounded) == 3 * 4 + OPTIMIZERS["AdamW"].update_bytes_bfloat16


def test_bytes_are_of_the_rank_that_sends_most():
    mine = layout(2, 4)
    step = simulate_step(
        mine,
        [
            stage(forward_costs=Costs(sent={"tp": 1.0})),
            stage(forward_costs=Costs(sent={"tp": 5.0}), once={"gather": Costs(sent={"tp": 7.0})}),
        ],
        H100,
    )
    assert step.sent["tp"] == 4 * 5.0 + 7.0


def test_actions_that_wait_for_each_other_are_told():
    order = {0: [_Action.from_str("0B0"), _Action.from_str("0F0")]}
    with pytest.raises(ValueError, match=r"wait for each other: 0 at \('B', 0, 0\)"):
        run_order(order, lambda kind, stage: 1.0)


# Owners of complete matrices


def with_muon(**degrees):
    mine = layout(n_layers=2)
    config = mine.config.replace(optimizer=Optimizer(name="Muon", ns_dtype="float32"))
    return dataclasses.replace(mine, config=config, degrees=mine.degrees | degrees)


def test_one_rank_computes_all_matrices_and_two_compute_half_of_them_each():
    alone, shared = (
        owned_matrices(with_muon(), AT_ONCE),
        owned_matrices(with_muon(dp_shard=2), AT_ONCE),
    )
    of_block = {(256, 256): 2, (128, 256): 2, (256, 768): 3}
    flops = (
        2
        * 5
        * sum(
            count * (4 * short**2 * long + 2 * short**3)
            for (short, long), count in of_block.items()
        )
    )
    assert alone.computing == pytest.approx(
        flops / (AT_ONCE.flops(torch.float32) * AT_ONCE.matmul_efficiency)
    )
    assert shared.computing == pytest.approx(alone.computing / 2)
    assert (alone.waiting, alone.sent) == (0.0, 0.0)
    # In each bucket a rank sends half of one matrix, and gets half of another one back.
    numbers = 2 * sum(count * short * long for (short, long), count in of_block.items())
    assert (shared.sent, shared.across) == (pytest.approx(numbers / 2 * 4), 0.0)
    assert shared.waiting > 0
    assert owned_matrices(layout(n_layers=2), AT_ONCE).computing == 0.0  # AdamW


def test_shampoos_owners_compute_matmuls_of_blocks_and_a_part_of_the_roots_in_each_step():
    mine = layout(n_layers=1)
    optimizer = Optimizer(name="Shampoo", max_preconditioner_dim=256, precondition_frequency=5)
    mine = dataclasses.replace(mine, config=mine.config.replace(optimizer=optimizer))
    blocks = {(256, 256): 2 + 9, (128, 256): 2}  # three of 256 x 256 in each matrix of 768 x 256
    matmuls = sum(
        count * 4 * rows * columns * (rows + columns) for (rows, columns), count in blocks.items()
    )
    cubes = sum(count * (rows**3 + columns**3) for (rows, columns), count in blocks.items())
    speed = AT_ONCE.flops(torch.float32) * AT_ONCE.matmul_efficiency
    assert owned_matrices(mine, AT_ONCE).computing == pytest.approx(
        (matmuls + 1000 * cubes / 5) / speed
    )


def test_copies_share_the_matrices_and_all_of_them_get_every_result():
    shared, copies = (
        owned_matrices(with_muon(**degrees), AT_ONCE)
        for degrees in (dict(dp_shard=2), dict(dp_replicate=2))
    )
    assert copies.computing == shared.computing
    assert copies.sent == pytest.approx(
        shared.sent
    )  # nothing goes to an owner, and a whole matrix leaves it


def test_an_all_to_all_between_nodes_has_one_network_card_a_rank():
    seconds, near, far = all_to_all(AT_ONCE, 16e9, range(16))
    assert (near, far) == (7e9, 8e9)
    assert seconds == pytest.approx(
        8e9 / (50e9 * AT_ONCE.link_efficiency), rel=1e-3
    )  # and its latency


def test_a_step_has_the_time_of_its_owners():
    mine = with_muon(dp_shard=2)
    step = simulate_step(mine, stages_of(mine), AT_ONCE)
    owned = owned_matrices(mine, AT_ONCE)
    assert (step.parts["owners"], step.parts["exposed.owners"]) == (owned.computing, owned.waiting)
    assert sum(step.parts.values()) == pytest.approx(step.seconds)
    assert step.sent["owners"] == owned.sent
