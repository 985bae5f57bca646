"""Matmuls that nothing waits for are computed while a collective of activations is in flight;
numbers stay the same.
"""

import pytest
import torch
from handmade_graphs import GATHER, Hand, aten, collectives, priced

from titan_lite.compile.passes.defer_weight_grads import MAX_DEFERRED, defer_weight_grads
from titan_lite.compile.settings import PassSettings
from titan_lite.cost.timeline import lower_bound, simulate

pytestmark = pytest.mark.usefixtures("two_ranks")


def matmul(hand, name, seconds, *factors):
    node = hand.call(aten.mm.default, *factors)
    node.meta |= {"seconds": seconds, "called": name}
    return node


def exchange(hand, x, seconds):
    """Gather tokens on the path from block to block, and keep this rank's."""
    gathered = hand.call(GATHER, x, 2, "tp")
    gathered.meta["seconds"] = seconds
    return hand.call(
        aten.slice.Tensor, hand.call(collectives.wait_tensor.default, gathered), 0, 0, 2
    )


def backward(blocks, exchanged=4.0, weight=(1.0, 5.0), reduces=True):
    """Blocks with a matmul on the path, and two gradients of weights before it communicates."""
    hand, results = Hand(), []
    x = hand.input(2, 2)
    for block in range(blocks):
        for number, seconds in enumerate(weight):
            gradient = matmul(hand, f"dw{block}.{number}", seconds, hand.call(aten.t.default, x), x)
            results.append(
                hand.reduce(gradient, f"layers.{block}.{number}") if reduces else gradient
            )
        x = exchange(hand, matmul(hand, f"dx{block}", 2.0, x, hand.input(2, 2)), exchanged)
    return hand, hand.output(x, *results)


def deferred(graph, machine=None):
    return defer_weight_grads(graph, PassSettings(machine=machine, fused=True))


def words(graph):
    """The order of matmuls, and of the collectives of activations and their waits."""
    names = {GATHER: "start", collectives.wait_tensor.default: "wait"}
    found = []
    for node in graph.nodes:
        if node.target is aten.mm.default:
            found.append(node.meta["called"])
        elif node.target in names and "fqn" not in node.meta.get("custom", {}):
            found.append(names[node.target])
    return found


def test_a_collective_gets_the_shortest_matmul_that_hides_it():
    hand, graph = backward(2)
    before, numbers = simulate(graph, priced()), hand.run()
    assert deferred(graph, priced()) == 2
    assert words(graph) == [
        "dw0.0",
        "dx0",
        "start",
        "dw0.1",
        "wait",
        "dw1.0",
        "dx1",
        "start",
        "dw1.1",
        "wait",
    ]
    after = simulate(graph, priced())
    assert before.compute == 2 * (1 + 5 + 2 + 4)
    assert after.compute == 2 * (1 + 5 + 2)
    assert [span.exposed for span in after.spans if span.group == "tp"] == [0.0, 0.0]
    assert all(torch.equal(*pair) for pair in zip(numbers, hand.run(), strict=True))


def test_matmuls_that_are_too_short_are_used_together():
    _, graph = backward(1, exchanged=4.0, weight=(1.0, 2.0), reduces=False)
    assert deferred(graph, priced()) == 2
    assert words(graph) == ["dx0", "start", "dw0.1", "dw0.0", "wait"]
    (span,) = [span for span in simulate(graph, priced()).spans if span.group == "tp"]
    assert span.exposed == 4.0 - 3.0


def test_a_matmul_on_the_path_and_an_old_one_stay():
    hand = Hand()
    old, x = hand.input(2, 2), hand.input(2, 2)
    results = [matmul(hand, f"old{number}", 9.0, old, old) for number in range(MAX_DEFERRED + 3)]
    x = exchange(hand, matmul(hand, "path", 9.0, x, x), 100.0)
    graph = hand.output(exchange(hand, matmul(hand, "next", 9.0, x, x), 100.0), *results)
    assert deferred(graph, priced()) == MAX_DEFERRED
    assert words(graph)[:6] == ["old0", "old1", "old2", "path", "start", f"old{MAX_DEFERRED + 2}"]
    assert words(graph)[-4:] == ["wait", "next", "start", "wait"]


def test_without_a_machine_a_collective_gets_the_last_matmul():
    _, graph = backward(2)
    assert deferred(graph) == 2
    assert words(graph)[:5] == ["dw0.0", "dx0", "start", "dw0.1", "wait"]


def test_the_bound_counts_what_is_not_hidden():
    _, graph = backward(2)
    deferred(graph, priced())
    assert lower_bound(graph, priced()) <= simulate(graph, priced()).exposed


def test_forward_stays_as_it_is():
    hand = Hand()
    x = hand.input(2, 2)
    for block in range(3):
        x = exchange(hand, matmul(hand, f"y{block}", 2.0, x, hand.input(2, 2)), 4.0)
    graph = hand.output(x)
    before = [node.name for node in graph.nodes]
    assert deferred(graph, priced()) == 0
    assert [node.name for node in graph.nodes] == before
