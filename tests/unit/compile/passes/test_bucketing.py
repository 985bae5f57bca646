"""Buckets and overlap on small graphs made by hand: who is merged with whom, where it stands, and
that no number changes.
"""

import pytest
import torch
from handmade_graphs import (
    GATHER,
    RANKS,
    REDUCE,
    Hand,
    aten,
    collectives,
    collectives_of,
    count,
    left,
    overlap,
)

from titan_lite.compile.passes.bucketing import by_block, merge_buckets
from titan_lite.compile.passes.reordering import (
    wait_for_reductions_late,
)
from titan_lite.compile.report import copied_by_buckets
from titan_lite.graph import parameters_of
from titan_lite.tools.plan.trace import schedule_as_in_eager_mode


def bucket_by_block(graph):
    return merge_buckets(graph, by_block(graph))


def unchanged(hand, change):
    before = hand.run()
    result = change(hand.graph)
    for one, other in zip(hand.run(), before, strict=True):
        assert torch.equal(one, other)
    return result


def two_layers():
    hand = Hand()
    shards = {fqn: hand.input(*shape) for fqn, shape in SHARDS.items()}
    x = hand.input(4, 6)
    for fqn, shard in shards.items():
        x = hand.call(aten.mm.default, x, hand.gather(shard, fqn))
    hand.output(x)
    return hand


SHARDS = {
    "tok_embeddings.weight": (3, 6),
    "layers.0.a.weight": (3, 10),
    "layers.0.b.weight": (5, 6),
    "layers.1.a.weight": (3, 6),
    "layers.1.b.weight": (3, 2),
    "norm.weight": (1, 2),
    "output.weight": (1, 7),
}


def test_the_gathers_of_a_block_become_one_where_the_first_one_was():
    hand = two_layers()
    unchanged(hand, bucket_by_block)
    assert [fqns for _, fqns, _ in left(hand.graph)] == [
        ("tok_embeddings.weight",),
        ("layers.0.a.weight", "layers.0.b.weight"),
        ("layers.1.a.weight", "layers.1.b.weight", "norm.weight"),
        ("output.weight",),
    ]
    assert [nbytes for *_, nbytes in left(hand.graph)] == [
        4 * 2 * numbers for numbers in (18, 60, 26, 7)
    ]
    assert count(hand.graph, GATHER) == 4
    order = [node.target for node in hand.graph.nodes if node.target in (GATHER, aten.mm.default)]
    assert order == [
        token for matmuls in (1, 2, 3, 1) for token in [GATHER, *[aten.mm.default] * matmuls]
    ]


def test_overlap_starts_each_gather_before_the_wait_of_the_one_in_use():
    hand = two_layers()
    bucket_by_block(hand.graph)
    assert unchanged(hand, overlap) == 3
    wait = collectives.wait_tensor.default
    order = [node.target for node in hand.graph.nodes if node.target in (GATHER, wait)]
    assert order == [GATHER, *[GATHER, wait] * 3, wait]


def gradients(dtype=torch.float32, groups=("dp",) * 4, operations=("sum",) * 4):
    """Four gradients of two layers, computed one after another, each reduced at once."""
    hand = Hand()
    x, results = hand.input(4, 4, dtype=dtype), []
    for number, (group, operation) in enumerate(zip(groups, operations, strict=True)):
        x = hand.call(aten.mul.Tensor, x, 1.5)
        reduced = hand.reduce(
            x, f"layers.{1 - number // 2}.{'ba'[number % 2]}.weight", group, operation
        )
        results.append(hand.call(aten.neg.default, reduced))
    hand.output(x, *results)
    return hand


def test_the_reductions_of_a_block_become_one_where_the_last_gradient_is_there():
    hand = gradients()
    unchanged(hand, bucket_by_block)
    assert [fqns for _, fqns, _ in left(hand.graph)] == [
        ("layers.1.b.weight", "layers.1.a.weight"),
        ("layers.0.b.weight", "layers.0.a.weight"),
    ]
    assert {nbytes for *_, nbytes in left(hand.graph)} == {2 * 16 * 4}
    order = [node.target for node in hand.graph.nodes if node.target in (REDUCE, aten.mul.Tensor)]
    assert order == [aten.mul.Tensor, aten.mul.Tensor, REDUCE] * 2


def test_overlap_waits_for_a_reduction_when_the_next_one_starts_and_for_the_last_at_the_end():
    hand = gradients()
    assert unchanged(hand, wait_for_reductions_late) >= 3
    wait = collectives.wait_tensor.default
    order = [
        node.target for node in hand.graph.nodes if node.target in (REDUCE, wait, aten.mul.Tensor)
    ]
    mul = aten.mul.Tensor
    assert order == [mul, REDUCE, *[mul, wait, REDUCE] * 3, wait]


@pytest.mark.parametrize(
    ("keys", "remain"),
    [
        (dict(groups=("dp", "dp", "dp", "dp")), 2),
        (dict(groups=("dp", "other", "dp", "dp")), 3),
        (dict(operations=("sum", "avg", "sum", "avg")), 4),
    ],
)
def test_only_one_group_and_reduction_go_into_a_bucket(keys, remain):
    hand = gradients(**keys)
    assert unchanged(hand, bucket_by_block) == 4 - remain
    assert count(hand.graph, REDUCE) == remain


def test_only_one_dtype_goes_into_a_bucket():
    hand = Hand()
    one, other = hand.input(2, 3), hand.input(2, 3, dtype=torch.bfloat16)
    a, b = hand.gather(one, "layers.0.a.weight"), hand.gather(other, "layers.0.b.weight")
    hand.output(a, b)
    assert unchanged(hand, bucket_by_block) == 0


def test_copies_are_reduced_in_buckets_too():
    hand = Hand()
    results = [
        hand.all_reduce(
            hand.reduce(hand.input(4, n), f"layers.0.{n}.weight"), f"layers.0.{n}.weight"
        )
        for n in (2, 3, 5)
    ]
    hand.output(*results)
    unchanged(hand, bucket_by_block)
    assert [(kind, len(fqns)) for kind, fqns, _ in left(hand.graph)] == [
        ("reduce_scatter", 3),
        ("all_reduce", 3),
    ]
    unchanged(hand, overlap)


def test_padding_goes_along():
    hand = Hand()
    x, one, other = hand.input(4, 4), hand.input(2, 4), hand.input(1, 4)
    first = hand.call(aten.mm.default, x, hand.gather(one, "layers.0.a.weight"))
    shard = hand.call(aten.cat.default, [other, hand.call(aten.new_zeros.default, other, [1, 4])])
    hand.output(
        hand.call(
            aten.mm.default,
            first,
            hand.gather(hand.call(aten.alias.default, shard), "layers.0.b.weight"),
        )
    )
    assert unchanged(hand, bucket_by_block) == 1
    assert count(hand.graph, GATHER) == 1


def test_the_collectives_of_others_are_left_alone():
    hand = Hand()
    x, one, other = (hand.input(2, 3) for _ in range(3))
    tokens = hand.call(collectives.wait_tensor.default, hand.call(GATHER, x, RANKS, "tp"))
    a, b = hand.gather(one, "layers.0.a.weight"), hand.gather(other, "layers.0.b.weight")
    hand.output(tokens, a, b)
    assert unchanged(hand, bucket_by_block) == 1
    assert [group for target, group in collectives_of(hand.graph) if target is GATHER] == [
        "tp",
        "dp",
    ]


@pytest.mark.parametrize("fused", [False, True])
def test_the_bytes_that_buckets_copy(fused):
    """A cast is made in the bucket where there are kernels; a small weight is copied out by the
    kernel that reads it.
    """
    hand = Hand()
    x = hand.input(6, 6, dtype=torch.bfloat16)
    shards = [
        hand.call(aten._to_copy.default, hand.input(3, 6), dtype=torch.bfloat16),
        hand.input(3, 6, dtype=torch.bfloat16),
    ]
    whole, scale = (
        hand.gather(shard, f"layers.0.{name}.weight")
        for shard, name in zip(shards, "ab", strict=True)
    )
    hand.output(hand.call(aten.mul.Tensor, hand.call(aten.mm.default, x, whole), scale))
    unchanged(hand, bucket_by_block)
    shard, weight = 2 * 3 * 6, 2 * 6 * 6
    assert copied_by_buckets(hand.graph, fused) == (
        shard + weight if fused else 2 * shard + 2 * weight
    )


def test_the_planner_gives_eager_mode_its_buckets_and_overlap():
    """Of HSDP: the next bucket is in flight once one is copied out; each sum is waited for when the
    next of its kind starts.
    """
    hand = two_layers()
    unchanged(hand, schedule_as_in_eager_mode)
    order = [
        node
        for node in hand.graph.nodes
        if node.target in (GATHER, aten.clone.default, aten.mm.default)
    ]
    names = {GATHER: "gather", aten.clone.default: "copy", aten.mm.default: "matmul"}
    words = [names[node.target] for node in order]
    assert words == [
        *("gather", "gather", "matmul", "copy", "copy", "gather", "matmul", "matmul"),
        *("copy", "copy", "copy", "gather", *["matmul"] * 4),
    ]
    hand, sums = Hand(), []
    gradients = [hand.input(2 * rows, columns) for rows, columns in SHARDS.values()]
    for (fqn, _), gradient in reversed([*zip(SHARDS.items(), gradients, strict=True)]):
        made = hand.compute(fqn, 1.0, gradient)
        sums.append(hand.call(aten.neg.default, hand.all_reduce(hand.reduce(made, fqn), fqn)))
    hand.output(*sums)
    unchanged(hand, schedule_as_in_eager_mode)
    found = []
    for node in hand.graph.nodes:
        of = node.args[0] if node.target is collectives.wait_tensor.default else node
        if of.target in (REDUCE, collectives.all_reduce.default):
            kind = (
                "wait" if of is not node else "start",
                "scatter" if of.target is REDUCE else "all",
            )
            found.append((*kind, len(parameters_of(of))))
    assert found == [
        ("start", "scatter", 1),
        *(("wait", "scatter", 1), ("start", "all", 1), ("start", "scatter", 3)),
        *(("wait", "scatter", 3), ("wait", "all", 1), ("start", "all", 3), ("start", "scatter", 2)),
        *(("wait", "scatter", 2), ("wait", "all", 3), ("start", "all", 2), ("start", "scatter", 1)),
        *(("wait", "scatter", 1), ("wait", "all", 2), ("start", "all", 1), ("wait", "all", 1)),
    ]
