"""A rank's memory: what tensors of small graphs live for, a step of tapes by hand, blocks that are
repeated.
"""

import dataclasses
import itertools
from collections import Counter

import pytest
import torch
from test_simulate import AT_ONCE, layout
from torch import Tensor
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

from titan_lite.config import Optimizer
from titan_lite.distributed.pipeline_schedule import backwards_of, computations, order_of
from titan_lite.feature import KeptNumbers
from titan_lite.tools.plan import memory as module
from titan_lite.tools.plan.memory import (
    HOPPER_WORKSPACE,
    MIB,
    RESERVED_OVER_PEAK,
    STEP_COUNT,
    memory_of,
    outside_of_tensors,
    replay,
)
from titan_lite.tools.plan.rank_bytes import COMPLETE_MATRICES, PLAIN_TENSORS, owner_bytes
from titan_lite.tools.plan.tape import (
    Lifetime,
    ScheduledGraph,
    Section,
    Stage,
    StageLifetimes,
    Tape,
    Weight,
    buckets_of,
    lifetimes_of,
    tape_of,
    weights_at,
)

CPU = dataclasses.replace(AT_ONCE, name="CPU")
WEIGHT = Weight(
    shard_elements=MIB,
    full_elements=MIB,
    block=0,
    gathered_itemsize=2,
    gathered_with=0,
    reduced_with=0,
)  # 4 MiB in float32
# Its gradient of 4 MiB is in bfloat16.
HALF = dataclasses.replace(WEIGHT, shard_elements=MIB // 2, full_elements=2 * MIB)


WHOLE, HALVES = (
    Tape(
        [4 * MIB, 100 * MIB, 300 * MIB],
        [MIB],
        ["gradients", "activations", "kept for gradients of weights"],
        {"forward": [1], **backward},
    )
    for backward in (
        {"backward": [0, ~1, ~0]},
        {"backward_input": [2, ~1], "backward_weight": [0, ~2, ~0]},
    )
)


def stage(weights=(WEIGHT,), hidden=0, **events):
    """A gradient of 4 MiB, an activation of 100 MiB, and 30 MiB that a graph needs while it runs."""
    plain = {"forward": [1, 2, ~2], "backward": [2, 0, ~1, ~2, ~0]}
    tape = Tape(
        [4 * MIB, 100 * MIB, 30 * MIB],
        [MIB],
        ["gradients", "activations", "working"],
        events or plain,
    )
    return Stage({"B": tape}, weights, 0, hidden)


def mib(rows):
    return {name: nbytes / MIB for name, nbytes in rows.items()}


def replayed(mine, stages, rank=0):
    return replay(mine, stages, rank, CPU)


def test_a_step_by_hand():
    found = memory_of(layout(), [stage()], CPU)
    # Weight 4, moments 2 x 4 and a step count, activation 100, working 30, gradient 4.
    assert mib(found.parts) == {
        "parameters": 4,
        "optimizer state": 8 + STEP_COUNT / MIB,
        "activations": 100,
        "working": 30,
        "gradients": 4,
    }
    assert found.phase == "backward"
    assert found.peak == sum(found.parts.values())
    assert found.reserved == RESERVED_OVER_PEAK * found.peak
    assert found.total == found.reserved + found.outside


def test_muon_keeps_one_moment_of_a_matrix_and_needs_whole_matrices_for_its_update():
    mine = layout()
    mine = dataclasses.replace(mine, config=mine.config.replace(optimizer=Optimizer(name="Muon")))
    small = stage(
        [dataclasses.replace(WEIGHT, shard_elements=MIB // 2, matrix=True), WEIGHT],
        forward=[1, ~1],
        backward=[0, ~0],
    )
    small.tapes["B"].sizes[1] = 0
    found = memory_of(mine, [small], CPU)
    assert found.parts["optimizer state"] == 4 * (MIB // 2 + 2 * MIB) + 2 * STEP_COUNT
    assert (found.phase, found.parts["working"]) == (
        "optimizer step",
        COMPLETE_MATRICES * 2 * MIB,
    )  # in bfloat16


def test_lion_keeps_one_moment_and_its_plain_operations_need_memory():
    mine = layout()
    config = mine.config.replace(optimizer=Optimizer(name="Lion"))
    mine = dataclasses.replace(mine, config=config)
    small = stage([WEIGHT], forward=[1, ~1], backward=[0, ~0])
    small.tapes["B"].sizes[1] = 0
    plain = memory_of(mine, [small], CPU)
    assert plain.parts["optimizer state"] == 4 * MIB + STEP_COUNT
    assert plain.phase == "optimizer step"
    assert plain.parts["working"] == PLAIN_TENSORS * 4 * MIB


def test_moments_in_bfloat16_are_half_and_their_updates_need_memory():
    mine = layout()
    small = stage([WEIGHT], forward=[1, ~1], backward=[0, ~0])
    small.tapes["B"].sizes[1] = 0
    for name, moments in (("AdamW", 2), ("Lion", 1)):
        optimizer = Optimizer(name=name, state_dtype="bfloat16")
        config = mine.config.replace(optimizer=optimizer)
        found = memory_of(dataclasses.replace(mine, config=config), [small], CPU)
        assert found.parts["optimizer state"] == moments * 2 * MIB + STEP_COUNT
        assert found.parts["working"] == (PLAIN_TENSORS + 2 * moments) * 4 * MIB


def test_shampoos_state_is_that_of_the_owner_with_most():
    mine = layout(n_layers=1)
    optimizer = Optimizer(name="Shampoo", max_preconditioner_dim=256)
    mine = dataclasses.replace(mine, config=mine.config.replace(optimizer=optimizer))
    small = stage([dataclasses.replace(WEIGHT, matrix=True), WEIGHT])
    blocks = {(256, 256): 2 + 9, (128, 256): 2}
    numbers = 2 * sum(
        count * (rows * columns + rows**2 + columns**2) for (rows, columns), count in blocks.items()
    )
    assert (
        memory_of(mine, [small], CPU).parts["optimizer state"]
        == 4 * numbers + 4 * 2 * MIB + 2 * STEP_COUNT
    )  # AdamW's of one weight
    of_two = dataclasses.replace(mine, degrees=mine.degrees | dict(dp_shard=2))
    assert 0.5 * 4 * numbers <= owner_bytes(mine.config, of_two) < 0.7 * 4 * numbers


def test_what_features_keep_until_the_update_is_made_after_backward():
    mine = layout()
    kept = KeptNumbers(always=WEIGHT.shard_elements + 512, before_update=WEIGHT.shard_elements)
    weights = [dataclasses.replace(WEIGHT, kept=kept)]
    small = stage(weights, forward=[1], backward=[2, 0, ~0, ~1, ~2])
    found = memory_of(mine, [small], CPU)
    assert found.phase == "backward"  # with what is always kept
    assert found.parts["kept by features"] == 4 * MIB + 4 * 512
    small = stage(weights, forward=[1, ~1], backward=[0, ~0])
    small.tapes["B"].sizes[1] = 0
    found = memory_of(mine, [small], CPU)
    assert found.phase == "after backward"
    assert found.parts["kept by features"] == 8 * MIB + 4 * 512


def tied(mine):
    return dataclasses.replace(mine, model=dataclasses.replace(mine.model, tied_embeddings=True))


def test_the_copy_of_a_tied_table_has_no_optimizer_state():
    mine = tied(layout(2))
    tapes = {"B": WHOLE, "I": HALVES}
    copy = Stage(tapes, [dataclasses.replace(WEIGHT, updated=False)], 0, 0)
    other = Stage(tapes, [WEIGHT], 0, 0)
    first, last = (replayed(mine, [other, copy], rank) for rank in (0, 1))
    assert first.peak_parts["parameters"] == last.peak_parts["parameters"] == 4 * MIB
    assert first.peak_parts["optimizer state"] == 8 * MIB + STEP_COUNT
    assert "optimizer state" not in last.peak_parts
    mine = tied(layout(2, 2, "ZBVZeroBubble"))
    # the first and the last one on rank 0
    both = replayed(mine, [other, other, other, copy]).peak_parts
    assert (both["parameters"], both["optimizer state"]) == (8 * MIB, 8 * MIB + STEP_COUNT)


def test_the_first_stage_receives_the_gradient_of_the_copy():
    """It is as large as the table of 2,048 x 256 numbers, in float32."""
    sizes = [4 * MIB, 0, 0]
    tapes = {
        kind: dataclasses.replace(tape, sizes=sizes) for kind, tape in (("B", WHOLE), ("I", HALVES))
    }
    small = Stage(tapes, [WEIGHT], 0, 0)
    phases = {}
    for mine in (layout(2), tied(layout(2)), tied(layout(2, 2, "ZBVZeroBubble"))):
        stages = [small] * len(mine.pipeline.modules)
        for rank in (0, 1):
            run = replayed(mine, stages, rank)
            key = mine.copies_table, mine.sends_table, rank
            phases[key] = run.peak_phase, run.peak_parts.get("working", 0)
    received = "adding gradients of the tied table", 4 * 2048 * 256
    assert phases.pop((True, True, 0)) == received
    assert received not in phases.values()


def test_workspaces_are_those_of_a_gpu():
    rows = memory_of(layout(), [stage()], AT_ONCE).parts
    assert AT_ONCE.name == "H100"
    assert rows["workspaces of cuBLAS"] == 2 * HOPPER_WORKSPACE
    assert "workspaces of cuBLAS" not in memory_of(layout(), [stage()], CPU).parts


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_1f1b_keeps_as_many_microbatches_as_ranks_that_follow(rank):
    mine = layout(4, 8)
    rows = replayed(mine, [stage()] * 4, rank).peak_parts
    assert rows["activations"] == (4 - rank) * 100 * MIB


def test_the_rank_that_needs_most_is_told():
    same = stage()
    found = memory_of(layout(4, 8), [same] * 4, CPU)
    assert (found.rank, found.parts["activations"]) == (0, 400 * MIB)
    larger = dataclasses.replace(same.tapes["B"], sizes=[4 * MIB, 500 * MIB, 30 * MIB])
    other = Stage({"B": larger}, same.weights, 0, 0)
    assert memory_of(layout(4, 8), [same, same, other, same], CPU).rank == 2


def test_what_the_half_of_the_weights_needs_lives_until_it_runs():
    """In a V of 4 ranks, the last one has 7 microbatches whose gradients of weights are left for
    the end.
    """
    first, other = Stage({"B": WHOLE}, (WEIGHT,), 0, 0), Stage({"I": HALVES}, (WEIGHT,), 0, 0)
    found = memory_of(layout(4, 8, schedule="ZBVZeroBubble"), [first, *[other] * 7], CPU)
    assert found.rank == 3
    assert found.parts["kept for gradients of weights"] == 7 * 300 * MIB


def test_the_first_stage_keeps_activations_until_torch_runs_all_of_its_backward():
    mine = layout(2, 4, schedule="ZBVZeroBubble")
    first, other = Stage({"B": WHOLE}, (WEIGHT,), 0, 0), Stage({"I": HALVES}, (WEIGHT,), 0, 0)
    actions = computations(order_of(mine.config.parallelism, mine.pipeline)[0])
    assert ("I", 0) not in {(kind, stage) for kind, stage, _ in actions}
    in_flight = itertools.accumulate(
        {"F": 1, "B": -1}[kind] for kind, stage, _ in actions if stage == 0
    )
    peak = replayed(mine, [first, other, other, other]).peak_parts
    assert peak["activations"] >= max(in_flight) * 100 * MIB


def test_a_stage_may_run_backward_both_ways():
    mine = layout(4, 8, schedule="DualPipeV")
    both = Stage({"B": WHOLE, "I": HALVES}, (WEIGHT,), 0, 0)
    kinds = backwards_of(mine.config.parallelism, mine.pipeline)
    assert kinds == [{"B"}, *[{"B", "I"}] * 7]
    run = replayed(mine, [both] * 8)
    # Of two stages, the weight, a sum of gradients and the state.
    assert run.allocated == 2 * (4 * 4 * MIB + STEP_COUNT)


def test_a_stage_receives_each_microbatch_in_a_buffer_of_its_own():
    rows = [
        replayed(layout(4, 8), [stage(hidden=MIB)] * 4, rank).peak_parts["received by the pipeline"]
        for rank in range(4)
    ]
    assert [nbytes / MIB for nbytes in rows] == [8, 16, 16, 8]


def test_later_gradients_are_added_to_the_first():
    mine = layout(accumulation=2)
    run = replayed(mine, [stage()])
    assert run.peak_parts["gradients"] == 8 * MIB  # the sum, and the one to be added


def test_weights_and_gradients_of_a_step_are_held_whole():
    weights = [
        dataclasses.replace(WEIGHT, shard_elements=MIB // 4, reduced_with=number)
        for number in (0, 1)
    ]
    events = {"forward": [2, ~2], "backward": [0, 1, 2, ~2, ~0, ~1]}
    tape = Tape(
        [2 * MIB, 2 * MIB, 100 * MIB], [MIB, MIB], ["gradients", "gradients", "working"], events
    )
    run = replayed(layout(accumulation=2, gathers_once=True), [Stage({"B": tape}, weights, 0, 0)])
    # In backward of the second local batch: two weights in bfloat16, gradients of both in float32,
    # and this batch's in bfloat16.
    assert mib(run.peak_parts) == {
        "parameters": 2,
        "optimizer state": 4 + 2 * STEP_COUNT / MIB,
        "weights gathered for the step": 4,
        "working": 100,
        "gradients": 8 + 4,
    }


@pytest.mark.parametrize(("weight", "gathers_once"), [(WEIGHT, False), (HALF, True)])
def test_a_step_leaves_the_state_and_gradients_as_large_as_the_shards(weight, gathers_once):
    tape = dataclasses.replace(stage().tapes["B"], elements=[weight.full_elements])
    mine = layout(accumulation=2, gathers_once=gathers_once)
    run = replayed(mine, [Stage({"B": tape}, [weight], 0, 0)])
    assert run.allocated == 4 * 4 * weight.shard_elements + STEP_COUNT


def test_outside_of_tensors_grows_with_communicators():
    one, two, three = layout(), layout(2, 2), layout(2, 2)
    assert outside_of_tensors(one) == module.CONTEXT
    three.degrees["tp"] = 2
    each = module.CHANNELS * module.CHANNEL_BUFFERS
    assert outside_of_tensors(three) - outside_of_tensors(two) == each
    assert (
        outside_of_tensors(two) - outside_of_tensors(one) == 2 * each
    )  # all ranks, and the pipeline's


def graph_of(function, *shapes, results=None):
    """A graph of aten operators whose inputs are called primals_1 and so on."""
    graph: Graph = make_fx(function)(*(torch.randn(shape) for shape in shapes)).graph
    return graph


def forward_and_backward():
    """y = exp(x) @ w, of which exp(x) is saved; the loss is given by its gradient alone."""

    def forward(w: Tensor, x: Tensor):
        e = x.exp()
        return [e @ w, e, w]

    def backward(e: Tensor, w: Tensor, upstream: Tensor):
        return [e.t() @ upstream, None]

    return {
        "forward": graph_of(forward, (64, 64), (128, 64)),
        "backward": graph_of(backward, (128, 64), (64, 64), (128, 64)),
    }


@pytest.mark.parametrize("keeps_inputs", [False, True])
def test_what_forward_saves_lives_until_backward_has_used_it(keeps_inputs):
    graphs = {
        name: ScheduledGraph(graph, False, keeps_inputs, True)
        for name, graph in forward_and_backward().items()
    }
    lives = lifetimes_of(graphs, blocks=1, period=1)
    kinds = {(life.allocated[0], life.kind): life for life in lives.tensors}
    saved, gradient = kinds["forward", ""], kinds["backward", "gradient"]
    assert saved.nbytes == 128 * 64 * 4
    matmul = next(
        place
        for place, node in enumerate(graphs["backward"].graph.nodes)
        if "mm" in str(node.target)
    )
    last = len(graphs["backward"].graph.nodes) - 1
    assert saved.freed == ("backward", 2 * (last if keeps_inputs else matmul) + 1)
    assert gradient.nbytes == 64 * 64 * 4
    assert gradient.freed == ("backward", 2 * matmul + 1)  # eager: added up at once


def test_the_gradients_of_a_compiled_backward_are_there_until_its_end():
    graphs = {
        name: ScheduledGraph(graph, False, False, False)
        for name, graph in forward_and_backward().items()
    }
    (gradient,) = [life for life in lifetimes_of(graphs, 1, 1).tensors if life.kind == "gradient"]
    assert gradient.freed == ("backward", 2 * len(graphs["backward"].graph.nodes) - 1)


def test_what_crosses_to_the_half_of_the_weights_lives_until_it_has_used_it():
    """Backward of y = exp(x) @ w: x's gradient first, from a saved e that w's gradient needs, too.
    The stage has no blocks.
    """

    def forward(w: Tensor, x: Tensor):
        e = x.exp()
        return [e @ w, e, w]

    def backward_input(e: Tensor, w: Tensor, upstream: Tensor):
        scaled = upstream * 2
        return [None, (scaled @ w.t()) * e, scaled]

    def backward_weight(e: Tensor, mul: Tensor):
        return [e.t() @ mul, None]

    made = {
        "forward": graph_of(forward, (64, 64), (128, 64)),
        "backward_input": graph_of(backward_input, (128, 64), (64, 64), (128, 64)),
        "backward_weight": graph_of(backward_weight, (128, 64), (128, 64)),
    }
    for first, second in zip(
        made["backward_input"].find_nodes(op="placeholder"),
        made["backward_weight"].find_nodes(op="placeholder")[:1],
        strict=False,
    ):  # a saved value is found by its name
        second.name = first.name
    graphs = {name: ScheduledGraph(graph, False, False, True) for name, graph in made.items()}
    lives = lifetimes_of(graphs, blocks=0, period=1).tensors
    saved = next(life for life in lives if life.allocated[0] == "forward" and not life.kind)
    crossing = next(
        life
        for life in lives
        if life.allocated[0] == "backward_input" and life.freed[0] == "backward_weight"
    )
    assert saved.freed == crossing.freed
    gradients = [life for life in lives if life.allocated[0] == "backward_weight"]
    assert [(life.kind, life.nbytes) for life in gradients] == [("gradient", 64 * 64 * 4)]


def repeated_by_hand():
    """Three blocks: forward makes one tensor a block, at moments 10, 20, 30, and backward frees
    them at 31, 21, 11.
    """
    kept = [
        Lifetime(number, ("forward", 10 * number), ("backward", 41 - 10 * number))
        for number in (1, 2, 3)
    ]
    table = Lifetime(9, ("forward", 1), ("backward", 50))  # of all blocks
    passing = Lifetime(7, ("backward", 22), ("backward", 25))
    sections = {"forward": Section(11, 21, 40), "backward": Section(12, 22, 50)}
    return StageLifetimes(3, 1, (*kept, table, passing), {"forward": 40, "backward": 50}, sections)


def test_a_middle_block_is_repeated():
    tape = tape_of(repeated_by_hand(), n_layers=5, pipelined=False)
    assert Counter(tape.sizes) == Counter({1: 1, 2: 3, 3: 1, 9: 1, 7: 3})
    made = [tape.sizes[event] for event in tape.events["forward"]]
    assert made == [9, 1, 2, 2, 2, 3]
    freed = [tape.sizes[~event] for event in tape.events["backward"] if event < 0]
    assert [size for size in freed if size != 7] == [3, 2, 2, 2, 1, 9]
    order = [~event for event in tape.events["backward"] if event < 0 and tape.sizes[~event] == 2]
    assert order == sorted(order, reverse=True)  # the last block's first


def test_the_traced_depth_is_as_it_was():
    lives = repeated_by_hand()
    tape = tape_of(lives, n_layers=3, pipelined=False)
    assert Counter(tape.sizes) == Counter(life.nbytes for life in lives.tensors)


def test_weights_of_a_middle_block_are_repeated_with_their_buckets():
    weights = [
        Weight(1, 1, -1, 2, 0, 0),
        *(Weight(2, 2, block, 2, 1 + block, 1 + block) for block in (0, 1, 2) for _ in range(2)),
    ]
    found = weights_at([*weights, Weight(3, 3, -1, 2, 3, 4)], 3, 5)
    assert [weight.block for weight in found] == [-1, 0, 0, 1, 1, 1, 1, 1, 1, 2, 2, -1]
    assert [len(bucket) for bucket in buckets_of(found, "gathered_with")] == [1, 2, 2, 2, 2, 3]
    assert [len(bucket) for bucket in buckets_of(found, "reduced_with")] == [1, 2, 2, 2, 2, 2, 1]
