"""Make one forward and one backward graph of a model, from copies of its traced parts.

    graphs = compose(trace_parts(traceable, arguments))

    forward     tokens -> embedding -> block -> block -> ... -> norm, output -> logits
    backward    gradient of the logits -> ... -> block -> block -> embedding -> gradients

The blocks of a transformer are alike, so tracing takes as long for a deep model as for a shallow
one. The passes see all collectives of the model, and move them across blocks. Copies of a block
differ in the names of their parameters alone.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, GraphModule, Node

from titan_lite.compile.graph import add_call
from titan_lite.compile.joint import gradients_of, results_of
from titan_lite.compile.model_parts import (
    AFTER,
    HIDDEN,
    OUTPUT,
    Block,
    ModelParts,
    Part,
    Value,
)
from titan_lite.cost.collectives import ancestors, aten, descendants


@dataclass(frozen=True)
class ModelGraphs:
    """The graphs of a model for arguments of certain shapes."""

    inputs: Sequence[Value]  # of the forward graph
    forward: GraphModule  # inputs -> output, saved values
    # Saved values, gradient of the output -> gradients of the inputs, None for some. None: the
    # output has no gradient.
    backward: GraphModule | None
    different_blocks: int  # that were traced


def compose(parts: ModelParts) -> ModelGraphs:
    """Return the graphs of a model."""
    forward = _compose_forward(parts)
    makes_output = parts.blocks[-1].part if parts.output == AFTER else parts.rest
    backward = None
    if makes_output.traced.backward is not None:
        backward = _compose_backward(parts, forward)
    return ModelGraphs(forward.inputs, forward.module, backward, parts.different_blocks)


class _GrowingGraph:
    """A graph that copies of parts are added to."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.constants: dict[str, Any] = {}  # by the name of the module's attribute

    def placeholder(self, name: str, like: Node) -> Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = like.meta["val"]
        return node

    def constant_name(self, source: GraphModule, name: str) -> str:
        """Return the name in this graph of a constant of a part."""
        constant = getattr(source, name)
        for known, value in self.constants.items():
            if value is constant:
                return known
        known = f"constant_{len(self.constants)}"
        self.constants[known] = constant
        return known

    def finish(self, results: Sequence[Node | None]) -> GraphModule:
        self.graph.output(tuple(results))
        return GraphModule(self.constants, self.graph)


class _Copy:
    """A copy of a part's graph, within a larger one.

    block: whose names the copy has; None: names stay.
    """

    def __init__(self, target: _GrowingGraph, source: GraphModule, block: Block | None = None):
        self.target = target
        self.source = source
        self.block = block
        self.nodes: dict[Node, Node] = {}  # for each node its copy, or what was given for it

    def give(self, placeholder: Node, node: Node) -> None:
        """Let a node of the larger graph stand for a placeholder."""
        expected, value = placeholder.meta["val"], node.meta["val"]
        assert value.shape == expected.shape, (
            f"{node} has shape {value.shape}, not {expected.shape}"
        )
        assert value.stride() == expected.stride(), f"{node} has strides {value.stride()}"
        self.nodes[placeholder] = node

    def add(self, nodes: Iterable[Node]) -> None:
        """Copy these nodes, in order."""
        for node in nodes:
            if node.op in ("placeholder", "output"):
                continue
            copied = self.target.graph.node_copy(node, self.nodes.__getitem__)
            self.nodes[node] = copied
            if node.op == "get_attr":
                copied.target = self.target.constant_name(self.source, str(node.target))
            if self.block is not None:
                rename(copied, self.block)

    def results(self) -> list[Node]:
        """Return what stands for the results of a forward graph."""
        return [self.nodes[node] for node in results_of(self.source)]

    def gradients(self) -> list[Node | None]:
        """Return what stands for the results of a backward graph."""
        return [None if node is None else self.nodes[node] for node in gradients_of(self.source)]


def rename(node: Node, block: Block) -> None:
    """Replace the names of the traced block's parameters by those of `block`."""
    node.args = tuple(
        block.name(argument) if isinstance(argument, str) else argument for argument in node.args
    )
    custom = node.meta.get("custom", {})
    if "fqn" in custom:
        node.meta["custom"] = {**custom, "fqn": block.name(custom["fqn"])}


def placeholders(module: GraphModule) -> list[Node]:
    return module.graph.find_nodes(op="placeholder")


@dataclass(frozen=True)
class _Forward:
    """The forward graph of a model."""

    module: GraphModule
    inputs: Sequence[Value]
    output: Node
    # nodes that each part's backward reads, in its order
    saved_by_rest: Sequence[Node]
    saved_by_blocks: Sequence[Sequence[Node]]
    saved: Sequence[Node]  # each of them once, in the order of the module's results


def _compose_forward(parts: ModelParts) -> _Forward:
    target = _GrowingGraph()
    known = _add_inputs(target, parts)  # nodes of inputs, and of what parts pass on
    inputs = list(known)

    module = parts.rest.traced.forward
    rest = _Copy(target, module)
    results = dict(zip(parts.rest.results, results_of(module), strict=False))
    of_blocks = {value: node for value, node in results.items() if value != OUTPUT}
    before_blocks = ancestors(of_blocks.values())
    for value, placeholder in zip(parts.rest.inputs, placeholders(module), strict=True):
        if value == AFTER:
            after = placeholder
        else:
            rest.give(placeholder, known[value])
    rest.add(node for node in module.graph.nodes if node in before_blocks)
    known.update({value: rest.nodes[node] for value, node in of_blocks.items()})

    saved_by_blocks = []
    if parts.hidden is not None:
        known[HIDDEN] = known[parts.hidden]
    for block in parts.blocks:
        copy = _Copy(target, block.part.traced.forward, block)
        for value, placeholder in zip(block.part.inputs, placeholders(copy.source), strict=True):
            copy.give(placeholder, known[block.value(value)])
        copy.add(copy.source.graph.nodes)
        known[HIDDEN], *saved = copy.results()
        saved_by_blocks.append(saved)

    if parts.hidden is not None:
        known[AFTER] = known[HIDDEN]
        rest.give(after, known[AFTER])
    rest.add(node for node in module.graph.nodes if node not in before_blocks)
    saved_by_rest = rest.results()[parts.rest.traced.outputs :]
    output = rest.nodes[results[OUTPUT]] if OUTPUT in results else known[parts.output]
    every_saved = dict.fromkeys(itertools.chain(saved_by_rest, *saved_by_blocks))
    return _Forward(
        module=target.finish([output, *every_saved]),
        inputs=inputs,
        output=output,
        saved_by_rest=saved_by_rest,
        saved_by_blocks=saved_by_blocks,
        saved=list(every_saved),
    )


def _add_inputs(target: _GrowingGraph, parts: ModelParts) -> dict[Value, Node]:
    """Add a placeholder for each input of the model."""
    found: dict[Value, Node] = {}

    def add(value: Value, like: Node) -> None:
        if value.is_input and value not in found:
            found[value] = target.placeholder(value.label, like)

    for value, placeholder in zip(
        parts.rest.inputs, placeholders(parts.rest.traced.forward), strict=True
    ):
        add(value, placeholder)
    for block in parts.blocks:
        part = block.part
        for value, placeholder in zip(part.inputs, placeholders(part.traced.forward), strict=True):
            add(block.value(value), placeholder)
    return found


def _compose_backward(parts: ModelParts, forward: _Forward) -> GraphModule:
    gradients = _Gradients(forward)
    hidden: Node | None = gradients.of_output  # that enters the backward of the next part
    rest = None
    before_blocks: set[Node] = set()
    if parts.rest.traced.backward is not None:
        rest = gradients.start(parts.rest, forward.saved_by_rest)
        tangents = placeholders(rest.source)[len(forward.saved_by_rest) :]
        tangent_of = dict(zip(parts.rest.differentiable, tangents, strict=True))
        if HIDDEN in tangent_of:
            before_blocks = reached_from(tangent_of[HIDDEN], tangent_of.get(OUTPUT))
        if OUTPUT in tangent_of:
            rest.give(tangent_of[OUTPUT], gradients.of_output)
        rest.add(node for node in rest.source.graph.nodes if node not in before_blocks)
        if AFTER in parts.rest.inputs and OUTPUT in tangent_of:
            of_after = gradients_of(rest.source)[parts.rest.inputs.index(AFTER)]
            hidden = None if of_after is None else rest.nodes[of_after]

    for block, saved in zip(reversed(parts.blocks), reversed(forward.saved_by_blocks), strict=True):
        if hidden is None or block.part.traced.backward is None:
            hidden = None  # no part before this one has a gradient
            break
        copy = gradients.start(block.part, saved, block)
        copy.give(placeholders(copy.source)[-1], hidden)
        copy.add(copy.source.graph.nodes)
        hidden = gradients.collect(block.part, copy, block)

    if parts.hidden is not None and hidden is not None:
        if parts.hidden == HIDDEN:
            assert rest is not None
            rest.give(tangent_of[HIDDEN], hidden)
        else:
            gradients.add(parts.hidden, hidden)
    if rest is not None:
        rest.add(node for node in rest.source.graph.nodes if node in before_blocks)
        gradients.collect(parts.rest, rest)
    return gradients.target.finish([gradients.known.get(value) for value in forward.inputs])


class _Gradients:
    """The backward graph of a model, as it grows."""

    def __init__(self, forward: _Forward):
        self.target = _GrowingGraph()
        self.saved = {node: self.target.placeholder(node.name, node) for node in forward.saved}
        self.of_output = self.target.placeholder("gradient", forward.output)
        self.known: dict[Value, Node] = {}  # gradients of inputs

    def start(self, part: Part, saved: Sequence[Node], block: Block | None = None) -> _Copy:
        """Return a copy of a part's backward that has its saved values, and no nodes yet."""
        assert part.traced.backward is not None
        copy = _Copy(self.target, part.traced.backward, block)
        for placeholder, node in zip(placeholders(copy.source), saved, strict=False):
            copy.give(placeholder, self.saved[node])
        return copy

    def collect(self, part: Part, copy: _Copy, block: Block | None = None) -> Node | None:
        """Take the gradients of inputs. Returns that of HIDDEN."""
        hidden = None
        for value, node in zip(part.inputs, copy.gradients(), strict=True):
            if value == HIDDEN:
                hidden = node
            elif node is not None and value != AFTER:
                self.add(value if block is None else block.value(value), node)
        return hidden

    def add(self, value: Value, gradient: Node) -> None:
        """Add a part's gradient of an input, which other parts may read, too."""
        if value in self.known:
            gradient = add_call(self.target.graph, aten.add.Tensor, self.known[value], gradient)
        self.known[value] = gradient


def reached_from(start: Node, other: Node | None) -> set[Node]:
    """Return what depends on `start`, and what is computed for such nodes alone.

    Of the latter, not what depends on `other`.
    """
    from_other = set() if other is None else descendants(other)
    found = descendants(start)
    for node in reversed(start.graph.nodes):
        users = [user for user in node.users if user.op != "output"]
        if users and node not in from_other and all(user in found for user in users):
            found.add(node)
    return found
