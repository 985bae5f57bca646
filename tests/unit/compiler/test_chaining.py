"""A chunk of tokens is gathered once it is reduced, before other chunks are: the same numbers, and less waiting."""

import pytest
import torch
from hand import GATHER, RANKS, REDUCE, Hand, aten, collectives, count, two_ranks  # noqa: F401

from titan_lite.compiler.chunking import choose_collectives, cut_into_chunks
from titan_lite.compiler.timeline import simulate

pytestmark = pytest.mark.usefixtures("two_ranks")
T, C = 16, 4  # tokens of all ranks, width


def reduced(hand, batch):
    """A product whose tokens are reduce-scattered: (B, t, C)."""
    product = hand.call(aten.mm.default, hand.input(batch * T, C), hand.input(C, C))
    parts = hand.call(
        aten.split.Tensor, hand.call(aten.view.default, product, [batch, T, C]), T // RANKS, 1
    )
    joined = hand.call(aten.cat.default, [hand.part(parts, rank) for rank in range(RANKS)])
    return hand.call(collectives.wait_tensor.default, hand.call(REDUCE, joined, "sum", RANKS, "tp"))


def norm(hand, x, weight):
    squares = hand.call(aten.mean.dim, hand.call(aten.pow.Tensor_Scalar, x, 2), [2], True)
    inverse = hand.call(aten.rsqrt.default, hand.call(aten.add.Scalar, squares, 1e-5))
    return hand.call(aten.mul.Tensor, hand.call(aten.mul.Tensor, x, inverse), weight)


def gathered_product(hand, x, batch):
    started = hand.call(GATHER, x, RANKS, "tp")
    parts = hand.call(aten.split.Tensor, hand.call(collectives.wait_tensor.default, started), batch)
    whole = hand.call(aten.cat.default, [hand.part(parts, rank) for rank in range(RANKS)], 1)
    rows = hand.call(aten.view.default, whole, [batch * T, C])
    return hand.call(aten.mm.default, rows, hand.input(C, C)), whole


def boundary(batch=1, late_weight=False, between=norm):
    """Two products, with a residual sum and a norm between them. late_weight: the norm's weight is gathered just before it."""
    hand = Hand()
    residual, weight = (
        hand.input(batch, T // RANKS, C),
        hand.input(C // RANKS if late_weight else C),
    )
    total = hand.call(aten.add.Tensor, residual, reduced(hand, batch))
    if late_weight:
        weight = hand.gather(weight, "layers.0.ffn_norm.weight")
    product, _ = gathered_product(hand, between(hand, total, weight), batch)
    return hand, hand.output(product, total)


class Timed:
    """A machine on which a product takes `product` seconds for each chunk of it, and a collective `collective`."""

    multiprocessors = 0

    def __init__(self, chunks, product=3.0, collective=1.0):
        self.chunks, self.product, self.collective = chunks, product, collective

    def cost(self, node, fused=True):
        seconds, whole = {
            aten.mm.default: (self.product, T * C),
            GATHER: (self.collective, T * C),
            REDUCE: (self.collective, T * C // RANKS),
        }.get(node.target, (0.0, 0))
        return seconds * (self.chunks if seconds and node.meta["val"].numel() >= whole else 1)

    def beside_collectives(self):
        return self


def chained(graph, chunks, machine=None):
    return cut_into_chunks(graph, chunks, choose_collectives(graph, chunks, machine))


def order(graph):
    """Starts of collectives, waits and products by name: r, wr, g, wg, and p of either product."""
    names, words = {}, []
    for node in graph.nodes:
        if node.target in (GATHER, REDUCE):
            kind = "g" if node.target is GATHER else "r"
            names[node] = f"{kind}{sum(name[0] == kind for name in names.values())}"
            words.append(names[node])
        elif node.target is collectives.wait_tensor.default:
            words.append(f"w{names[node.args[0]]}")
        elif node.target is aten.mm.default:
            words.append("p")
    return words


@pytest.mark.parametrize("late_weight", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("chunks", [2, 4])
def test_chained_chunks_give_the_same_numbers(chunks, batch, late_weight):
    hand, graph = boundary(batch, late_weight)
    before = hand.run()
    assert chained(graph, chunks) == (2, 1)
    assert count(graph, REDUCE) == count(graph, GATHER) - late_weight == chunks
    assert count(graph, aten.rsqrt.default) == chunks  # of a chunk each, and of the whole no more
    for old, new in zip(before, hand.run(), strict=True):
        torch.testing.assert_close(old, new, rtol=1e-6, atol=1e-6)


def test_a_chunk_is_gathered_while_others_are_computed():
    _, graph = boundary()
    chained(graph, 4)
    start = ["p", "r0", "p", "r1", "wr0", "g0", "p", "r2", "wr1", "g1", "p", "r3"]
    assert order(graph) == [
        *start,
        "wg0",
        "p",
        "wr2",
        "g2",
        "wr3",
        "g3",
        "wg1",
        "p",
        "wg2",
        "p",
        "wg3",
        "p",
    ]


def test_with_long_products_only_the_last_chunk_is_gathered_behind_the_next_product():
    _, graph = boundary()
    chained(graph, 4, Timed(4))
    start = ["p", "r0", "p", "r1", "wr0", "g0", "p", "r2", "wr1", "g1", "p", "r3", "wr2", "g2"]
    assert order(graph) == [*start, "wg0", "p", "wr3", "g3", "wg1", "p", "wg2", "p", "wg3", "p"]


@pytest.mark.parametrize(("chunks", "left"), [(2, 3.0), (4, 0.0), (8, 0.0)])
def test_nothing_waits_between_long_products_of_several_chunks(chunks, left):
    machine, graphs = Timed(chunks), [boundary()[1] for _ in range(2)]
    chained(graphs[0], chunks, machine)
    cut, whole = (simulate(graph, machine) for graph in graphs)
    assert whole.waited == 2.0 * chunks
    assert cut.waited == left
    assert cut.seconds == 2 * 3.0 * chunks + left


def test_what_mixes_tokens_is_not_chained():
    def mixing(hand, x, weight):
        return hand.call(
            aten.mul.Tensor,
            hand.call(aten.sub.Tensor, x, hand.call(aten.mean.dim, x, [1], True)),
            weight,
        )

    hand, graph = boundary(between=mixing)
    before = hand.run()
    assert chained(graph, 4) == (2, 0)
    assert all(torch.allclose(old, new) for old, new in zip(before, hand.run(), strict=True))


def test_the_tokens_of_a_gather_may_be_read_elsewhere():
    hand = Hand()
    x = norm(hand, reduced(hand, 2), hand.input(C))
    product, whole = gathered_product(hand, x, 2)
    graph = hand.output(product, hand.call(aten.neg.default, x), whole)
    before = hand.run()
    assert chained(graph, 4) == (2, 1)
    assert all(torch.allclose(old, new) for old, new in zip(before, hand.run(), strict=True))


def test_a_reduction_that_is_saved_before_its_wait_is_cut():
    hand = Hand()
    waited = reduced(hand, 1)
    graph = hand.output(hand.call(aten.neg.default, waited), waited.all_input_nodes[0])
    before = hand.run()
    assert chained(graph, 4) == (1, 0)
    assert all(torch.allclose(old, new) for old, new in zip(before, hand.run(), strict=True))


def two_gathers_of_one_reduction(hand):
    x = reduced(hand, 1)
    return [gathered_product(hand, norm(hand, x, hand.input(C)), 1)[0] for _ in range(2)], 3, 1


def a_norm_of_the_recomputed_block(hand):
    """As in the backward of a block: the next gather has tokens that depend on the first reduction and on the first product."""
    x = reduced(hand, 1)
    product, _ = gathered_product(hand, norm(hand, x, hand.input(C)), 1)
    parts = hand.call(
        aten.split.Tensor, hand.call(aten.view.default, product, [1, T, C]), T // RANKS, 1
    )
    both = hand.call(
        aten.neg.default,
        hand.call(aten.cat.default, [hand.part(parts, rank) for rank in range(RANKS)]),
    )
    again = hand.call(
        collectives.wait_tensor.default, hand.call(REDUCE, both, "sum", RANKS, "tp")
    )  # whole: no product before it
    return [product, gathered_product(hand, hand.call(aten.mul.Tensor, again, x), 1)[0]], 3, 1


def several_results(hand):
    x = reduced(hand, 1)
    variance = hand.part(hand.call(aten.var_mean.correction, x, [2], correction=0, keepdim=True), 0)
    return [gathered_product(hand, hand.call(aten.div.Tensor, x, variance), 1)[0]], 2, 0


def a_factor_that_depends_on_the_reduction(hand):
    x = reduced(hand, 1)
    started = hand.call(GATHER, x, RANKS, "tp")
    parts = hand.call(aten.split.Tensor, hand.call(collectives.wait_tensor.default, started), 1)
    whole = hand.call(aten.cat.default, [hand.part(parts, rank) for rank in range(RANKS)], 1)
    factor = hand.call(aten.view.default, hand.call(aten.slice.Tensor, x, 1, 0, C), [C, C])
    return [hand.call(aten.mm.default, hand.call(aten.view.default, whole, [T, C]), factor)], 2, 0


@pytest.mark.parametrize(
    "make",
    [
        two_gathers_of_one_reduction,
        a_norm_of_the_recomputed_block,
        several_results,
        a_factor_that_depends_on_the_reduction,
    ],
)
@pytest.mark.parametrize("chunks", [2, 4])
def test_other_graphs_stay_right(make, chunks):
    hand = Hand()
    results, cuts, chains = make(hand)
    graph = hand.output(*results)
    before = hand.run()
    assert chained(graph, chunks) == (cuts, chains)
    for old, new in zip(before, hand.run(), strict=True):
        torch.testing.assert_close(old, new, rtol=1e-5, atol=1e-5)
