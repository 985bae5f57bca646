"""Pinning on CPUs: a small graph that Inductor would run in another order.

Whole layouts, as code for GPUs: test_cuda_code.py.
"""

import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.exc import InductorError
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from titan_lite.compile.passes.pin_order import PinnedOrder, record_order, restore_order
from titan_lite.cost.collectives import collectives


@pytest.fixture
def group():
    """The name of a process group of two ranks, which is not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


def hidden_gather(group, first, second, x):
    """The second gather starts before the first is waited for; what leads to it reads what is read
    after that wait, too.
    """
    one = collectives.all_gather_into_tensor(first, 2, group)
    two = collectives.all_gather_into_tensor(second * 2, 2, group)
    weight = collectives.wait_tensor(one)
    y = torch.mm(x, weight)
    z = torch.relu(weight[:8] + second)
    return (torch.mm(torch.mm(y, z), collectives.wait_tensor(two).t()),)


def order_in_code(function, *inputs, **settings):
    """The operators of c10d and products that Inductor's code calls, in their order."""
    found = []

    def write(graph):
        code, _ = graph.codegen()
        found.append(code.value)
        raise NotImplementedError("the code is written")

    with FakeTensorMode() as mode:
        inputs = [torch.empty(shape) for shape in inputs]
        graph = make_fx(function, select_decomp_table())(*inputs)
    with (
        inductor_config.patch({"fx_graph_cache": False, "reorder_for_locality": False, **settings}),
        mock.patch.object(GraphLowering, "compile_to_module", write),
        torch._guards.tracing(torch._guards.TracingContext(mode)),
        pytest.raises(InductorError, match="the code is written"),
    ):
        compile_fx_inner(graph, inputs)
    words = [line.partition("(")[0].split(".") for line in found[0].splitlines() if "(" in line]
    return [
        word
        for each in words
        for word in each
        if word in ("all_gather_into_tensor", "wait_tensor", "mm")
    ]


def test_a_gather_that_starts_early_in_the_graph_starts_early_in_the_code(group):
    gather, wait = "all_gather_into_tensor", "wait_tensor"
    function = functools.partial(hidden_gather, group)
    inputs = (4, 8), (8, 8), (8, 8)
    assert order_in_code(function, *inputs) == [gather, wait, "mm", "mm", gather, wait, "mm"]
    pinned = order_in_code(function, *inputs, _pre_fusion_custom_pass=PinnedOrder())
    assert pinned == [gather, gather, wait, "mm", "mm", wait, "mm"]


def test_inductors_cache_knows_the_pass_by_its_source():
    assert PinnedOrder().uuid() == PinnedOrder().uuid()
    with mock.patch("titan_lite.compile.passes.pin_order.__file__", __file__):
        other = PinnedOrder().uuid()
    assert other != PinnedOrder().uuid()


def test_nodes_that_were_moved_go_back_and_new_ones_stand_behind_what_they_read():
    graph = make_fx(lambda x: (torch.relu(x) + torch.sin(x), torch.cos(x)))(torch.ones(2)).graph
    record_order(graph)
    names = [node.name for node in graph.nodes]
    x, relu, sin, add, cos, _ = graph.nodes
    x.append(cos)
    x.append(sin)
    with graph.inserting_after(add):
        new = graph.call_function(torch.ops.aten.neg.default, (relu,))
    restore_order(graph)
    names.insert(names.index(relu.name) + 1, new.name)
    assert [node.name for node in graph.nodes] == names
