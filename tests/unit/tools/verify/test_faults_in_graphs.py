"""Faults in traced graphs: a collective left out, done twice, averaged or over another axis, and a
constant of a rank. Each is a difference, and most are named at the operator or just after it.
"""

import functools

import pytest
import torch
from tiny import RECIPES

from titan_lite.config import load_config
from titan_lite.distributed.layout import Layout
from titan_lite.graph import kind_of
from titan_lite.tools.verify import lockstep, specification
from titan_lite.tools.verify.check import Check
from titan_lite.tools.verify.lockstep import in_words
from titan_lite.tools.verify.naming import moves
from titan_lite.tools.verify.ranks import Divergence
from titan_lite.tools.verify.small import small_recipe
from titan_lite.tools.verify.variants import FittedVariant

RANKS = 4  # FSDP 2 x TP 2
GRAPHS = ("forward", "backward")
RIGHT = lockstep.communicate


@functools.cache
def traced():
    """The check of a layout, of one stage."""
    options = [
        "--parallelism.data_parallel_shard_degree=2",
        "--parallelism.tensor_parallel_degree=2",
        "--parallelism.fsdp_communication=microbatch",
    ]
    config = load_config(RECIPES / "llama3_8b.toml", options)
    check = Check(small_recipe(config, Layout.from_config(config, RANKS)))
    check.compute_reference()
    check.trace()
    return check


def differences():
    """What is found when the graphs are evaluated once more."""
    check = traced()
    check.differences = []
    check.wrong = set()
    try:
        check.evaluate()
    except Divergence as error:
        return [str(error)]
    return check.differences


def left_out(node, values, groups):
    """A gather repeats the rank's own part; a reduction keeps it."""
    places = {rank: (place, len(group)) for group in groups for place, rank in enumerate(group)}
    if kind_of(node) == "all_gather":
        return [torch.cat([value] * places[rank][1]) for rank, value in enumerate(values)]
    if kind_of(node) == "reduce_scatter":
        return [value.chunk(places[rank][1])[places[rank][0]] for rank, value in enumerate(values)]
    return values


def averaged(node, values, groups):
    return [value / len(groups[0]) for value in RIGHT(node, values, groups)]


def in_another_order(node, values, groups):
    return RIGHT(node, values, [[*group[1:], group[0]] for group in groups])


def over_the_other_axis(node, values, groups):
    return RIGHT(node, values, [[0, 1], [2, 3]] if groups[0] == [0, 2] else [[0, 2], [1, 3]])


FAULTS = {
    "all_gather": (left_out, in_another_order, over_the_other_axis),
    "reduce_scatter": (left_out, averaged, in_another_order, over_the_other_axis),
    "all_reduce": (left_out, averaged, over_the_other_axis),
}


def planted():
    """(graph, collective, fault) of every collective that sums or gathers."""
    (stage,) = traced().stages
    return [
        (name, node, fault)
        for name in GRAPHS
        for node in stage.of[name][0].groups
        if "max" not in node.args
        for fault in FAULTS[kind_of(node)]
        if fault is not in_another_order or not gathers_sums_of_logits(node)
    ]


def gathers_sums_of_logits(node):
    """True for the gather of the loss in chunks, whose logsumexp has no order."""
    return kind_of(node) == "all_gather" and node.all_input_nodes[0].meta["val"].shape[0] == 1


def evaluated(faults, monkeypatch):
    """The faults with which the graphs still agree, and those that are not named within two
    operators: in words, with what is named.
    """
    check = traced()
    accepted, unnamed = [], []
    for name, node, fault in faults:

        def wrong(other, values, groups, node=node, fault=fault):
            return (fault if other is node else RIGHT)(other, values, groups)

        monkeypatch.setattr(lockstep, "communicate", wrong)
        words = f"{name}:{node} {fault.__name__}"
        if not differences():
            accepted.append(words)
        first_wrong = check.name_first_wrong()
        if first_wrong not in {f"{name}: {in_words(near)}" for near in within_two_operators(node)}:
            unnamed.append(f"{words}: {first_wrong}")
    return accepted, unnamed


def within_two_operators(node):
    """The node, and what is computed from it by up to two operators that are no copies or views."""
    distances = {node: 0}
    left = [node]
    for source in left:
        for user in source.users:
            distance = distances[source] + (not moves(user))
            if distance < distances.get(user, 3):
                distances[user] = distance
                left.append(user)
    return distances


def test_the_right_graphs_agree():
    assert differences() == []


def test_faults_of_collectives_are_differences_and_are_named(monkeypatch):
    faults = planted()
    assert len(faults) >= 60
    assert evaluated(faults[:: len(faults) // 4], monkeypatch) == ([], [])


@pytest.mark.release
def test_all_faults_of_collectives_are_differences_and_nine_of_ten_are_named(monkeypatch):
    faults = planted()
    accepted, unnamed = evaluated(faults, monkeypatch)
    assert accepted == []
    assert len(unnamed) <= len(faults) / 10, unnamed


def test_a_constant_of_another_rank_is_a_difference(monkeypatch):
    right = FittedVariant.own_leaves
    (stage,) = traced().stages
    constants = list(stage.of["forward"][0].own)
    assert constants

    def wrong(self, node, rank):
        own = right(self, node, rank)
        return {leaf: value + 1 for leaf, value in own.items()} if node is constants[0] else own

    monkeypatch.setattr(FittedVariant, "own_leaves", wrong)
    assert differences()


@pytest.mark.parametrize(
    "mistake",
    [
        lambda patch: patch.setitem(specification.SPLIT, "wq", 1),
        lambda patch: patch.setitem(specification.SPLIT, "w2", 0),
        lambda patch: patch.setattr(specification, "sequences", lambda batch, _: batch[0]),
        lambda patch: patch.setattr(specification, "positions", lambda n, _: list(range(n))[::-1]),
        lambda patch: patch.setattr(specification, "rows", lambda _, tensor, place: tensor),
    ],
    ids=["columns", "rows", "sequences", "positions", "shards"],
)
def test_a_mistake_in_the_specification_is_noticed(mistake, monkeypatch):
    check = traced()
    mistake(monkeypatch)
    monkeypatch.setattr(check, "shared", {})
    found = [*differences()]
    for rank in check.stages[0].traced.values():
        check.compare_with_specification(rank)
    assert found or check.differences


def test_a_gradient_that_is_not_summed_names_its_parameter_and_its_axis(monkeypatch):
    (stage,) = traced().stages
    norms = [node for node in stage.of["backward"][0].groups if kind_of(node) == "all_reduce"]
    monkeypatch.setattr(
        lockstep,
        "communicate",
        lambda node, *of: (left_out if node is norms[0] else RIGHT)(node, *of),
    )
    assert any("norm.weight" in each and "not summed over tp" in each for each in differences())
