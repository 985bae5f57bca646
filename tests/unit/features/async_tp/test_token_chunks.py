"""Tokens gathered or reduced in chunks around a matmul: the same numbers, and one chunk travels
while another is computed.
"""

import dataclasses
import operator

import pytest
import torch
from handmade_graphs import (
    GATHER,
    RANKS,
    REDUCE,
    Hand,
    aten,
    collectives,
    count,
    priced,
)
from torch._inductor.lowering import lowerings

from titan_lite.compile.settings import PassSettings
from titan_lite.cost import timeline
from titan_lite.cost.op_cost import node_seconds
from titan_lite.cost.profiles import PROFILES
from titan_lite.cost.timeline import simulate
from titan_lite.features.async_tp import token_chunks
from titan_lite.features.async_tp.fused_matmuls import mark_fused_collectives
from titan_lite.features.async_tp.token_chunks import choose_collectives, cut_into_chunks
from titan_lite.graph import nbytes_of

pytestmark = pytest.mark.usefixtures("two_ranks")
B, T, C, N = 3, 8, 4, 5  # sequences, tokens of all ranks, width, width of the matmul


def cut(graph, chunks, machine=None):
    return cut_into_chunks(graph, chunks, choose_collectives(graph, chunks, machine))


def gathered(hand, x):
    """Tokens (B, T / RANKS, C) -> (B, T, C), as in tensor_parallel.py."""
    started = hand.call(GATHER, x, RANKS, "tp")
    parts = hand.call(
        aten.split.Tensor,
        hand.call(collectives.wait_tensor.default, started),
        x.meta["val"].shape[0],
    )
    return started, hand.call(
        aten.cat.default, [hand.part(parts, rank) for rank in range(RANKS)], 1
    )


def forward(matmuls=2, batch=B):
    hand = Hand()
    started, whole = gathered(hand, hand.input(batch, T // RANKS, C))
    started.meta["seconds"] = 8.0
    results = []
    for _ in range(matmuls):
        rows = hand.call(aten.view.default, whole, [batch * T, C])
        matmul = hand.call(aten.mm.default, rows, hand.input(C, N))
        matmul.meta["seconds"] = 10.0
        results.append(hand.call(aten.view.default, matmul, [batch, T, N]))
    return hand, hand.output(*results)


def reduction(batch=B):
    hand = Hand()
    matmul = hand.call(aten.mm.default, hand.input(batch * T, C), hand.input(C, N))
    parts = hand.call(
        aten.split.Tensor, hand.call(aten.view.default, matmul, [batch, T, N]), T // RANKS, 1
    )
    joined = hand.call(aten.cat.default, [hand.part(parts, rank) for rank in range(RANKS)])
    reduced = hand.call(REDUCE, joined, "sum", RANKS, "tp")
    return hand, hand.output(hand.call(collectives.wait_tensor.default, reduced))


def in_float8(hand, *shape):
    return hand.call(aten._to_copy.default, hand.input(*shape), dtype=torch.float8_e4m3fn)


def float8_matmul(hand, rows):
    one = hand.call(aten.ones.default, [])
    weight = hand.call(aten.t.default, in_float8(hand, 32, 16))
    return hand.call(aten._scaled_mm.default, rows, weight, one, one, None, None, torch.bfloat16)


def float8_forward(batch=4):
    hand = Hand()
    _, whole = gathered(
        hand, hand.call(aten.view.dtype, in_float8(hand, batch, 32, 16), torch.uint8)
    )
    rows = hand.call(
        aten.view.dtype, hand.call(aten.view.default, whole, [batch * 64, 16]), torch.float8_e4m3fn
    )
    return hand, hand.output(
        *(float8_matmul(hand, hand.call(aten.alias.default, rows)) for _ in range(2))
    )


def float8_reduction(batch=4):
    hand = Hand()
    matmul = float8_matmul(hand, in_float8(hand, batch * 64, 16))
    parts = hand.call(
        aten.split.Tensor, hand.call(aten.view.default, matmul, [batch, 64, 32]), 32, 1
    )
    joined = hand.call(aten.cat.default, [hand.part(parts, rank) for rank in range(RANKS)])
    return hand, hand.output(
        hand.call(collectives.wait_tensor.default, hand.call(REDUCE, joined, "sum", RANKS, "tp"))
    )


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("chunks", [2, 4])
@pytest.mark.parametrize(("make", "kind"), [(float8_forward, GATHER), (float8_reduction, REDUCE)])
def test_float8_chunks_give_the_same_numbers_to_the_bit(make, kind, chunks, batch):
    hand, graph = make(batch)
    before = hand.run()
    assert cut(graph, chunks) == 1
    assert count(graph, kind) == chunks
    assert count(graph, aten._scaled_mm.default) == chunks + (make is float8_forward)
    assert all(torch.equal(old, new) for old, new in zip(before, hand.run(), strict=True))
    assert cut(make(batch=1)[1], 8) == 0  # of 8 rows, which no float8 matmul on a GPU has


@pytest.mark.parametrize("batch", [1, B])
@pytest.mark.parametrize("chunks", [2, 4])
@pytest.mark.parametrize(("make", "kind"), [(forward, GATHER), (reduction, REDUCE)])
def test_chunks_give_the_same_numbers(make, kind, chunks, batch):
    hand, graph = make(batch=batch)
    before = hand.run()
    assert cut(graph, chunks) == 1
    assert count(graph, kind) == count(graph, collectives.wait_tensor.default) == chunks
    assert count(graph, aten.mm.default) == chunks + (
        make is forward
    )  # a second matmul reads all tokens
    assert {
        node.target for node in graph.nodes if node.op == "call_function"
    } <= lowerings.keys() | {operator.getitem}
    for old, new in zip(before, hand.run(), strict=True):
        assert old.shape == new.shape
        torch.testing.assert_close(old, new, rtol=1e-6, atol=1e-6)


def test_all_gathers_start_at_once_and_each_matmul_waits_for_its_own():
    _, graph = forward(matmuls=1)
    cut(graph, 2)
    order = [
        node.target
        for node in graph.nodes
        if node.target in (GATHER, collectives.wait_tensor.default, aten.mm.default)
    ]
    assert order == [GATHER, GATHER, *[collectives.wait_tensor.default, aten.mm.default] * 2]


def test_a_reduction_starts_before_the_next_matmul():
    _, graph = reduction()
    cut(graph, 2)
    order = [
        node.target
        for node in graph.nodes
        if node.target in (REDUCE, collectives.wait_tensor.default, aten.mm.default)
    ]
    assert order == [
        aten.mm.default,
        REDUCE,
        aten.mm.default,
        REDUCE,
        *[collectives.wait_tensor.default] * 2,
    ]


@pytest.mark.parametrize(("share", "number"), [(0.5, 1), (0.85, 0)])
def test_only_what_is_faster_is_cut(share, number, monkeypatch):
    """Half of the tokens take `share` of the seconds of all."""

    def seconds_by_share(node, machine, fused=True):
        seconds, whole = {GATHER: (8.0, T * C), aten.mm.default: (10.0, T * N)}.get(
            node.target, (0.0, 0)
        )
        return seconds * (1.0 if nbytes_of(node) == 4 * whole else share)

    for module in (token_chunks, timeline):
        monkeypatch.setattr(module, "node_seconds", seconds_by_share)
    _, graph = forward(matmuls=1, batch=1)
    names = [node.name for node in graph.nodes]
    assert cut(graph, 2, priced()) == number  # 14 seconds or 23.8 instead of 18
    assert (names == [node.name for node in graph.nodes]) == (not number)


def test_tokens_that_cannot_be_divided_stay_whole():
    _, graph = forward()
    assert cut(graph, 3) == 0
    assert count(graph, GATHER) == 1


def test_other_collectives_stay_whole():
    hand = Hand()
    _, whole = gathered(hand, hand.input(B, T // RANKS, C))
    reduced = hand.reduce(hand.input(2 * C, N), "a")
    graph = hand.output(hand.call(aten.add.Tensor, whole, 1.0), reduced)
    assert cut(graph, 2) == 0
    assert simulate(graph, priced()).waited > 0


# asynchronous tensor parallelism


@pytest.mark.parametrize(
    ("make", "kind", "matmuls"), [(forward, GATHER, 2), (reduction, REDUCE, 1)]
)
def test_collectives_that_inductor_fuses_are_marked_with_all_their_matmuls(make, kind, matmuls):
    _, graph = make()
    assert mark_fused_collectives(graph, PassSettings()) == 1
    (node,) = [node for node in graph.nodes if node.target is kind]
    found = [node for node in graph.nodes if node.target is aten.mm.default]
    assert node.meta["fused_with"] == tuple(found)
    assert [each.meta["parts"] for each in found] == [RANKS] * matmuls


def test_a_sum_of_matmuls_and_a_matmul_with_tokens_on_the_right_are_not_fused():
    hand = Hand()
    _, whole = gathered(hand, hand.input(B, T // RANKS, C))
    rows = hand.call(aten.view.default, whole, [B * T, C])
    right = hand.call(aten.mm.default, hand.input(N, B * T), rows)
    both = hand.call(
        aten.add.Tensor,
        *(hand.call(aten.mm.default, hand.input(B * T, C), hand.input(C, N)) for _ in range(2)),
    )
    parts = hand.call(
        aten.split.Tensor, hand.call(aten.view.default, both, [B, T, N]), T // RANKS, 1
    )
    joined = hand.call(aten.cat.default, [hand.part(parts, rank) for rank in range(RANKS)])
    reduced = hand.call(REDUCE, joined, "sum", RANKS, "tp")
    assert (
        mark_fused_collectives(
            hand.output(right, hand.call(collectives.wait_tensor.default, reduced)), PassSettings()
        )
        == 0
    )


def test_a_matmul_of_gathered_tokens_by_themselves_is_not_fused():
    hand = Hand()
    _, whole = gathered(hand, hand.input(1, T // RANKS, C))
    rows = hand.call(aten.view.default, whole, [T, C])
    graph = hand.output(hand.call(aten.mm.default, rows, hand.call(aten.t.default, rows)))
    assert mark_fused_collectives(graph, PassSettings()) == 0
    assert not any("fused_with" in node.meta or "parts" in node.meta for node in graph.nodes)


@pytest.mark.parametrize(("make", "kind"), [(forward, GATHER), (reduction, REDUCE)])
def test_a_fused_collective_costs_what_its_matmuls_do_not_hide(make, kind):
    machine = PROFILES["H100"]
    _, graph = make()
    mark_fused_collectives(graph, PassSettings())
    for node in graph.nodes:
        node.meta.pop("seconds", None)
    (node,) = [node for node in graph.nodes if node.target is kind]
    nbytes, launches = 4 * B * T * (C if kind is GATHER else N), 2e-6 * machine.collective_launch
    moved = machine.memory_traffic(
        nbytes if kind is GATHER else 1.5 * nbytes
    )  # a copy of the shard; or two parts and their sum
    assert node_seconds(node, machine) == pytest.approx(
        launches + moved
    )  # its copy takes less than half of a matmul, launched twice
    node.meta["fused_with"] = ()
    apart = dataclasses.replace(machine, ranks_per_node=1)  # where no rank reads another's memory
    assert node_seconds(node, apart) == apart.collective(
        "all_gather" if kind is GATHER else "reduce_scatter", nbytes, [0, 1]
    )
    copy = machine.launch * 1e-6 + nbytes / 2 / (
        machine.intra_node.bandwidth * machine.link_efficiency * 1e9
    )
    assert node_seconds(node, machine) == pytest.approx(launches + moved + copy)


def test_a_reduction_that_is_saved_before_its_wait_is_cut():
    hand, graph = reduction()
    (waited,) = graph.output_node().all_input_nodes
    graph.output_node().args = ([waited, waited.all_input_nodes[0]],)
    before = hand.run()
    assert cut(graph, 4) == 1
    assert count(graph, REDUCE) == 4
    for old, new in zip(before, hand.run(), strict=True):
        torch.testing.assert_close(old, new)
