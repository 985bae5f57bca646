"""Buckets by the cost model among the passes: in the place of a bucket for each block."""

import pytest
import torch
from handmade_graphs import Hand, aten, left, priced
from torch.fx import GraphModule

from titan_lite.compile.graph_passes import GraphPasses, choose_passes
from titan_lite.compile.settings import PassSettings
from titan_lite.config import Compile, Config
from titan_lite.features.cost_buckets import greedy

pytestmark = pytest.mark.usefixtures("two_ranks")


@pytest.fixture(autouse=True)
def prices_are_of_two_ranks(monkeypatch):
    monkeypatch.setattr(greedy, "ranks_of", lambda node: (0, 1))


def four_parameters(seconds=0.0):
    """Of two layers. seconds: of a computation with each."""
    hand = Hand()
    shards = {f"layers.{layer}.{part}.weight": hand.input(4) for layer in (0, 1) for part in "ab"}
    x = hand.input(8)
    for fqn, shard in shards.items():
        x = hand.call(aten.mul.Tensor, x, hand.gather(shard, fqn))
        x = hand.compute(fqn, seconds, x) if seconds else x
    return GraphModule(torch.nn.Module(), hand.output(x))


def scheduled(graph_module, machine=None, **options):
    """options: of [compile]."""
    config = Config(compile=Compile(enable=True, **options))
    schedule = GraphPasses(PassSettings(config.compile, machine), choose_passes(config))
    schedule.run(graph_module, "forward")
    return schedule.reports[0]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (dict(bucketing="greedy"), ["bucket_greedily", "overlap_collectives"]),
        (dict(bucketing="greedy", reordering=False), ["bucket_greedily"]),
        (dict(bucketing="auto"), ["overlap_by_inductor"]),  # which has reordered as well
        (dict(bucketing="greedy", enable=False), ["bucket_by_block", "overlap_collectives"]),
    ],
)
def test_the_recipe_selects_the_passes_and_their_order(options, expected):
    passes = choose_passes(Config(compile=Compile(**{"enable": True, **options})))
    names = [each.__name__ for each in passes]
    assert names == ["defer_weight_grads", "order_activation_collectives", *expected]


def test_greedy_buckets_are_reordered_and_their_copies_counted():
    graph_module = four_parameters()
    report = scheduled(graph_module, priced(latency=100.0), bucketing="greedy")
    assert len(report.after) == len(left(graph_module.graph)) == 1
    assert report.passes["overlap_collectives"] == 0
    assert report.copied == 4 * (4 + 8) * 4  # a shard and the whole, in float32
