"""Automatic wrapping: buckets grow by the rule and stop at its edge.

A gather takes a second a byte.
"""

import pytest
from handmade_graphs import Hand, left, priced

from titan_lite.compile.passes.bucketing import by_block, merge_buckets
from titan_lite.features.cost_buckets import greedy as greedy_buckets
from titan_lite.features.cost_buckets.greedy import greedy

pytestmark = pytest.mark.usefixtures("two_ranks")


@pytest.fixture(autouse=True)
def prices_are_of_two_ranks(monkeypatch):
    monkeypatch.setattr(greedy_buckets, "ranks_of", lambda node: (0, 1))


def forward(*parameters):
    """Each parameter (name, seconds to gather: a multiple of 8, seconds of computation with it)."""
    hand = Hand()
    shards = [hand.input(seconds // 8) for _, seconds, _ in parameters]
    results = [
        hand.compute(f"with {name}", computes, hand.gather(shard, name))
        for shard, (name, _, computes) in zip(shards, parameters, strict=True)
    ]
    return hand.output(*results)


def backward(*parameters, gather=False):
    """Each parameter (name, seconds to reduce, seconds of computation that makes its gradient);
    gathered before, on request.
    """
    hand, results = Hand(), []
    inputs = [(hand.input(seconds // 4), hand.input(seconds // 8)) for _, seconds, _ in parameters]
    for (x, shard), (name, _, computes) in zip(inputs, parameters, strict=True):
        whole = hand.gather(shard, name) if gather else None
        made = hand.compute(f"makes {name}", computes, x)
        results += [hand.reduce(made, name), *([whole] if gather else [])]
    return hand.output(*results)


def buckets(graph, latency=0.0):
    merge_buckets(graph, greedy(graph, priced(latency)))
    return [" ".join(fqns) for _, fqns, _ in left(graph)]


def in_one_block(names):
    """Two blocks are the most that two buckets have, which is no limit for one block."""
    return [" ".join(f"layers.0.{name}" for name in bucket.split()) for bucket in names]


A, B, C = in_one_block("abc")


@pytest.mark.parametrize(("computes", "expected"), [(16.0, ["a", "b c"]), (15.9, ["a", "b", "c"])])
def test_a_bucket_grows_while_it_hides_under_the_computation_of_the_one_before(computes, expected):
    assert buckets(forward((A, 8, computes), (B, 8, 1.0), (C, 8, 1.0))) == in_one_block(expected)


@pytest.mark.parametrize(
    ("block", "expected"),
    [(1, ["layers.0.a", "layers.1.b layers.1.c"]), (2, [A, "layers.1.b", "layers.2.c"])],
)
def test_two_buckets_have_no_more_bytes_than_two_blocks(block, expected):
    assert (
        buckets(forward((A, 8, 99.0), ("layers.1.b", 8, 1.0), (f"layers.{block}.c", 8, 1.0)))
        == expected
    )


def test_of_equal_blocks_two_are_the_limit():
    names = [f"layers.{layer}.{name}" for layer in range(3) for name in "pq"]
    assert buckets(forward(*((name, 8, 999.0) for name in names))) == [
        names[0],
        " ".join(names[1:4]),
        names[4],
        names[5],
    ]


@pytest.mark.parametrize(("latency", "expected"), [(2.0, ["a b", "c"]), (0.9, ["a", "b", "c"])])
def test_a_parameter_joins_where_the_latency_saved_is_more_than_could_hide(latency, expected):
    """Gathered alone, b would hide under the one second that a computes."""
    assert buckets(forward((A, 8, 1.0), (B, 8, 50.0), (C, 8, 1.0)), latency) == in_one_block(
        expected
    )


@pytest.mark.parametrize(("latency", "expected"), [(1.0, ["a", "b c"]), (0.0, ["a", "b", "c"])])
@pytest.mark.parametrize("large", ["b", "c"])
def test_a_weight_larger_than_the_rest_of_its_bucket_is_not_copied_to_save_less_than_that_takes(
    latency, expected, large
):
    sizes = {"a": 8, "b": 8, "c": 8, large: 24}
    assert buckets(
        forward(*((f"layers.0.{name}", size, 99.0) for name, size in sizes.items())), latency
    ) == in_one_block(expected)


@pytest.mark.parametrize(("computes", "expected"), [(16.0, ["a b", "c"]), (15.9, ["a", "b", "c"])])
def test_gradients_are_grouped_from_the_last_one_backwards(computes, expected):
    assert buckets(backward((A, 8, 1.0), (B, 8, 1.0), (C, 8, computes))) == in_one_block(expected)


@pytest.mark.parametrize(("computes", "expected"), [(24.0, ["a", "b c"]), (23.9, ["a", "b", "c"])])
def test_what_is_reduced_meanwhile_leaves_less_time_to_gather(computes, expected):
    graph = backward((A, 8, computes), (B, 8, 1.0), (C, 8, 1.0), gather=True)
    merge_buckets(graph, greedy(graph, priced()))
    assert [
        " ".join(fqns) for kind, fqns, _ in left(graph) if kind == "all_gather"
    ] == in_one_block(expected)


def test_what_is_reduced_over_copies_goes_along():
    hand, results = Hand(), []
    for name, computes in ((A, 1.0), (B, 1.0), (C, 99.0)):
        made = hand.compute(name, computes, hand.input(2))
        results.append(hand.all_reduce(hand.reduce(made, name), name))
    graph = hand.output(*results)
    merge_buckets(graph, greedy(graph, priced()))
    assert left(graph) == [
        ("reduce_scatter", (A, B), 16),
        ("all_reduce", (A, B), 8),
        ("reduce_scatter", (C,), 8),
        ("all_reduce", (C,), 4),
    ]


def test_a_graph_without_collectives_has_no_buckets():
    hand = Hand()
    assert greedy(hand.output(hand.compute("x", 1.0, hand.input(2))), priced()) == {}


def test_both_parts_of_a_tied_gradient_are_reduced_for_themselves():
    """The output's at the beginning of backward, the embedding's at its end, of one parameter."""
    for choose in (by_block, lambda graph: greedy(graph, priced())):
        graph = backward(
            ("tok_embeddings.weight", 8, 1.0), ("a", 8, 1.0), ("tok_embeddings.weight", 8, 1.0)
        )
        assert merge_buckets(graph, choose(graph)) == 0
        assert len(left(graph)) == 3
