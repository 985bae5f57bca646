"""Two lanes by hand: a gather of two floats a rank takes 16 seconds, and so on; what is exposed,
and what must be.
"""

import dataclasses

import pytest
import torch
from handmade_graphs import (
    GATHER,
    Hand,
    aten,
    collectives,
    overlap,
    places,
    priced,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from titan_lite.compile.passes.bucketing import by_block, merge_buckets
from titan_lite.compile.passes.reordering import wait_for_reductions_late
from titan_lite.cost import timeline as timelines
from titan_lite.cost.nccl import CHANNELS
from titan_lite.cost.op_cost import node_seconds
from titan_lite.cost.timeline import lower_bound, peak_bytes, simulate
from titan_lite.graph import parameter_collectives, parameters_of
from titan_lite.tools.plan import costs

pytestmark = pytest.mark.usefixtures("two_ranks")


def two_matmuls():
    hand = Hand()
    a, b = hand.input(1), hand.input(1)
    x = hand.compute("f", 5.0, hand.gather(a, "a"))
    hand.output(hand.compute("g", 5.0, x, hand.gather(b, "b")))
    return hand.graph


def test_a_collective_that_is_waited_for_at_once_is_exposed():
    timeline = simulate(two_matmuls(), priced(), name="forward")
    assert (timeline.exposed, timeline.seconds, timeline.compute, timeline.communication) == (
        16.0,
        26.0,
        10.0,
        16.0,
    )
    assert [
        (span.name, span.start, span.exposed, span.under) for span in timeline.collectives()
    ] == [
        ("all_gather a", 0.0, 8.0, 0.0),
        ("all_gather b", 13.0, 8.0, 0.0),
    ]


def test_one_that_is_started_early_travels_under_computation():
    graph = two_matmuls()
    overlap(graph)
    timeline = simulate(graph, priced())
    assert (timeline.exposed, timeline.seconds) == (11.0, 21.0)
    assert [(span.start, span.exposed, span.under) for span in timeline.collectives()] == [
        (0.0, 8.0, 0.0),
        (8.0, 3.0, 5.0),
    ]


def test_under_computation_on_a_cpu_it_hides_nothing(monkeypatch):
    monkeypatch.setattr(costs, "ranks_of", lambda node: (0, 1))
    graph = two_matmuls()
    overlap(graph)
    gpu, cpu = (
        costs.graph_costs(graph, simulate(graph, machine), machine, {(0, 1): "dp_shard"})
        for machine in (dataclasses.replace(priced(), name=name) for name in ("GPU", "CPU"))
    )
    assert (gpu.exposed["dp_shard"], cpu.exposed["dp_shard"], gpu.compute, cpu.compute) == (
        11.0,
        16.0,
        10.0,
        10.0,
    )


def test_computation_beside_a_collective_has_the_multiprocessors_that_are_left(monkeypatch):
    def half_as_fast_on_half(node, machine, fused=True):
        seconds = node_seconds(node, machine, fused)
        is_computation = not parameters_of(node)
        return seconds * 2 * CHANNELS / machine.multiprocessors if is_computation else seconds

    graph = two_matmuls()
    overlap(graph)
    machine = dataclasses.replace(priced(), multiprocessors=2 * CHANNELS)
    monkeypatch.setattr(timelines, "node_seconds", half_as_fast_on_half)
    timeline = simulate(graph, machine)
    # f begins at 8, with b: in 8 seconds it does 4 of its 5, and the last one alone
    assert timeline.compute == pytest.approx(9.0 + 5.0, rel=1e-4)
    assert (timeline.exposed, timeline.seconds) == pytest.approx((8.0, 8.0 + 9.0 + 5.0), rel=1e-4)


def test_no_operator_starts_before_the_host_has_issued_it():
    machine = dataclasses.replace(
        priced(), host=1e7
    )  # gathers at 10 and 40, waits at 20 and 50, f and g at 30 and 60
    timeline = simulate(two_matmuls(), machine, fused=False)
    assert timeline.idle == 10 + (30 - 18) + (40 - 35) + (60 - 48)
    assert timeline.seconds == timeline.idle + 16 + 10
    assert simulate(two_matmuls(), machine, fused=True).idle == 0  # one launch


def test_a_bucket_holds_computation_up_once():
    hand = Hand()
    a, b = (
        hand.gather(shard, f"layers.0.{name}")
        for name, shard in {name: hand.input(1) for name in "ab"}.items()
    )
    graph = hand.output(hand.compute("f", 5.0, a, b))
    merge_buckets(graph, by_block(graph))
    timeline = simulate(graph, priced(latency=10.0))
    assert [(span.name, span.seconds, span.exposed) for span in timeline.collectives()] == [
        ("all_gather layers.0.a and 1 more", 10.0 + 16.0, 10.0 + 16.0)
    ]
    assert (timeline.exposed, timeline.seconds) == (10.0 + 16.0, 10.0 + 16.0 + 5.0)


def test_the_bound_is_the_first_gather_and_what_computation_is_too_short_for():
    graph = two_matmuls()
    assert lower_bound(graph, priced()) == 16.0 - 5.0  # g comes after both gathers
    assert lower_bound(graph, priced(latency=1.0)) == 18.0 - 5.0
    overlap(graph)
    assert (
        simulate(graph, priced()).exposed == lower_bound(graph, priced()) == 11.0
    )  # there is none better
    hand = Hand()
    gathered = [hand.compute(name, 2.0, hand.gather(hand.input(1), name)) for name in "abc"]
    assert lower_bound(hand.output(*gathered), priced()) == 24.0 - 4.0


def test_the_bound_counts_the_last_reduction_and_what_needs_no_weight():
    hand = Hand()
    first = hand.compute("loss", 3.0, hand.input(2))
    whole = hand.gather(hand.input(1), "a")
    graph = hand.output(hand.reduce(hand.compute("f", 50.0, first, whole), "a"))
    assert lower_bound(graph, priced()) == (8.0 - 3.0) + 16.0


def test_groups_that_travel_beside_each_other_are_not_added_up():
    hand = Hand()
    shards = [hand.input(1), hand.input(1)]
    graph = hand.output(hand.compute("f", 1.0, *map(hand.gather, shards, "ab", ("dp", "tp"))))
    overlap(graph)
    timeline = simulate(graph, priced(), bound=lower_bound(graph, priced()))
    assert timeline.bound == timeline.exposed == 8.0


NODE = st.tuples(
    st.sampled_from(["gather", "compute", "tensor parallel", "reduce", "reduce twice"]),
    st.integers(0, 9),
    st.sampled_from(["dp", "tp"]),
    st.integers(1, 5),
)


@given(st.lists(NODE, min_size=1, max_size=12), st.sampled_from([0.0, 2.0]), st.booleans())
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_no_schedule_exposes_less_than_the_bound(nodes, latency, merged):
    """Random graphs, with and without buckets: as they are, and with their collectives moved in
    both ways.
    """
    hand, machine = Hand(), priced(latency)
    x, *inputs = hand.input(2), *(hand.input(2 * size) for *_, size in nodes)
    results = []
    for number, ((kind, seconds, group, _), own) in enumerate(zip(nodes, inputs, strict=True)):
        name = f"{kind} {number}"
        if kind == "gather":
            shard = hand.call(aten._to_copy.default, own, dtype=torch.float64)
            shard.meta["seconds"] = float(seconds)
            whole = hand.call(aten.sum.default, hand.gather(shard, name, group))
            x = hand.compute(name, 1.0, hand.call(aten.mul.Tensor, x, whole))
        elif kind == "tensor parallel":
            gathered = hand.call(GATHER, x, 2, "tp")
            gathered.meta["seconds"] = float(seconds)
            x = hand.call(
                aten.slice.Tensor, hand.call(collectives.wait_tensor.default, gathered), 0, 0, 2
            )
        elif kind == "compute":
            x = hand.compute(name, float(seconds), x)
        else:
            gradient = hand.compute(
                name,
                float(seconds),
                hand.call(aten.mul.Tensor, own, hand.call(aten.sum.default, x)),
            )
            reduced = hand.reduce(gradient, name, group)
            results.append(hand.all_reduce(reduced, name) if kind == "reduce twice" else reduced)
    graph = hand.output(x, *results)
    if merged:
        in_threes = enumerate(parameter_collectives(graph))
        merge_buckets(graph, {node: number // 3 for number, node in in_threes})
    bound = lower_bound(graph, machine)
    assert bound <= simulate(graph, machine).exposed + 1e-9
    for prices in (None, machine):
        overlap(graph, prices)
        timeline = simulate(graph, machine, bound=lower_bound(graph, machine))
        assert lower_bound(graph, machine) <= timeline.exposed + 1e-9
        assert bound <= timeline.exposed + 1e-9
        assert timeline.bound <= timeline.exposed


def test_groups_do_not_wait_for_each_other():
    hand = Hand()
    a, b, c = hand.input(1), hand.input(1), hand.input(1)
    started = [
        hand.call(GATHER, shard, 2, group, fqn=group)
        for shard, group in ((a, "dp"), (b, "dp"), (c, "tp"))
    ]
    hand.output(*(hand.call(collectives.wait_tensor.default, each) for each in started))
    timeline = simulate(hand.graph, priced())
    assert [(span.group, span.start) for span in timeline.collectives()] == [
        ("dp", 0.0),
        ("dp", 8.0),
        ("tp", 0.0),
    ]
    assert (timeline.seconds, timeline.exposed, timeline.communication) == (16.0, 16.0, 24.0)


def test_tensor_parallel_collectives_count_as_computation():
    hand = Hand()
    gathered = hand.call(GATHER, hand.input(2), 2, "tp")
    gathered.meta["seconds"] = 4.0
    timeline = simulate(hand.output(hand.call(collectives.wait_tensor.default, gathered)), priced())
    assert (timeline.compute, timeline.communication, timeline.seconds) == (4.0, 0.0, 4.0)


def reductions(*seconds):
    hand, results = Hand(), []
    for number, computes in enumerate(seconds):
        results.append(
            hand.reduce(hand.compute(f"make {number}", computes, hand.input(2)), f"p{number}")
        )
    return hand.output(*results)


def test_a_reduction_is_waited_for_when_a_later_one_starts_by_which_it_is_done():
    graph = reductions(
        1.0, 3.0, 5.0, 1.0
    )  # each is reduced in 8 seconds; the first is done 9 seconds from the start
    wait_for_reductions_late(graph, priced())
    assert places(graph) == [
        *(
            "make 0",
            "reduce p0",
            "make 1",
            "reduce p1",
            "make 2",
            "wait reduce p0",
            "reduce p2",
            "make 3",
        ),
        *("wait reduce p1", "reduce p3", "wait reduce p2", "wait reduce p3"),
    ]


def test_no_more_is_reduced_at_once_than_two_of_the_largest():
    graph = reductions(*[0.0] * 4)
    wait_for_reductions_late(graph, priced())
    order = places(graph)
    assert (
        order.index("wait reduce p0")
        < order.index("reduce p2")
        < order.index("wait reduce p1")
        < order.index("reduce p3")
    )


def test_memory_is_what_is_alive_at_once():
    hand = Hand()
    saved = hand.input(100)  # 400 bytes, given and freed
    kept = hand.input(100)
    kept.meta["is_model_input"] = True
    doubled = hand.call(aten.cat.default, [saved, kept])  # 800
    part = hand.call(aten.slice.Tensor, doubled, 0, 0, 10)  # a view of it
    hand.output(hand.call(aten.neg.default, part))  # 40
    assert peak_bytes(hand.graph) == 400 + 800
    assert peak_bytes(Hand().output()) == 0


@pytest.mark.parametrize("machine", [None, priced()])
def test_no_gather_overtakes_the_one_before_it(machine):
    """All are late: there is no computation to travel under."""
    hand = Hand()
    shards = [hand.input(8 - number) for number in range(4)]
    results = [
        hand.compute(
            f"f{number}", 1.0, hand.gather(hand.call(aten.alias.default, shard), f"p{number}")
        )
        for number, shard in enumerate(shards)
    ]
    graph = hand.output(*results)
    overlap(graph, machine)
    assert [word for word in places(graph) if word.startswith("gather")] == [
        f"gather p{number}" for number in range(4)
    ]


def gathers_around(nbytes):
    """c, which is long on its way, is read last; what stands in front of it has `nbytes` alive for
    a while.
    """
    hand = Hand()
    a, b, c, x = hand.input(1), hand.input(1), hand.input(100), hand.input(nbytes // 4)
    first = hand.compute("first", 1.0, hand.gather(a, "a"))
    total = hand.call(aten.sum.default, hand.compute("big", 1.0, x))
    second = hand.compute("second", 1.0, hand.gather(b, "b"))
    cast = hand.call(aten._to_copy.default, c, dtype=torch.float64)
    return hand.output(first, total, second, hand.compute("last", 1.0, hand.gather(cast, "c")))


@pytest.mark.parametrize(("nbytes", "moves"), [(4, True), (4000, False)])
def test_a_gather_that_would_raise_the_peak_stays_where_it_was(nbytes, moves):
    pairwise, in_time = gathers_around(nbytes), gathers_around(nbytes)
    overlap(pairwise)
    overlap(in_time, priced())
    assert peak_bytes(in_time) <= peak_bytes(pairwise)
    assert (places(in_time) != places(pairwise)) == moves
    if not moves:  # what leads to it, too
        assert [node.name for node in in_time.nodes] == [node.name for node in pairwise.nodes]
