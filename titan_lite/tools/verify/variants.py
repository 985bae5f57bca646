"""Make the graphs of all ranks of a stage from those of a few.

    variants = StageVariants(ranks, trace, kind_of)     # trace: rank -> TracedStage
    variants.of["forward"], variants.index      # what `evaluate` takes

A few ranks are traced along each axis: the ends, both sides of a change of shards, and one more if
these graphs differ. Ranks whose graphs have the same operators, and whose shards have as many rows,
are of one variant. Along each axis, a constant of a variant is a line or has steps, and is fitted.
The fits are compared with the graphs of ranks drawn at random. If groups of experts straddle an
axis, such as 4 beside tp 3, each rank is traced.
"""

import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.fx import Graph, Node

from titan_lite.graph import KINDS, group_of, waits_of
from titan_lite.tools.verify.ranks import Divergence, Ranks
from titan_lite.tools.verify.trace_ranks import TracedStage

DRAWN = 3  # ranks that fits are compared with
DRAWN_OF_EQUAL = 1  # if all traced ranks have the same graphs
Coordinates = tuple[int, ...]


class FittedVariant:
    """A graph of some ranks: that of one, with constants fitted to others."""

    def __init__(
        self,
        name: str,
        traced: TracedStage,
        base: Coordinates,
        ranks: Ranks,
        along: Sequence[tuple[int, int, TracedStage]],
    ):
        """base: coordinates of the traced rank; along: (axis, coordinate, rank) of others."""
        module = traced.graphs[name]
        self.graph: Graph = module.graph
        self.constants: dict[str, Tensor] = {
            str(node.target): getattr(module, str(node.target))
            for node in self.graph.nodes
            if node.op == "get_attr"
        }
        self.base = base
        self.ranks = ranks
        self.groups = {
            node: ranks.groups_like(traced.groups[group_of(node)])
            for node in self.graph.nodes
            if node.target in KINDS
        }
        # constants that differ: node -> leaf -> axis -> {coordinate: constant}
        self.own: dict[Node, dict[int, dict[int, dict[int, float]]]] = {}
        tables: dict[tuple[Node, int, int], dict[int, float]] = {}
        for axis, coordinate, other in along:
            pairs = zip(self.graph.nodes, other.graphs[name].graph.nodes, strict=True)
            for node, of_other in pairs:
                theirs = numbers_of(of_other)
                for leaf, value in numbers_of(node).items():
                    table = tables.setdefault((node, leaf, axis), {base[axis]: value})
                    table[coordinate] = theirs[leaf]
        for (node, leaf, axis), table in tables.items():
            if len(set(table.values())) > 1:
                self.own.setdefault(node, {}).setdefault(leaf, {})[axis] = table

    def own_leaves(self, node: Node, rank: int) -> Mapping[int, int | float]:
        if node not in self.own:
            return {}
        coordinates = self.ranks.coordinates(rank)
        mine = numbers_of(node)
        return {
            leaf: mine[leaf]
            + sum(
                fitted(table, coordinates[axis]) - table[self.base[axis]]
                for axis, table in tables.items()
            )
            for leaf, tables in self.own[node].items()
        }


def numbers_of(node: Node) -> dict[int, int | float]:
    """Return the numbers among a node's arguments, by the index of a leaf."""
    if node.op != "call_function":
        return {}
    leaves, _ = pytree.tree_flatten((node.args, node.kwargs))
    return {
        index: leaf
        for index, leaf in enumerate(leaves)
        if isinstance(leaf, int | float) and not isinstance(leaf, bool) and leaf == leaf  # no NaN
    }


def fitted(table: Mapping[int, float], coordinate: int) -> float:
    """Return the constant at a coordinate.

    It is on the line through all samples. If they are on none, it is that of the sample before, or
    of the first one.
    """
    if coordinate in table:
        return table[coordinate]
    first, second = sorted(table)[:2]
    slope = (table[second] - table[first]) / (second - first)
    if all(value == table[first] + slope * (at - first) for at, value in table.items()):
        value = table[first] + slope * (coordinate - first)
        return int(value) if isinstance(table[first], int) else value
    return table[max((at for at in table if at <= coordinate), default=min(table))]


class StageVariants:
    """The graphs of a stage on all ranks."""

    def __init__(
        self,
        ranks: Ranks,
        trace: Callable[[int], TracedStage],
        kind_of: Callable[[int], Hashable],
    ):
        """kind_of: what graphs of a rank depend on beside its coordinates: shapes of shards."""
        self.ranks = ranks
        self.traced: dict[Coordinates, TracedStage] = {}
        self.contents: dict[Coordinates, tuple[Hashable, Hashable]] = {}  # of those traced
        self._trace = trace
        origin = (0,) * len(ranks.sizes)
        self.samples = []
        for axis, size in enumerate(ranks.sizes):
            line = [kind_of(ranks.rank(moved(origin, axis, index))) for index in range(size)]
            changes = {index for index in range(1, size) if line[index] != line[index - 1]}
            samples = {0, size - 1, *changes, *(index - 1 for index in changes)}
            if self._differ(origin, axis, samples):
                samples.add(1)
            self.samples.append(sorted(samples))
        self.first = self.at(origin)
        kinds = [
            {index: self.contents_at(moved(origin, axis, index))[0] for index in samples}
            for axis, samples in enumerate(self.samples)
        ]
        found: dict[Hashable, int] = {}
        self.index: list[int] = []  # of each rank's variant
        for rank in ranks:
            along = tuple(
                kinds[axis][max(sample for sample in kinds[axis] if sample <= index)]
                for axis, index in enumerate(ranks.coordinates(rank))
            )
            self.index.append(found.setdefault((along, kind_of(rank)), len(found)))
        self.of: dict[str, list[FittedVariant]] = {name: [] for name in self.first.graphs}
        for number in range(len(found)):
            self._add_variant(number)
        self._check_fits()
        for traced in self.traced.values():
            check_waits(traced)

    def at(self, coordinates: Coordinates) -> TracedStage:
        if coordinates not in self.traced:
            self.traced[coordinates] = self._trace(self.ranks.rank(coordinates))
            self.contents[coordinates] = contents_of(self.traced[coordinates])
        return self.traced[coordinates]

    def contents_at(self, coordinates: Coordinates) -> tuple[Hashable, Hashable]:
        """Return the operators and the numbers of a rank's graphs."""
        self.at(coordinates)
        return self.contents[coordinates]

    def _add_variant(self, number: int) -> None:
        base = self._base_of(number)
        along = []
        for axis, size in enumerate(self.ranks.sizes):
            of_variant = {
                index
                for index in range(size)
                if self.index[self.ranks.rank(moved(base, axis, index))] == number
            }
            samples = of_variant.intersection(self.samples[axis])
            if samples <= {base[axis]} or self._differ(base, axis, samples):
                # the next one, or at the end of its line the one before
                samples |= (of_variant & {base[axis] + 1}) or (of_variant & {base[axis] - 1})
            along += [
                (axis, index, self.at(moved(base, axis, index)))
                for index in sorted(samples - {base[axis]})
            ]
        for name, variants in self.of.items():
            variants.append(FittedVariant(name, self.at(base), base, self.ranks, along))

    def _base_of(self, number: int) -> Coordinates:
        """Return the rank of a variant with most others of the variant on the same lines.

        Constants are fitted along these lines. Of 4 x 4 ranks, (2, 3) and (3, 0) to (3, 3) may have
        empty shards: along the second axis, (2, 3) has no other of its variant.
        """
        members = [
            self.ranks.coordinates(rank) for rank, own in enumerate(self.index) if own == number
        ]
        axes = range(len(self.ranks.sizes))
        on_line = Counter((axis, moved(member, axis, 0)) for member in members for axis in axes)
        return max(
            members,
            key=lambda member: sum(on_line[axis, moved(member, axis, 0)] for axis in axes),
        )

    def _differ(self, base: Coordinates, axis: int, samples: Iterable[int]) -> bool:
        """Return whether ranks at some coordinates of an axis have another graph than `base`."""
        own = self.contents_at(base)
        return any(self.contents_at(moved(base, axis, index)) != own for index in samples)

    def _check_fits(self) -> None:
        """Compare the fitted graphs with those of all traced ranks, and of ranks drawn at random.
        Raises Divergence.
        """
        are_equal = len(set(self.contents.values())) == 1
        count = min(DRAWN_OF_EQUAL if are_equal else DRAWN, len(self.ranks))
        drawn = random.Random(0).sample(range(len(self.ranks)), count)
        for rank in {*map(self.ranks.rank, self.traced), *drawn}:
            traced = self.at(self.ranks.coordinates(rank))
            for name, variants in self.of.items():
                variant = variants[self.index[rank]]
                check_equal(f"rank {rank}: {name}", variant, traced, name)


def moved(coordinates: Coordinates, axis: int, index: int) -> Coordinates:
    return (*coordinates[:axis], index, *coordinates[axis + 1 :])


def signature(graph: Graph) -> Hashable:
    """Return the operators of a graph, whose results each reads, and its arguments that are no
    numbers, which are fitted, nor names of groups.
    """
    order = {node: index for index, node in enumerate(graph.nodes)}

    def of(leaf: object) -> Hashable:
        if isinstance(leaf, Node):
            return order[leaf]
        if leaf is None or isinstance(leaf, bool | torch.dtype):
            return leaf
        return type(leaf).__name__

    return tuple(
        (
            str(node.target) if node.op == "call_function" else node.op,
            tuple(map(of, pytree.tree_leaves((node.args, node.kwargs)))),
        )
        for node in graph.nodes
    )


def contents_of(traced: TracedStage) -> tuple[Hashable, Hashable]:
    """Return the operators of a rank's graphs with their numbers."""
    numbers = tuple(
        tuple(numbers_of(node).items())
        for module in traced.graphs.values()
        for node in module.graph.nodes
    )
    operators = tuple((name, signature(module.graph)) for name, module in traced.graphs.items())
    return operators, numbers


def check_equal(where: str, variant: FittedVariant, traced: TracedStage, name: str) -> None:
    """Raise Divergence unless a rank's graph is what the variant says."""
    graph = traced.graphs[name].graph
    if signature(variant.graph) != signature(graph):
        raise Divergence(f"{where} has other operators, or of other values")
    for node, found in zip(variant.graph.nodes, graph.nodes, strict=True):
        if node.op == "get_attr":
            own, theirs = variant.constants[str(node.target)], traced.graphs[name]
            if not torch.equal(own, getattr(theirs, str(found.target))):
                raise Divergence(f"{where}:{found} is another constant")
        expected = {**numbers_of(node), **variant.own_leaves(node, traced.rank)}
        if expected != numbers_of(found):
            raise Divergence(
                f"{where}:{found} ({found.target}) has {list(numbers_of(found).values())}, not"
                f" {list(expected.values())}"
            )
        if node.target in KINDS:
            group = list(traced.groups[group_of(found)])
            if group not in variant.groups[node]:
                raise Divergence(f"{where}:{found} is over ranks {group}")


def check_waits(traced: TracedStage) -> None:
    """Raise Divergence for a collective that is not waited for, or is read before.

    Backward may have its result, since forward has waited for it.
    """
    for name, module in traced.graphs.items():
        for node in module.graph.nodes:
            if node.target not in KINDS:
                continue
            waits = waits_of(node)
            early = [user for user in node.users if user not in waits and user.op != "output"]
            if early or not waits:
                what = f"{early[0]} reads it" if early else "nothing waits for it"
                raise Divergence(f"rank {traced.rank}: {name}:{node}: {what}")
