"""Split a backward graph in two: the gradient of a stage's input, and the gradients of its weights.

    before         dx = dy @ w; dw = dy.T @ x; returns (reduce_scatter(dw), dx)
    after, input   dx = dy @ w;                returns (None, dx) and dy
           weight  dw = dy.T @ x;              returns (reduce_scatter(dw), None)

    halves = split_backward(module, through=dx)
    *gradients, dy = halves.input(x, w, dy)
    halves.weight(x, dy)

Pipeline schedules without bubbles (arXiv 2401.10241) run the second half later, while other stages
would make this one wait. It reads no weight: gathers belong to the half of the input, with all that
is computed from a weight and all that the gradient of the input needs. The rest is the other half:
matmuls that are gradients of weights, and the reductions of these.

Operators that compute little (pointwise ones, sums, views) may run in either half, or in both, and
so do all-gathers of tokens, whose results are large (tensor parallelism). They are divided such
that the fewest bytes live from one half to the other, saved activations included: a minimum cut, as
the partitioner of torch.compile finds it between forward and backward. A block of 405B on 8
tensor-parallel ranks, all recomputed, then needs 0.5 GiB for the half of its weights, and 1.4 GiB
if tokens are not gathered again.
"""

from collections.abc import Collection, Sequence
from typing import TypeAlias

import networkx as nx
import torch
from networkx.algorithms.flow import boykov_kolmogorov
from torch.fx import Graph, GraphModule, Node

from titan_lite.collectives import collectives
from titan_lite.compile.graph import extract, placeholders, results_of
from titan_lite.compile.joint import BackwardHalves, TracedFunction
from titan_lite.compile.model_parts import Value
from titan_lite.graph import (
    KINDS,
    ancestors,
    aten,
    fuses_with_inputs,
    is_all_gather,
    is_free,
    is_view,
    nbytes_of,
    parameters_of,
    start_of,
    storages,
)

Results: TypeAlias = Sequence[Node | None]
WAIT = collectives.wait_tensor.default
CASTS = frozenset({aten._to_copy.default, torch.ops.prims.convert_element_type.default})


def halves_of(traced: TracedFunction, inputs: Sequence[Value]) -> BackwardHalves:
    """Split the backward of a part: gradients of hidden states first, then those of weights."""
    backward = traced.backward
    assert backward is not None
    of_hidden = [
        gradient
        for value, gradient in zip(inputs, results_of(backward.graph), strict=True)
        if gradient is not None and value.kind in ("argument", "hidden", "block_output")
    ]
    forward_inputs = placeholders(traced.forward.graph)
    weights = {
        node for value, node in zip(inputs, forward_inputs, strict=True) if value.kind == "weight"
    }
    saved_placeholders = placeholders(backward.graph)[: len(traced.saved)]
    saved_weights = [
        placeholder
        for node, placeholder in zip(traced.saved, saved_placeholders, strict=True)
        if node in weights
    ]
    assert len(of_hidden) <= 1
    return split_backward(backward, of_hidden[0] if of_hidden else None, saved_weights)


def split_backward(
    module: GraphModule, through: Node | None = None, weights: Collection[Node] = ()
) -> BackwardHalves:
    """Split a backward graph. The graph stays as it is.

    module: its placeholders are saved values and tangents, and it returns the gradients of
    forward's inputs. through: the gradient of the stage's input; None for a stage of token ids.
    weights: placeholders that are weights, as where no graph gathers them.
    """
    graph = module.graph
    results = results_of(graph)
    needed_first = [] if through is None else [through]
    readers = readers_of(graph, weights)
    in_input = ancestors([*needed_first, *gathers_of(graph), *readers])
    first = {*needed_first, *placeholders(graph)}
    of_input = [result if result in first else None for result in results]
    of_weight = [None if result in first else result for result in results]

    shared = _fewest_bytes(graph, in_input, of_weight, readers)
    saved = [node for node in shared if node.op == "placeholder"]
    crossing = [node for node in shared if node.op != "placeholder"]
    return BackwardHalves(
        input=_half(module, placeholders(graph), [*of_input, *crossing]),
        weight=_half(module, [*saved, *crossing], of_weight),
        saved=tuple(node.name for node in saved),
        crossing=tuple(node.name for node in crossing),
    )


def gathers_of(graph: Graph) -> list[Node]:
    """Return the all-gathers of parameters."""
    return [node for node in graph.nodes if is_all_gather(node) and parameters_of(node)]


def readers_of(graph: Graph, weights: Collection[Node]) -> set[Node]:
    """Return the nodes that read a gathered weight or one of `weights`, and the views and casts
    between.
    """
    readers: set[Node] = set()
    open_nodes = [*gathers_of(graph), *weights]
    while open_nodes:
        for user in open_nodes.pop().users:
            if user.op == "output" or user in readers:
                continue
            readers.add(user)
            if is_free(user) or user.target in CASTS:
                open_nodes.append(user)
    return readers


def _fewest_bytes(
    graph: Graph, in_input: Collection[Node], of_weight: Results, readers: Collection[Node]
) -> list[Node]:
    """Return the values that the half of the weights receives, in graph order.

    in_input: what the other half must compute. of_weight: the results of this half.

    It is a minimum cut. A node is an edge of its bytes, from its inputs to its result. What is on
    the source's side is saved, or computed in the half of the input; what is on the sink's side is
    computed in the half of the weights.
    """
    storage = storages(graph)
    last = [node for node in of_weight if node is not None]
    given = {
        node
        for node in graph.nodes
        if node.op == "placeholder"
        or node in readers
        or (node in in_input and not _runs_in_both(node))
    }
    needed = ancestors(last, stop_at=given)
    late = _computed_late(graph, in_input) & needed

    flow = nx.DiGraph()
    flow.add_nodes_from(["source", "sink"])
    for node in needed:
        is_view = storage[node] is not node and node.target is not WAIT
        is_value = not is_view and node.target not in KINDS and not _has_parts(node)
        flow.add_edge((node, "inputs"), (node, "result"))  # infinite
        if is_value:
            flow.edges[(node, "inputs"), (node, "result")]["capacity"] = nbytes_of(node)
        if node in given:
            flow.add_edge("source", (node, "inputs"))
        else:
            for source in node.all_input_nodes:
                flow.add_edge((source, "result"), (node, "inputs"))
        if node in late:
            flow.add_edge((node, "inputs"), "sink")
        if node in last:
            flow.add_edge((node, "result"), "sink")
    _, (_, in_weight) = nx.minimum_cut(flow, "source", "sink", flow_func=boykov_kolmogorov)
    return [
        node
        for node in graph.nodes
        if (node, "result") in in_weight and (node, "inputs") not in in_weight
    ]


def _computed_late(graph: Graph, in_input: Collection[Node]) -> set[Node]:
    """Return what only the half of the weights computes: matmuls, collectives, and what depends on
    them.
    """
    late: set[Node] = set()
    for node in graph.nodes:
        if node in in_input or node.op != "call_function":
            continue
        if not _computes_little(node) or not late.isdisjoint(node.all_input_nodes):
            late.add(node)
    return late


def _computes_little(node: Node) -> bool:
    return fuses_with_inputs(node) or is_view(node)


def _runs_in_both(node: Node) -> bool:
    """Return True if the half of the weights may run again what the other half has run."""
    gather = start_of(node) if node.target is WAIT else node
    return _computes_little(node) or (is_all_gather(gather) and not parameters_of(gather))


def _has_parts(node: Node) -> bool:
    return isinstance(node.meta.get("val"), list | tuple)


def _half(module: GraphModule, inputs: Collection[Node], results: Results) -> GraphModule:
    """Return the part of a graph that computes `results` from `inputs`, which keep their names."""
    wanted = ancestors([node for node in results if node is not None], stop_at=inputs)
    nodes = [node for node in module.graph.nodes if node in wanted and node not in inputs]
    half = extract(nodes, {node.name: node for node in inputs}, results)
    half.lint()
    return GraphModule(module, half)
