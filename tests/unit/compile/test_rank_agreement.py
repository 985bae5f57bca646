"""Ranks that run the same graph: what they agree on, and which ranks an error names."""

import pytest
from handmade_graphs import GATHER, Hand, aten, collectives, priced

from titan_lite.compile.passes.bucketing import bucket_by_block
from titan_lite.compile.passes.reordering import overlap_collectives
from titan_lite.compile.rank_agreement import (
    OneRank,
    check_same_order,
    first_ranks_choice,
    hash_by_group,
)
from titan_lite.compile.settings import PassSettings
from titan_lite.config import ConfigError
from titan_lite.graph import KINDS, parameters_of

pytestmark = pytest.mark.usefixtures("two_ranks")


def layers(count=2, name="layers.{}.{}.weight"):
    """Two gathers a layer, among ranks 0 and 1."""
    hand = Hand()
    shards = {name.format(layer, part): hand.input(4) for layer in range(count) for part in "ab"}
    x = hand.input(8)
    for fqn, shard in shards.items():
        x = hand.call(aten.mul.Tensor, x, hand.gather(shard, fqn))
    return hand.output(x)


class OtherRanks(OneRank):
    """Ranks with texts made of the own one: {rank: text}."""

    def __init__(self, texts):
        self.all_gather = texts

    def all_equal(self, text):
        return len({text, *self.all_gather(text).values()}) == 1


def other_hashes(text):
    return text.replace('": "', '": "f')


def test_ranks_that_would_hang_are_named():
    def texts(own):
        return {0: own, 1: other_hashes(own), 6: own.replace("0, 1", "6, 7")}

    with pytest.raises(
        ConfigError,
        match=(
            r"ranks 1 would communicate in another order than rank 0 among 0, 1 in the forward"
            r" graph"
        ),
    ):
        check_same_order(layers(), "forward", OtherRanks(texts))


def test_a_rank_without_what_its_group_does_is_named():
    with pytest.raises(
        ConfigError, match=r"ranks 1 would communicate in another order than rank 0"
    ):
        check_same_order(layers(), "forward", OtherRanks(lambda own: {0: own, 1: "{}"}))


def test_other_groups_may_do_other_things():
    """Another tensor-parallel rank has other sizes, and other ranks to gather them from."""
    others = OtherRanks(lambda own: {2: other_hashes(own.replace("0, 1", "2, 3"))})
    assert check_same_order(layers(), "forward", others)


def test_texts_of_all_ranks_are_gathered_only_where_they_differ():
    ranks = OneRank()
    ranks.all_gather = lambda text: pytest.fail("gathered")
    assert check_same_order(layers(), "forward", ranks)


def test_the_hash_is_of_what_travels_and_in_which_order():
    hashes = [
        hash_by_group(graph) for graph in (layers(), layers(3), layers(name="blocks.{}.{}.weight"))
    ]
    assert len({str(of_groups) for of_groups in hashes}) == 3
    assert hash_by_group(layers()) == hashes[0]
    graph = layers()
    overlap_collectives(graph, PassSettings())  # started early, and in the same order
    assert hash_by_group(graph) == hashes[0]
    bucket_by_block(graph, PassSettings())
    assert hash_by_group(graph) not in hashes


def test_the_first_rank_chooses():
    class SecondRank(OneRank):
        def broadcast(self, text):
            assert text == '{"a": 1}'
            return '{"a": 2}'

    assert first_ranks_choice({"a": 1}, SecondRank()) == {"a": 2}
    assert first_ranks_choice([[3, 4]], OneRank()) == [[3, 4]]


def test_gathers_start_in_the_order_of_the_first_rank_whose_costs_are_others():
    def sharded(seconds):
        """Weights a, b, c; a gather of activations among the same ranks behind that of a."""
        hand = Hand()
        shards = [hand.input(4) for _ in "abc"]
        x = hand.call(aten.mul.Tensor, hand.input(8), hand.gather(shards[0], "a"))
        whole = hand.call(GATHER, hand.compute("on a", 90.0, x), 2, "dp")
        x = hand.call(aten.slice.Tensor, hand.call(collectives.wait_tensor.default, whole), 0, 0, 8)
        x = hand.call(aten.mul.Tensor, x, hand.gather(shards[1], "b"))
        x = hand.compute("on b", seconds, x)
        return hand.output(hand.call(aten.mul.Tensor, x, hand.gather(shards[2], "c")))

    class Recorded(OneRank):
        def broadcast(self, text):
            self.text = text
            return text

    class Following(OneRank):
        def broadcast(self, text):
            return first.text

    def overlapped(seconds, ranks):
        graph = sharded(seconds)
        overlap_collectives(graph, PassSettings(machine=priced(), fused=True, ranks=ranks))
        return [parameters_of(node) for node in graph.nodes if node.target in KINDS]

    for of_first, of_other in ((0.0, 90.0), (90.0, 0.0)):
        first = Recorded()
        order = overlapped(of_first, first)
        assert overlapped(of_other, OneRank()) != order
        assert overlapped(of_other, Following()) == order
    first.text = "[0, 1, 2, 3, 4]"  # another number: nothing to take, and nothing to fail on
    assert overlapped(of_other, Following()) == overlapped(of_other, OneRank())
