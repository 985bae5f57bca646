"""Evaluate one traced graph for all ranks of a pipeline stage at once, in float64.

    ranks = Ranks.of(degrees, expert_parallel)
    results = evaluate(variants, variant_of, inputs)        # of each rank

A graph is evaluated node by node, each for all ranks, in one process. A collective is computed
over its groups: cat, sum and chunk. Every other operator is ATen itself, with float64 in place of
narrower floats. An operator with equal inputs is computed once: what an all-gather returns is one
tensor for its group, so all that is made of gathered weights is computed once for it.

Ranks have a few different graphs, called variants here: those with other operators, as of the first
rank of context parallelism. Their constants differ by rank (a vocabulary's first entry, rows of
an uneven shard), and are functions of coordinates (variants.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.fx import Node
from torch.utils._python_dispatch import TorchDispatchMode

from titan_lite.collectives import collectives
from titan_lite.distributed.step_gather import take_gradient
from titan_lite.graph import KINDS, group_size, kind_of, parameters_of
from titan_lite.models.experts import GROUPED_GEMM, GROUPED_GEMM_OF_WEIGHTS
from titan_lite.tools.verify.ranks import Divergence
from titan_lite.tools.verify.variants import FittedVariant

aten = torch.ops.aten


def in_words(node: Node) -> str:
    """Return an operator with the parameters that it is of, and its source line."""
    fqns = parameters_of(node)
    of = f" of {', '.join(fqns[:2])}{', ...' if len(fqns) > 2 else ''}" if fqns else ""
    at = f" at {node.meta['source']}" if "source" in node.meta else ""
    return f"{node} ({node.target}){of}{at}"


# --- Operators ------------------------------------------------------------------------------------


def grouped_mm(rows: Tensor, weights: Tensor, ends: Tensor, spare: int = 0) -> Tensor:
    product = rows.new_zeros(rows.shape[0], weights.shape[2])
    start = 0
    for expert, end in enumerate(ends.tolist()):
        product[start:end] = rows[start:end] @ weights[expert]
        start = end
    return product


def grouped_mm_of_weights(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    product = a.new_zeros(len(ends), a.shape[1], b.shape[1])
    start = 0
    for expert, end in enumerate(ends.tolist()):
        product[expert] = a[start:end].T @ b[start:end]
        start = end
    return product


# In place of operators that have no float64, or that ask for strides.
INSTEAD: dict[object, Any] = {
    aten.view.default: aten.reshape.default,
    aten._unsafe_view.default: aten.reshape.default,
    GROUPED_GEMM: grouped_mm,
    GROUPED_GEMM_OF_WEIGHTS: grouped_mm_of_weights,
    # of weights that are gathered once a step: the gradient stands for that of the handle
    take_gradient._opoverload: lambda gradient, fqn: gradient,
}


def widened(leaf: Any) -> Any:  # noqa: ANN401 of arguments
    """Return float64 for a narrower float dtype, other things as they are."""
    is_float = isinstance(leaf, torch.dtype) and leaf.is_floating_point
    return torch.float64 if is_float else leaf


class InFloat64(TorchDispatchMode):
    """A mode in which operators compute in float64, as in `evaluate`: casts to narrower floats do
    nothing.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 torch's
        args, kwargs = pytree.tree_map(widened, (args, kwargs or {}))
        return INSTEAD.get(func, func)(*args, **kwargs)


def communicate(
    node: Node, values: Sequence[Tensor], groups: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Return the results of a collective on all ranks. values: its input on each rank."""
    results: list[Tensor] = list(values)
    for group in groups:
        parts = [values[rank] for rank in group]
        if len({part.shape for part in parts}) > 1:
            raise Divergence(
                f"{in_words(node)}: ranks {group[0]}, {group[1]}, ... have shapes"
                f" {', '.join(str(tuple(shape)) for shape in {part.shape for part in parts})}"
            )
        kind = kind_of(node)
        if kind != "all_reduce" and group_size(node) != len(group):
            raise Divergence(
                f"{node} is for {group_size(node)} ranks, and its group has {len(group)}"
            )
        if kind == "all_gather":
            own = [torch.cat(parts)] * len(group)
        elif kind == "reduce_scatter":
            own = list(reduced(node, parts, node.args[1]).chunk(len(group)))
        else:
            own = [reduced(node, parts, node.args[1])] * len(group)
        for rank, result in zip(group, own, strict=True):
            results[rank] = result
    return results


def reduced(node: Node, parts: Sequence[Tensor], how: object) -> Tensor:
    if how == "max":
        return torch.stack(list(parts)).amax(0)
    total = sum(parts[1:], parts[0])
    if how == "sum":
        return total
    if how == "avg":
        return total / len(parts)
    raise Divergence(f"{node}: reduction {how!r} is not known")


# --- Evaluation -----------------------------------------------------------------------------------

Values = dict[int, Any]  # of a node, by rank
# What is called with each node of a variant, and its values.
Watch = Callable[[Node, Values], None]


@dataclass
class _Run:
    """The evaluation of one variant up to its next collective."""

    variant: FittedVariant
    members: list[int]  # ranks
    inputs: Sequence[Sequence[Any]]
    watch: Watch | None = None

    def __post_init__(self) -> None:
        self.nodes = list(self.variant.graph.nodes)
        self.next = 0
        self.values: dict[Node, Values] = {}
        self.last_read = {source: node for node in self.nodes for source in node.all_input_nodes}

    def stop(self) -> Node:
        """Compute up to the next collective or the output, and return that node."""
        while True:
            node = self.nodes[self.next]
            if node.op == "output" or node.target in KINDS:
                return node
            self.keep(node, self.compute(node))

    def keep(self, node: Node, values: Values) -> None:
        """Set the values of the next node, and free what nothing reads any more."""
        self.values[node] = values
        self.next += 1
        if self.watch is not None:
            self.watch(node, values)
        for source in node.all_input_nodes:
            if self.last_read[source] is node:
                self.values.pop(source, None)

    def compute(self, node: Node) -> Values:
        if node.op == "placeholder":
            index = self.next
            return {rank: self.inputs[rank][index] for rank in self.members}
        if node.op == "get_attr":
            constant = self.variant.constants[str(node.target)]
            if constant.is_floating_point():
                constant = constant.double()
            return dict.fromkeys(self.members, constant)
        if node.target is collectives.wait_tensor.default:
            return self.values[node.all_input_nodes[0]]
        return self.call(node)

    def call(self, node: Node) -> Values:
        """Call the operator of a node once for each set of different inputs."""
        leaves, structure = pytree.tree_flatten((node.args, node.kwargs))
        leaves = [widened(leaf) for leaf in leaves]
        sources = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Node)]
        values = [self.values[leaves[index]] for index in sources]
        # Putting arguments together takes as long as most operators: a copy does if none is nested.
        arguments, keywords = pytree.tree_map(widened, (list(node.args), dict(node.kwargs)))
        at = [index for index, argument in enumerate(arguments) if isinstance(argument, Node)]
        operator = INSTEAD.get(node.target, node.target)
        known: dict[tuple[Any, ...], Any] = {}
        results: Values = {}
        for rank in self.members:
            inputs = [of_ranks[rank] for of_ranks in values]
            constants = self.variant.own_leaves(node, rank)
            key = (*map(id, inputs), *constants.values())
            if key not in known:
                if constants or len(at) < len(sources):
                    own = list(leaves)
                    for index, value in [*zip(sources, inputs, strict=True), *constants.items()]:
                        own[index] = value
                    args, kwargs = pytree.tree_unflatten(own, structure)
                else:
                    args, kwargs = list(arguments), keywords
                    for index, value in zip(at, inputs, strict=True):
                        args[index] = value
                try:
                    known[key] = operator(*args, **kwargs)
                except (RuntimeError, IndexError, TypeError, ValueError) as error:
                    why = str(error).splitlines()[0]
                    raise Divergence(f"{in_words(node)} on rank {rank}: {why}") from error
            results[rank] = known[key]
        return results

    def results(self, rank: int) -> list[Any]:
        """Return the graph's results on a rank."""
        (wanted,) = self.nodes[self.next].args
        return [self.values[leaf][rank] if isinstance(leaf, Node) else leaf for leaf in wanted]


def evaluate(
    variants: Sequence[FittedVariant],
    variant_of: Sequence[int],
    inputs: Sequence[Sequence[Any]],
    watch: Watch | None = None,
) -> list[list[Any]]:
    """Return the results of a graph on each rank.

    variant_of: the index of each rank's variant; inputs: of each rank, in float64. watch: called
    with each node and its values by rank. Raises Divergence.
    """
    runs = [
        _Run(variant, [rank for rank, own in enumerate(variant_of) if own == index], inputs, watch)
        for index, variant in enumerate(variants)
    ]
    run_of = {rank: run for run in runs for rank in run.members}
    while True:
        stops = [run.stop() for run in runs]
        here = {(node.target, node.args[1:-1]) for node in stops}  # of an output, no arguments
        if len(here) > 1:
            words = ", ".join(sorted(set(map(in_words, stops))))
            raise Divergence(f"ranks wait for each other: they are at {words}")
        if stops[0].op == "output":
            return [run_of[rank].results(rank) for rank in range(len(variant_of))]
        values = []
        for rank in range(len(variant_of)):
            run = run_of[rank]
            source = run.nodes[run.next].all_input_nodes[0]
            values.append(run.values[source][rank])
        groups = runs[0].variant.groups[stops[0]]
        results = communicate(stops[0], values, groups)
        for run, node in zip(runs, stops, strict=True):
            if run.variant.groups[node] != groups:
                raise Divergence(f"{node}: ranks call it in different groups")
            run.keep(node, {rank: results[rank] for rank in run.members})
