"""Name the first wrong value of graphs that differ from one process.

    known = KnownValues()               # watches a right evaluation: with data parallelism alone
    values = WatchedValues(ranks, known)                    # watches the wrong one
    values.first_wrong(["layers.0.ffn_norm.weight"])        # a Node and its graph's name, or None

Along each axis, a right value of a parallel graph is equal on all ranks, cut, or a part of a sum.
Put together it has the sum and the sum of squares of a value of the right evaluation, whatever its
shape and the order of its elements. Values without such a counterpart are unknown. Right graphs
have some, too: buckets, tokens in chunks, logits of a part of the vocabulary. They lead to known
values again; wrong ones are unknown up to a result.
"""

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from titan_lite.graph import aten, is_free
from titan_lite.tools.verify.lockstep import Values, Watch
from titan_lite.tools.verify.ranks import Ranks

Moments = tuple[float, float]  # sum, sum of squares
Cells = Mapping[tuple[int, ...], Tensor]  # by coordinates
# Operators that compute nothing, beside views: a bucket is wrong in its collective.
COPIES = {
    aten._to_copy.default,
    aten.cat.default,
    aten.clone.default,
    aten.constant_pad_nd.default,
    aten.stack.default,
}


class KnownValues:
    """The moments of the values of a right evaluation with data parallelism alone."""

    def __init__(self) -> None:
        self.moments: dict[int, list[Moments]] = {}  # by the logarithm of the sum of squares

    def watch(self, name: str, graph: Graph, results: Sequence[str]) -> Watch:
        return self.add

    def add(self, node: Node, values: Values) -> None:
        """Add a value of all ranks: it may be equal on them, cut, or a part of a sum."""
        own = list(values.values())
        if is_number(own):
            choices = [own, own[:1]]
            if len({value.shape for value in own}) == 1:
                choices.append([sum(own[1:], own[0])])
            for moments in map(moments_of, choices):
                if is_usable(moments):
                    self.moments.setdefault(key_of(moments), []).append(moments)

    def has(self, moments: Moments) -> bool:
        total, squares = moments
        if not is_usable(moments):
            return False
        key = key_of(moments)
        return any(
            math.isclose(squares, other_squares, rel_tol=1e-8)
            and abs(total - other) <= 1e-6 * math.sqrt(squares)
            for near in (key - 1, key, key + 1)
            for other, other_squares in self.moments.get(near, ())
        )


def moves(node: Node) -> bool:
    """Return True if a node computes nothing."""
    return is_free(node) or node.target in COPIES


def moments_of(values: Iterable[Tensor]) -> Moments:
    sums = [(float(value.sum()), float(value.square().sum())) for value in values]
    return sum(total for total, _ in sums), sum(squares for _, squares in sums)


def is_usable(moments: Moments) -> bool:
    return math.isfinite(moments[1]) and moments[1] > 0


def key_of(moments: Moments) -> int:
    return round(math.log(moments[1]) * 1e6)


def is_number(values: Sequence[Any]) -> bool:
    """Return whether a value has floats that are not all zero."""
    first = values[0]
    if not isinstance(first, Tensor) or not first.is_floating_point():
        return False
    return any(value.numel() > 0 and bool(value.any()) for value in values)


def is_known(values: Sequence[Tensor], ranks: Ranks, known: KnownValues) -> bool:
    """Return whether a value of all ranks, put together along each axis, is a known one."""
    cells: Cells = {ranks.coordinates(rank): value for rank, value in enumerate(values)}
    unequal = []
    for axis in range(len(ranks.axes)):
        lines = lines_along(cells, axis)
        if all(map(are_equal, lines.values())):
            cells = {at: line[0] for at, line in lines.items()}
        else:
            unequal.append(axis)
    for count in range(len(unequal) + 1):  # of the axes whose ranks have a part of a sum
        for axes in itertools.combinations(unequal, count):
            whole = summed(cells, axes)
            if whole is not None and known.has(moments_of(whole.values())):
                return True
    return False


def lines_along(cells: Cells, axis: int) -> dict[tuple[int, ...], list[Tensor]]:
    """Return the values along an axis, by the coordinates of the first."""
    lines: dict[tuple[int, ...], list[Tensor]] = {}
    for at, value in cells.items():
        lines.setdefault((*at[:axis], 0, *at[axis + 1 :]), []).append(value)
    return lines


def are_equal(line: Sequence[Tensor]) -> bool:
    first = line[0]
    others = (value for value in line if value is not first)
    return all(
        value.shape == first.shape and torch.allclose(value, first, rtol=1e-9, atol=1e-12)
        for value in others
    )


def summed(cells: Cells, axes: Sequence[int]) -> Cells | None:
    """Return values summed over axes; None: their shapes differ."""
    for axis in axes:
        lines = lines_along(cells, axis)
        if any(len({value.shape for value in line}) > 1 for line in lines.values()):
            return None
        cells = {at: sum(line[1:], line[0]) for at, line in lines.items()}
    return cells


@dataclass
class WatchedGraph:
    """A graph, and which of its values are known."""

    name: str
    graph: Graph
    results: Sequence[str]  # the names of its first results, which have a meaning outside of it
    known: dict[str, bool] = field(default_factory=dict)  # by a node's name; integers have none

    def nodes_of_results(self) -> dict[str, Node]:
        (output,) = (node for node in self.graph.nodes if node.op == "output")
        pairs = zip(self.results, output.args[0], strict=False)
        return {name: node for name, node in pairs if isinstance(node, Node)}

    def first_unknown(self) -> Node | None:
        """Return the first node that leads to an unknown result through unknown values."""
        unknown: set[Node] = set()
        left = list(self.nodes_of_results().values())
        while left:
            node = left.pop()
            if node not in unknown and not self.known.get(node.name, True):
                unknown.add(node)
                left += node.all_input_nodes
        depends: set[Node] = set()  # on inputs, as a mask made of constants does not
        for node in self.graph.nodes:
            if node.op == "placeholder" or not depends.isdisjoint(node.all_input_nodes):
                depends.add(node)
        nodes = [
            node for node in self.graph.nodes if node in unknown & depends and node.all_input_nodes
        ]
        computing = (node for node in nodes if not moves(node))
        return next(computing, nodes[0] if nodes else None)


class WatchedValues:
    """The values of all graphs, in the order of evaluation."""

    def __init__(self, ranks: Ranks, known: KnownValues):
        self.ranks = ranks
        self.known = known
        self.graphs: list[WatchedGraph] = []

    def watch(self, name: str, graph: Graph, results: Sequence[str]) -> Watch:
        """Return what is called with the values of a graph."""
        watched = WatchedGraph(name, graph, results)
        self.graphs.append(watched)
        waiting: dict[str, Values] = {}  # values that not all variants have yet

        def watch(node: Node, values: Values) -> None:
            found = waiting.setdefault(node.name, {})
            found.update(values)
            if len(found) < len(self.ranks):
                return
            del waiting[node.name]
            own = [found[rank] for rank in self.ranks]
            if isinstance(own[0], tuple | list):
                watched.known[node.name] = False  # one of its elements may be
            elif is_number(own):
                watched.known[node.name] = is_known(own, self.ranks, self.known)

        return watch

    def first_wrong(self, wrong: Collection[str]) -> tuple[str, Node] | None:
        """Return (name of the graph, node) of the first wrong value, None if there is none.

        wrong: names of wrong results. If all their values are known ones, the last node of a wrong
        result is returned: a sum after it is missing.
        """
        for watched in self.graphs:
            node = watched.first_unknown()
            if node is not None:
                return watched.name, node
        for watched in reversed(self.graphs):
            for name, node in watched.nodes_of_results().items():
                if name in wrong:
                    return watched.name, node
        return None
