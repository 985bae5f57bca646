"""Wrong graphs of few nodes: what verify says of collectives that differ between ranks, and between
sizes.
"""

import dataclasses
import re
from types import SimpleNamespace

import pytest
import torch
from tiny import RECIPES
from torch.fx import Graph, GraphModule

from titan_lite.collectives import collectives
from titan_lite.config import load_config
from titan_lite.distributed import simple_fsdp
from titan_lite.distributed.layout import Layout
from titan_lite.tools.verify import bridge
from titan_lite.tools.verify.check import check_layout
from titan_lite.tools.verify.lockstep import evaluate
from titan_lite.tools.verify.ranks import Divergence, Ranks
from titan_lite.tools.verify.variants import FittedVariant, check_equal, check_waits

RANKS = Ranks(("tp",), (2,))


def graph_of(*operators):
    """A chain of operators on one tensor, each with its other arguments."""
    graph = Graph()
    node = graph.placeholder("x")
    for target, *arguments in operators:
        node = graph.call_function(target, (node, *arguments))
        node.meta["val"] = torch.zeros(4)
    graph.output([node])
    return graph


SUM = (collectives.all_reduce.default, "sum", "tp")
LARGEST = (collectives.all_reduce.default, "max", "tp")
WAIT = (collectives.wait_tensor.default,)
DOUBLED = (torch.ops.aten.mul.Tensor, 2)
TRIPLED = (torch.ops.aten.mul.Tensor, 3)


def traced(*operators, group=(0, 1)):
    """What a rank has."""
    module = GraphModule({}, graph_of(*operators))
    return SimpleNamespace(rank=1, graphs={"forward": module}, groups={"tp": group})


def variant(*operators, group=(0, 1)):
    return FittedVariant("forward", traced(*operators, group=group), (0,), RANKS, [])


@pytest.mark.parametrize(
    ("operators", "words"),
    [([SUM], "nothing waits for it"), ([SUM, DOUBLED], "mul_tensor reads it")],
)
def test_a_collective_that_is_not_waited_for_is_named(operators, words):
    with pytest.raises(Divergence, match=f"rank 1: forward:all_reduce_default: {words}"):
        check_waits(traced(*operators))


def test_ranks_at_different_collectives_wait_for_each_other():
    variants = [variant(SUM, WAIT, LARGEST, WAIT), variant(LARGEST, WAIT, SUM, WAIT)]
    with pytest.raises(Divergence, match="ranks wait for each other: they are at all_reduce"):
        evaluate(variants, [0, 1], [[torch.ones(4)], [torch.ones(4)]])


def test_ranks_in_different_groups_are_a_difference():
    variants = [variant(SUM, WAIT), variant(SUM, WAIT, group=(0,))]
    with pytest.raises(Divergence, match="in different groups"):
        evaluate(variants, [0, 1], [[torch.ones(4)], [torch.ones(4)]])


@pytest.mark.parametrize(
    ("operators", "group", "words"),
    [
        ([DOUBLED, DOUBLED], (0, 1), "has other operators"),
        ([TRIPLED, SUM, WAIT], (0, 1), r"has \[3\], not \[2\]"),
        ([DOUBLED, SUM, WAIT], (0,), r"is over ranks \[0\]"),
    ],
)
def test_a_rank_that_is_not_as_fitted_is_a_difference(operators, group, words):
    rank = traced(*operators, group=group)
    with pytest.raises(Divergence, match=words):
        check_equal("rank 1: forward", variant(DOUBLED, SUM, WAIT), rank, "forward")


@pytest.mark.parametrize(
    ("real", "words"),
    [
        (
            [LARGEST, WAIT, SUM, WAIT],
            "has all_reduce_default .*max.*, where what was evaluated has",
        ),
        ([SUM, WAIT], "has 1 collectives, not 2"),
        ([SUM, WAIT, LARGEST, WAIT, DOUBLED], "the operator aten.mul.Tensor is in the graphs at"),
    ],
)
def test_other_graphs_at_real_sizes_are_a_difference(real, words):
    config = load_config(RECIPES / "debug_model.toml")
    small = traced(SUM, WAIT, LARGEST, WAIT)
    (found,) = bridge.differences(small, traced(*real), config)
    assert re.search(words, found)


@pytest.mark.parametrize("communication", ["step", "microbatch"])
def test_a_reduction_in_another_dtype_than_the_recipe_s_is_a_difference(communication, monkeypatch):
    right = simple_fsdp.shard_parameter

    def wrong(*arguments):
        parameter, spec = right(*arguments)
        return parameter, dataclasses.replace(spec, reduce_dtype=torch.bfloat16)

    monkeypatch.setattr(simple_fsdp, "shard_parameter", wrong)
    options = [f"--parallelism.fsdp_communication={communication}", "--compile.enable"]
    config = load_config(RECIPES / "debug_model.toml", options)
    verdict = check_layout(config, Layout.from_config(config, 2))
    assert verdict.differences
    for difference in verdict.differences:
        assert "training.mixed_precision_reduce is torch.float32" in difference
    of_step = [each for each in verdict.differences if each.startswith("reduce:")]
    assert bool(of_step) == (communication == "step")


def test_shards_that_are_even_at_one_size_alone_are_not_covered():
    small, real = (SimpleNamespace(is_even={"norm.weight": each}) for each in (True, False))
    assert list(bridge.not_alike(small, real)) == ["uneven shards of norm.weight"]
