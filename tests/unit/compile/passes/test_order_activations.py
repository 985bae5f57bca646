"""Collectives of activations start in the order of their waits, where that is faster."""

import pytest
from handmade_graphs import GATHER, Hand, aten, collectives, priced

from titan_lite.compile.passes.order_activations import choose_order, start_behind
from titan_lite.cost.timeline import simulate

pytestmark = pytest.mark.usefixtures("two_ranks")


def two_gathers(group="tp", between=0.0, after=9.0):
    """A gather that is waited for after another one, which starts behind it."""
    hand = Hand()
    starts = [hand.call(GATHER, hand.input(2, 2), 2, "tp")]
    starts.append(hand.call(GATHER, hand.compute("between", between, hand.input(2, 2)), 2, group))
    for start in starts:
        start.meta["seconds"] = 4.0
    soon, late = (hand.call(collectives.wait_tensor.default, start) for start in reversed(starts))
    graph = hand.output(hand.compute("after", after, soon), late)
    late.prepend(graph.find_nodes(op="call_function", target=aten.add.Tensor)[-1])
    return starts, graph


@pytest.mark.parametrize(
    ("options", "saved"),
    [({}, 4.0), (dict(group="cp"), 0.0), (dict(between=5.0), 0.0), (dict(after=0.0), 0.0)],
)
def test_a_collective_that_delays_one_that_is_needed_earlier_starts_behind_it_if_that_is_faster(
    options, saved
):
    starts, graph = two_gathers(**options)
    before = simulate(graph, priced()).seconds
    start_behind(graph, choose_order(graph, priced()))
    assert (starts[0] > starts[1]) == (saved > 0)
    assert simulate(graph, priced()).seconds == before - saved
    assert choose_order(graph, None) == []


def test_collectives_that_start_behind_the_same_one_keep_their_order():
    hand = Hand()
    starts = [hand.call(GATHER, hand.input(2, 2), 2, "tp") for _ in range(3)]
    for start in starts:
        start.meta["seconds"] = 4.0
    first = hand.compute("next", 9.0, hand.call(collectives.wait_tensor.default, starts[2]))
    graph = hand.output(
        first, *(hand.call(collectives.wait_tensor.default, start) for start in starts[:2])
    )
    assert simulate(graph, priced()).waited == 12.0
    start_behind(graph, choose_order(graph, priced()))
    assert starts[2] < starts[0] < starts[1]
    assert simulate(graph, priced()).waited == 4.0
