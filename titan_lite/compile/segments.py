"""Compile a graph in segments: what lies between two collectives, and equal segments only once.

    cut = CutGraph(module, is_outside)
    functions = {key: compile_segment(segment) for key, segment in cut.segments.items()}
    program = cut.program(functions)
    results = program([*inputs])

    graph      x = mm(a, b); g = all_gather(s); y = relu(x); w = wait(g); z = mm(y, w)
    program    x = segment_0(a, b); g = all_gather(s); y = segment_1(x); w = wait(g); ...

The blocks of a transformer are alike, so a deep model has as many different segments as a shallow
one. A graph without collectives is parted between blocks. Collectives run in the order of the
graph: the compiler does not see them, so it cannot fuse an operator that leads to one with an
operator that waits for another.
"""

import operator
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from titan_lite import sinks
from titan_lite.collectives import collectives
from titan_lite.compile.graph import extract, output_node, placeholders, results_of
from titan_lite.graph import start_of

# Takes the list of its inputs, which it clears.
BoxedFunction = Callable[[list[Any]], Sequence[Any]]
Structure = Hashable  # equal for segments of the same code


class Slot(int):
    """The index of a value in the values of a running program."""


@dataclass(frozen=True)
class Segment:
    """Nodes between two collectives, as a graph of their own."""

    module: GraphModule
    inputs: Sequence[Any]  # fake

    @property
    def nodes(self) -> int:
        return len(self.module.graph.nodes)


@dataclass(frozen=True)
class OperatorCall:
    """The call of an operator outside of the segments."""

    operator: Callable[..., Any]
    arguments: Sequence[object]  # a Slot stands for its value
    keywords: Mapping[str, object]
    result: Slot
    last_reads: Sequence[Slot]  # values that nothing reads later

    def run(self, values: list[Any]) -> None:
        arguments = [_value(values, argument) for argument in self.arguments]
        keywords = {name: _value(values, argument) for name, argument in self.keywords.items()}
        values[self.result] = self.operator(*arguments, **keywords)
        for slot in self.last_reads:
            values[slot] = None


@dataclass(frozen=True)
class SegmentCall:
    """The call of a compiled segment."""

    function: BoxedFunction
    inputs: Sequence[Slot]
    outputs: Sequence[Slot]
    last_reads: Sequence[Slot]  # values that nothing reads later

    def run(self, values: list[Any]) -> None:
        inputs = [values[slot] for slot in self.inputs]
        for slot in self.last_reads:
            values[slot] = None  # so that the segment can free it
        for slot, output in zip(self.outputs, self.function(inputs), strict=True):
            values[slot] = output


@dataclass(frozen=True)
class Program:
    """The calls of a graph, in order."""

    inputs: int  # number of values that are inputs: the first ones
    unread: Sequence[Slot]  # inputs that nothing reads
    values: int  # number of all values
    calls: Sequence[OperatorCall | SegmentCall]
    outputs: Sequence[object]  # a Slot stands for its value
    different_segments: int

    def __call__(self, inputs: list[Any]) -> list[Any]:
        """Run the graph. Clears `inputs`; each value is freed after its last read."""
        values: list[Any] = inputs + [None] * (self.values - self.inputs)
        inputs.clear()
        for slot in self.unread:
            values[slot] = None
        for call in self.calls:
            call.run(values)
        return [_value(values, output) for output in self.outputs]

    @property
    def segments(self) -> int:
        return sum(isinstance(call, SegmentCall) for call in self.calls)


def _value(values: Sequence[Any], argument: object) -> Any:  # noqa: ANN401 any argument
    return values[argument] if isinstance(argument, Slot) else argument


def is_outside(node: Node) -> bool:
    """Return True for operators between segments, and for one result of such an operator:
    collectives, waits, and operators with sinks, whose FQNs would make segments differ.
    """
    if node.target is operator.getitem:
        (source,) = node.all_input_nodes
        return is_outside(source)
    if not isinstance(node.target, OpOverload) or is_fused(node):
        return False
    return node.target.namespace == "_c10d_functional" or node.target.name() in sinks.OPERATORS


def is_fused(node: Node) -> bool:
    """Return True for a collective that Inductor fuses with matmuls, and for its wait."""
    if node.target is collectives.wait_tensor.default:
        node = start_of(node)
    return "fused_with" in node.meta


def split(
    graph: Graph,
    runs_outside: Callable[[Node], bool],
    apart: Iterable[Collection[Node]] = (),
    starts: Collection[Node] = (),
) -> list[list[Node]]:
    """Return the parts of a graph in order: an outside node alone, or the nodes between two.

    apart: sets of nodes that are a part of their own, before the segment of the first one. They
    read inputs of the graph and each other. starts: nodes that begin a segment. The results of an
    operator with several results are in its part.
    """
    part_of: dict[Node, list[Node]] = {}
    for nodes in apart:
        part: list[Node] = []
        part_of.update((node, part) for node in nodes)
    parts: list[list[Node]] = []
    segment: list[Node] = []  # that is open
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if runs_outside(node):
            parts.append([node])
            segment = []
            continue
        if node in starts:
            segment = []
        if node.target is operator.getitem:
            (source,) = node.all_input_nodes
            part_of[node] = part_of[source]
        part = part_of.setdefault(node, segment)
        if not part:
            position = len(parts)
            if part is not segment and segment:
                position -= 1
            parts.insert(position, part)
        part.append(node)
    return parts


def inputs_of(part: Sequence[Node]) -> list[Node]:
    """Return the nodes that a part reads and does not have."""
    members = set(part)
    read = dict.fromkeys(source for node in part for source in node.all_input_nodes)
    return [node for node in read if node not in members]


def last_reads_of(graph: Graph, parts: Sequence[Sequence[Node]]) -> dict[Node, int]:
    """Return the number of the last part that reads a node; len(parts): the graph's output does."""
    last_reads: dict[Node, int] = {}
    for number, part in enumerate(parts):
        for node in part:
            last_reads.update(dict.fromkeys(node.all_input_nodes, number))
    results = [result for result in results_of(graph) if isinstance(result, Node)]
    last_reads.update(dict.fromkeys(results, len(parts)))
    return last_reads


@dataclass(frozen=True)
class _UncompiledCall:
    """The call of a segment that is not compiled yet; fields as in SegmentCall."""

    structure: Structure
    inputs: Sequence[Slot]
    outputs: Sequence[Slot]
    last_reads: Sequence[Slot]

    def compiled(self, functions: Mapping[Structure, BoxedFunction]) -> SegmentCall:
        return SegmentCall(functions[self.structure], self.inputs, self.outputs, self.last_reads)


class CutGraph:
    """A graph cut into segments, and what is called between them."""

    def __init__(
        self,
        module: GraphModule,
        runs_outside: Callable[[Node], bool],
        apart: Iterable[Collection[Node]] = (),
        starts: Collection[Node] = (),
    ):
        """Cut the graph, whose nodes have fake results in meta["val"].

        runs_outside: True for operators that are called between segments, and for the nodes that
        take one of several results. apart, starts: as in `split`.
        """
        self.segments: dict[Structure, Segment] = {}  # the different ones, by first call
        self._module = module
        self._slots: dict[Node, Slot] = {}
        self._calls: list[OperatorCall | _UncompiledCall] = []
        self._inputs = placeholders(module.graph)
        for node in self._inputs:
            self._add_slot(node)
        parts = split(module.graph, runs_outside, apart, starts)
        last_reads = last_reads_of(module.graph, parts)
        for number, part in enumerate(parts):
            read_last = [node for node in inputs_of(part) if last_reads[node] == number]
            if runs_outside(part[0]):
                (node,) = part
                self._call_operator(node, read_last)
            else:
                read_later = [node for node in part if last_reads.get(node, number) > number]
                self._call_segment(part, read_later, read_last)

    def program(self, functions: Mapping[Structure, BoxedFunction]) -> Program:
        """Return what runs the graph. functions: of each of `segments`."""
        return Program(
            inputs=len(self._inputs),
            unread=[self._slots[node] for node in self._inputs if not node.users],
            values=len(self._slots),
            calls=[
                call.compiled(functions) if isinstance(call, _UncompiledCall) else call
                for call in self._calls
            ],
            outputs=[self._slot(result) for result in results_of(self._module.graph)],
            different_segments=len(self.segments),
        )

    def _call_operator(self, node: Node, read_last: Sequence[Node]) -> None:
        assert callable(node.target)
        call = OperatorCall(
            operator=node.target,
            arguments=[self._slot(argument) for argument in node.args],
            keywords={name: self._slot(argument) for name, argument in node.kwargs.items()},
            result=self._add_slot(node),
            last_reads=[self._slots[source] for source in read_last],
        )
        self._calls.append(call)

    def _call_segment(
        self, part: Sequence[Node], outputs: Sequence[Node], read_last: Sequence[Node]
    ) -> None:
        """Call the segment with the nodes of `part`. outputs: those that are read outside of it."""
        inputs = inputs_of(part)
        names = [f"input_{number}" for number in range(len(inputs))]
        graph = extract(part, dict(zip(names, inputs, strict=True)), outputs)
        # The next segment is compiled for the strides of these.
        output_node(graph).meta["user_visible_output_idxs"] = list(range(len(outputs)))
        module = GraphModule(self._module, graph)
        structure = structure_of(module)
        if structure not in self.segments:
            fake_inputs = [node.meta["val"] for node in inputs]
            self.segments[structure] = Segment(module, fake_inputs)
        call = _UncompiledCall(
            structure=structure,
            inputs=[self._slots[node] for node in inputs],
            outputs=[self._add_slot(node) for node in outputs],
            last_reads=[self._slots[node] for node in read_last],
        )
        self._calls.append(call)

    def _add_slot(self, node: Node) -> Slot:
        self._slots[node] = Slot(len(self._slots))
        return self._slots[node]

    def _slot(self, argument: object) -> object:
        return self._slots[argument] if isinstance(argument, Node) else argument


def structure_of(segment: GraphModule) -> Structure:
    """Return a value that is equal for segments of the same code, also of different graphs."""
    numbers = {node: number for number, node in enumerate(segment.graph.nodes)}

    def describe(argument: object) -> str:
        if isinstance(argument, Node):
            return f"%{numbers[argument]}"
        if isinstance(argument, list | tuple):
            return f"[{', '.join(map(describe, argument))}]"
        return repr(argument)

    lines = []
    for node in segment.graph.nodes:
        if node.op == "placeholder":
            value = node.meta["val"]
            if isinstance(value, Tensor):
                lines.append(
                    f"{value.dtype} {value.device} {tuple(value.shape)} {value.stride()}"
                    f" {value.storage_offset()}"
                )
            else:
                lines.append(repr(value))
        elif node.op == "get_attr":
            # Two graphs may have constants of one name.
            lines.append(f"constant {id(getattr(segment, node.target))}")
        else:
            keywords = [f"{name}={describe(value)}" for name, value in node.kwargs.items()]
            lines.append(f"{node.target} {describe(node.args)} {keywords}")
    return "\n".join(lines)
