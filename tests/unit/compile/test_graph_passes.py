"""The passes in their order: what is merged, what is refused, and what is written down."""

import pytest
import torch
from handmade_graphs import Hand, aten, left, places, priced
from torch.fx import GraphModule

from titan_lite.compile.graph_passes import GraphPasses, choose_passes, readable
from titan_lite.compile.settings import PassSettings
from titan_lite.config import Compile, Config

pytestmark = pytest.mark.usefixtures("two_ranks")


def layers(count=2, name="layers.{}.{}.weight", seconds=0.0):
    """seconds: of a computation with each parameter."""
    hand = Hand()
    shards = {name.format(layer, part): hand.input(4) for layer in range(count) for part in "ab"}
    x = hand.input(8)
    for fqn, shard in shards.items():
        x = hand.call(aten.mul.Tensor, x, hand.gather(shard, fqn))
        x = hand.compute(fqn, seconds, x) if seconds else x
    return GraphModule(torch.nn.Module(), hand.output(x))


def scheduled(graph_module, machine=None, dump_folder=None, **options):
    """options: of [compile]."""
    config = Config(compile=Compile(**options))
    settings = PassSettings(config.compile, machine)
    graph_passes = GraphPasses(settings, choose_passes(config), dump_folder=dump_folder)
    graph_passes.run(graph_module, "forward")
    return graph_passes.reports[0]


@pytest.mark.parametrize(
    ("options", "after", "copied"),  # weights in buckets
    [
        (dict(bucketing="none"), 4, 0),
        (dict(bucketing="block"), 2, 4),
    ],
)
def test_each_way_to_bucket(options, after, copied):
    graph_module = layers()
    report = scheduled(graph_module, priced(latency=100.0), **options)
    assert report.before == {"all_gather": 4}
    assert len(report.after) == len(left(graph_module.graph)) == after
    assert sorted(fqn for bucket in report.after for fqn in bucket.fqns) == [
        f"layers.{n}.{p}.weight" for n in (0, 1) for p in "ab"
    ]
    assert report.passes["overlap_collectives"] == after - 1
    assert report.copied == copied * (4 + 8) * 4  # a shard and the whole, in float32


def test_without_reordering_everything_stays_where_it_is_needed():
    graph_module = layers()
    report = scheduled(graph_module, bucketing="none", reordering=False, defer_weight_grads=False)
    assert report.passes == {"order_activation_collectives": 0}
    order = places(graph_module.graph)
    assert [word.startswith("wait") for word in order] == [False, True] * 4


def test_one_collective_or_none_cannot_be_merged():
    hand = Hand()
    only = GraphModule(
        torch.nn.Module(), hand.output(hand.gather(hand.input(4), "layers.0.a.weight"))
    )
    assert len(scheduled(only, bucketing="block").after) == 1
    hand = Hand()
    nothing = GraphModule(
        torch.nn.Module(), hand.output(hand.call(aten.neg.default, hand.input(4)))
    )
    assert scheduled(nothing, bucketing="block").after == ()


def test_graphs_are_written_before_and_after_each_pass(tmp_path):
    scheduled(layers(), bucketing="block", dump_folder=tmp_path / "graphs")
    files = sorted(path.name for path in (tmp_path / "graphs").iterdir())
    assert files == [
        "0_forward_0_traced.txt",
        "0_forward_1_defer_weight_grads.txt",
        "0_forward_2_order_activation_collectives.txt",
        "0_forward_3_bucket_by_block.txt",
        "0_forward_4_overlap_collectives.txt",
    ]
    texts = [(tmp_path / "graphs" / file).read_text() for file in files]
    assert [text.count("all_gather_into_tensor.default(") for text in texts] == [4, 4, 4, 2, 2]
    assert "# layers.1.a.weight, layers.1.b.weight" in texts[3]


def test_a_graph_is_readable():
    hand = Hand()
    lines = readable(hand.output(hand.gather(hand.input(4), "a"))).splitlines()
    assert lines[0] == "x0: float32[4]"
    assert lines[1].endswith("_c10d_functional.all_gather_into_tensor.default(x0, 2, 'dp')   # a")
