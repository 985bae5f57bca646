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
from torch.fx._lazy_graph_module import _LazyGraphModule

from titan_lite.compile.graph import add_call, placeholders, results_of
from titan_lite.compile.joint import BackwardHalves
from titan_lite.compile.model_parts import (
    BLOCK_OUTPUT,
    HIDDEN,
    OUTPUT,
    Block,
    ModelParts,
    Part,
    Value,
)
from titan_lite.graph import ancestors, aten, descendants


@dataclass(frozen=True)
class ModelGraphs:
    """The graphs of a model for arguments of certain shapes."""

    inputs: Sequence[Value]  # of the forward graph
    forward: GraphModule  # inputs -> output, saved values
    # Saved values, gradient of the output -> gradients of the inputs, None for some. Both are None
    # if the output has no gradient.
    backward: GraphModule | None
    halves: BackwardHalves | None

    @property
    def has_gradients(self) -> bool:
        return self.backward is not None or self.halves is not None


def compose(parts: ModelParts, full_backward: bool = True) -> ModelGraphs:
    """Return the graphs of a model.

    full_backward: backward is one graph, besides the halves that the parts have.
    """
    forward = _compose_forward(parts)
    makes_output = parts.blocks[-1].part if parts.output == BLOCK_OUTPUT else parts.outer
    backward = halves = None
    if makes_output.traced.backward is not None and full_backward:
        backward = _Backward(parts, forward).module()
    if makes_output.halves is not None:
        halves = _Backward(parts, forward, first_half=True).halves()
    return ModelGraphs(forward.inputs, forward.module, backward, halves)


class _GrowingGraph:
    """A graph that copies of parts are added to."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.constants: dict[str, Any] = {}  # by the name of the module's attribute

    def placeholder(self, name: str, like: Node) -> Node:
        """Add a placeholder with the value of the node `like`, which may be in another graph."""
        node = self.graph.placeholder(name)
        node.meta["val"] = like.meta["val"]
        node.meta["is_model_input"] = like.meta.get("is_model_input", False)
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
        return _LazyGraphModule(self.constants, self.graph)  # no code until it is called


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
                copied.meta["block"] = self.block.fqn
                rename(copied, self.block)


def rename(node: Node, block: Block) -> None:
    """Replace the names of the traced block's parameters by those of `block`."""
    node.args = tuple(
        block.name(argument) if isinstance(argument, str) else argument for argument in node.args
    )
    custom = node.meta.get("custom", {})
    if "fqn" in custom:
        node.meta["custom"] = {**custom, "fqn": block.name(custom["fqn"])}


@dataclass(frozen=True)
class _Forward:
    """The forward graph of a model."""

    module: GraphModule
    inputs: Sequence[Value]
    output: Node
    # nodes that each part's backward reads, in its order
    saved_by_outer: Sequence[Node]
    saved_by_blocks: Sequence[Sequence[Node]]
    saved: Sequence[Node]  # each of them once, in the order of the module's results


def _compose_forward(parts: ModelParts) -> _Forward:
    target = _GrowingGraph()
    known = _add_inputs(target, parts)  # nodes of inputs, and of what parts pass on
    inputs = list(known)

    module = parts.outer.traced.forward
    outer = _Copy(target, module)
    results = dict(zip(parts.outer.results, parts.outer.traced.results, strict=True))
    of_blocks = {value: node for value, node in results.items() if value != OUTPUT}
    before_blocks = ancestors(of_blocks.values())
    for value, placeholder in parts.outer.placeholders.items():
        if value == BLOCK_OUTPUT:
            block_output = placeholder
        else:
            outer.give(placeholder, known[value])
    outer.add(node for node in module.graph.nodes if node in before_blocks)
    known.update({value: outer.nodes[node] for value, node in of_blocks.items()})

    saved_by_blocks = []
    if parts.hidden is not None:
        known[HIDDEN] = known[parts.hidden]
    for block in parts.blocks:
        copy = _Copy(target, block.part.traced.forward, block)
        for value, placeholder in block.part.placeholders.items():
            copy.give(placeholder, known[block.value(value)])
        copy.add(copy.source.graph.nodes)
        (result,) = block.part.traced.results
        known[HIDDEN] = copy.nodes[result]
        saved_by_blocks.append([copy.nodes[node] for node in block.part.traced.saved])

    if parts.hidden is not None:
        known[BLOCK_OUTPUT] = known[HIDDEN]
        outer.give(block_output, known[BLOCK_OUTPUT])
    outer.add(node for node in module.graph.nodes if node not in before_blocks)
    saved_by_outer = [outer.nodes[node] for node in parts.outer.traced.saved]
    output = outer.nodes[results[OUTPUT]] if OUTPUT in results else known[parts.output]
    every_saved = dict.fromkeys(itertools.chain(saved_by_outer, *saved_by_blocks))
    return _Forward(
        module=target.finish([output, *every_saved]),
        inputs=inputs,
        output=output,
        saved_by_outer=saved_by_outer,
        saved_by_blocks=saved_by_blocks,
        saved=list(every_saved),
    )


def _add_inputs(target: _GrowingGraph, parts: ModelParts) -> dict[Value, Node]:
    """Add a placeholder for each input of the model."""
    found: dict[Value, Node] = {}

    def add(value: Value, like: Node) -> None:
        if value.is_input and value not in found:
            found[value] = target.placeholder(value.label, like)
            found[value].meta["is_model_input"] = True

    for value, placeholder in parts.outer.placeholders.items():
        add(value, placeholder)
    for block in parts.blocks:
        for value, placeholder in block.part.placeholders.items():
            add(block.value(value), placeholder)
    return found


class _Gradients:
    """The gradients that a backward graph, or a half of it, returns."""

    def __init__(self, target: _GrowingGraph):
        self.target = target
        self.known: dict[Value, Node] = {}

    def collect(self, copy: "_PartBackward") -> Node | None:
        """Take the gradients of the model's inputs. Returns that of HIDDEN."""
        hidden = None
        gradients = copy.results()[: len(copy.part.inputs)]
        for value, node in zip(copy.part.inputs, gradients, strict=True):
            if value == HIDDEN:
                hidden = node
            elif node is not None and value != BLOCK_OUTPUT:
                self.add(value if copy.block is None else copy.block.value(value), node)
        return hidden

    def add(self, value: Value, gradient: Node) -> None:
        """Add a part's gradient of an input, which other parts may read, too."""
        if value in self.known:
            gradient = add_call(self.target.graph, aten.add.Tensor, self.known[value], gradient)
        self.known[value] = gradient


class _PartBackward(_Copy):
    """A copy of a part's backward, or of a half of it."""

    def __init__(self, target: _GrowingGraph, part: Part, source: GraphModule, block: Block | None):
        super().__init__(target, source, block)
        self.part = part

    def results(self) -> list[Node | None]:
        """Return what stands for the results: gradients, and what crosses to the other half."""
        return [
            None if node is None else self.nodes[node] for node in results_of(self.source.graph)
        ]


class _Backward:
    """The backward graph of a model, or the half that makes gradients of hidden states."""

    def __init__(self, parts: ModelParts, forward: _Forward, first_half: bool = False):
        self.parts = parts
        self.first_half = first_half
        self.inputs = forward.inputs
        self.target = _GrowingGraph()
        self.saved = {node: self.target.placeholder(node.name, node) for node in forward.saved}
        self.of_output = self.target.placeholder("gradient", forward.output)
        self.gradients = _Gradients(self.target)
        self.copies: list[_PartBackward] = []  # in the order in which they run
        self._compose(forward)

    def _compose(self, forward: _Forward) -> None:
        hidden: Node | None = self.of_output  # that enters the backward of the next part
        outer = None
        before_blocks: set[Node] = set()
        if self.parts.outer.traced.backward is not None:
            outer = self._start(self.parts.outer, forward.saved_by_outer)
            tangents = placeholders(outer.source.graph)[len(forward.saved_by_outer) :]
            tangent_of = dict(zip(self.parts.outer.differentiable, tangents, strict=True))
            if HIDDEN in tangent_of:
                before_blocks = reached_from(tangent_of[HIDDEN], tangent_of.get(OUTPUT))
            if OUTPUT in tangent_of:
                outer.give(tangent_of[OUTPUT], self.of_output)
            outer.add(node for node in outer.source.graph.nodes if node not in before_blocks)
            if BLOCK_OUTPUT in self.parts.outer.inputs and OUTPUT in tangent_of:
                of_block_output = results_of(outer.source.graph)[
                    self.parts.outer.inputs.index(BLOCK_OUTPUT)
                ]
                hidden = None if of_block_output is None else outer.nodes[of_block_output]

        for block, saved in zip(
            reversed(self.parts.blocks), reversed(forward.saved_by_blocks), strict=True
        ):
            if hidden is None or block.part.traced.backward is None:
                hidden = None  # no part before this one has a gradient
                break
            copy = self._start(block.part, saved, block)
            copy.give(placeholders(copy.source.graph)[-1], hidden)
            copy.add(copy.source.graph.nodes)
            hidden = self.gradients.collect(copy)

        if self.parts.hidden is not None and hidden is not None:
            if self.parts.hidden == HIDDEN:
                assert outer is not None
                outer.give(tangent_of[HIDDEN], hidden)
            else:
                self.gradients.add(self.parts.hidden, hidden)
        if outer is not None:
            outer.add(node for node in outer.source.graph.nodes if node in before_blocks)
            self.gradients.collect(outer)

    def _start(
        self, part: Part, saved: Sequence[Node], block: Block | None = None
    ) -> _PartBackward:
        """Return a copy of a part's backward that has its saved values, and no nodes yet."""
        source = part.traced.backward
        if self.first_half:
            assert part.halves is not None
            source = part.halves.input
        assert source is not None
        copy = _PartBackward(self.target, part, source, block)
        for placeholder, node in zip(placeholders(source.graph)[: len(saved)], saved, strict=True):
            copy.give(placeholder, self.saved[node])
        self.copies.append(copy)
        return copy

    def module(self) -> GraphModule:
        """Return the graph of a backward that runs at once."""
        return self.target.finish([self.gradients.known.get(value) for value in self.inputs])

    def halves(self) -> BackwardHalves:
        """Return this half, and the other one, which makes gradients of weights."""
        target = _GrowingGraph()
        gradients = _Gradients(target)
        received = {copy: _received_by_weight_half(copy) for copy in self.copies}
        nodes = dict.fromkeys(itertools.chain(*received.values()))
        saved = [node for node in nodes if node.op == "placeholder"]
        crossing = [node for node in nodes if node.op != "placeholder"]
        given = {node: target.placeholder(node.name, node) for node in [*saved, *crossing]}
        for copy in self.copies:
            assert copy.part.halves is not None
            other = _PartBackward(target, copy.part, copy.part.halves.weight, copy.block)
            for placeholder, node in zip(
                placeholders(other.source.graph), received[copy], strict=True
            ):
                other.give(placeholder, given[node])
            other.add(other.source.graph.nodes)
            gradients.collect(other)
        of_hidden = [self.gradients.known.get(value) for value in self.inputs]
        return BackwardHalves(
            input=self.target.finish([*of_hidden, *crossing]),
            weight=target.finish([gradients.known.get(value) for value in self.inputs]),
            saved=tuple(node.name for node in saved),
            crossing=tuple(node.name for node in crossing),
        )


def _received_by_weight_half(copy: _PartBackward) -> list[Node]:
    """Return what the other half of a part's backward receives, as nodes of this half's graph."""
    halves = copy.part.halves
    assert halves is not None
    by_name = {node.name: node for node in placeholders(copy.source.graph)}
    saved = [copy.nodes[by_name[name]] for name in halves.saved]
    crossing = copy.results()[len(copy.part.inputs) :]
    return [*saved, *(node for node in crossing if node is not None)]


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
