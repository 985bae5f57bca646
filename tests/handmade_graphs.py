"""Graphs made by hand: shards gathered, gradients reduced, computation of known length; and a run
as if there were two ranks.
"""

import math
import operator

import torch
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter, Node

from titan_lite.compile import rank_agreement, report
from titan_lite.compile.passes.reordering import overlap_collectives
from titan_lite.compile.settings import PassSettings
from titan_lite.cost import op_cost
from titan_lite.cost.machine import Link, Machine
from titan_lite.graph import (
    collective_bytes,
    kind_of,
    parameter_collectives,
    parameters_of,
    start_of,
)

aten, collectives = torch.ops.aten, torch.ops._c10d_functional
RANKS = 2


class Hand:
    """A graph in the making; `run` pretends that rank r has what this one has, plus r."""

    def __init__(self):
        self.graph, self.inputs, self.mode = Graph(), [], FakeTensorMode()

    def input(self, *shape, dtype=torch.float32):
        node = self.graph.placeholder(f"x{len(self.inputs)}")
        value = torch.randn(shape, generator=torch.Generator().manual_seed(len(self.inputs))).to(
            dtype
        )
        self.inputs.append(value)
        node.meta["val"] = self.mode.from_tensor(value)
        return node

    def call(self, target, *args, fqn=None, **kwargs):
        def value(argument):
            if isinstance(argument, list):
                return [value(each) for each in argument]
            return argument.meta["val"] if isinstance(argument, Node) else argument

        node = self.graph.call_function(target, args, kwargs)
        with self.mode:
            node.meta["val"] = run_one(target, [value(argument) for argument in args], kwargs)
        if fqn:
            node.meta["custom"] = {"fqn": fqn}
        return node

    def part(self, parts, number):
        """One of several results."""
        node = self.graph.call_function(operator.getitem, (parts, number))
        node.meta["val"] = parts.meta["val"][number]
        return node

    def compute(self, name, seconds, *args):
        """Something of the first argument's shape that takes so long."""
        node = (
            self.call(aten.add.Tensor, args[0], 1.0)
            if len(args) == 1
            else self.call(aten.stack.default, list(args))
        )
        node.meta |= {"seconds": seconds, "called": name}
        return node

    def gather(self, shard, fqn, group="dp"):
        gathered = self.call(
            collectives.all_gather_into_tensor.default, shard, RANKS, group, fqn=fqn
        )
        return self.call(collectives.wait_tensor.default, gathered, fqn=fqn)

    def reduce(self, gradient, fqn, group="dp", operation="sum"):
        reduced = self.call(
            collectives.reduce_scatter_tensor.default, gradient, operation, RANKS, group, fqn=fqn
        )
        return self.call(collectives.wait_tensor.default, reduced, fqn=fqn)

    def all_reduce(self, gradient, fqn, group="replicate"):
        return self.call(
            collectives.wait_tensor.default,
            self.call(collectives.all_reduce.default, gradient, "sum", group, fqn=fqn),
        )

    def output(self, *nodes):
        self.graph.output(list(nodes))
        self.graph.lint()
        return self.graph

    def run(self):
        return Pretend(GraphModule(torch.nn.Module(), self.graph)).run(*self.inputs)


def run_one(target, args, kwargs):
    if target is collectives.all_gather_into_tensor.default:
        return torch.cat([args[0] + rank for rank in range(args[1])])
    if target is collectives.reduce_scatter_tensor.default:
        return args[0].chunk(args[2])[0] * args[2]
    if target is collectives.all_reduce.default:
        return args[0] * RANKS
    if target is collectives.wait_tensor.default:
        return args[0]
    return target(*args, **kwargs)


class Pretend(Interpreter):
    def call_function(self, target, args, kwargs):
        return run_one(target, args, kwargs)


def collectives_of(graph):
    return [
        (node.target, node.args[-1])
        for node in graph.nodes
        if node.op == "call_function" and "c10d" in str(node.target)
    ]


def count(graph, target):
    return sum(node.target is target for node in graph.nodes)


GATHER, REDUCE = (
    collectives.all_gather_into_tensor.default,
    collectives.reduce_scatter_tensor.default,
)


def priced(latency=0.0):
    """A machine on which a collective of two ranks takes `latency` and a second a byte, and a
    computation what its node says.
    """
    link = Link(bandwidth=0.5e-9, latency=latency * 1e6)
    return Machine(
        name="by hand",
        tflops={"float32": math.inf},
        memory=1,
        memory_bandwidth=1e30,  # copies take next to nothing
        intra_node=link,
        inter_node=link,
        launch=0.0,
        collective_launch=0.0,
        link_efficiency=1.0,
    )


PARTS_THAT_ASK_FOR_RANKS = (op_cost, report, rank_agreement)


def overlap(graph, machine=None):
    """Run the pass on a graph of compiled kernels. Return how many collectives moved."""
    return overlap_collectives(graph, PassSettings(machine=machine, fused=True))


def left(graph):
    """[(kind, parameters, bytes)] in the graph's order."""
    return [
        (kind_of(node), parameters_of(node), collective_bytes(node))
        for node in parameter_collectives(graph)
    ]


def places(graph):
    """The order of things: "gather a", "wait gather a", "reduce a", "wait reduce a", and names of
    computations.
    """
    words, names = [], {}
    for node in graph.nodes:
        if parameters_of(node):
            names[node] = (
                f"{kind_of(node).replace('all_', '').replace('_scatter', '')}"
                f" {'+'.join(parameters_of(node))}"
            )
            words.append(names[node])
        elif node.target is collectives.wait_tensor.default and start_of(node) in names:
            words.append(f"wait {names[start_of(node)]}")
        elif "seconds" in node.meta:
            words.append(node.meta["called"])
    return words
