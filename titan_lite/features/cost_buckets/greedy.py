"""Give parameters that computation hides a bucket together.

    bucket_greedily(graph, settings)                    # a pass
    merge_buckets(graph, greedy(graph, machine))        # what it does, in place

    before   gather a, gather b, gather c; compute with a (long); compute with b; compute with c
    after    gather a, gather b + c;       compute with a hides the gather of b + c

SimpleFSDP calls this automatic wrapping, and a bucket for each block manual wrapping (arXiv
2411.00284, section 4.1 and algorithm 1).
"""

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from torch.fx import Graph, Node

from titan_lite.compile.passes.bucketing import Buckets, merge_buckets
from titan_lite.compile.rank_agreement import first_ranks_choice
from titan_lite.compile.settings import PassSettings
from titan_lite.cost.machine import Machine
from titan_lite.cost.timeline import computed_before
from titan_lite.graph import (
    collective_bytes,
    is_all_gather,
    kind_of,
    parameter_collectives,
    parameters_of,
    ranks_of,
)
from titan_lite.models.fqns import block_of, last_block


def bucket_greedily(graph: Graph, settings: PassSettings) -> int:
    """Make buckets that computation before them hides. Return the number of collectives saved.

    The first rank chooses, since tensor-parallel ranks reduce norms together.
    """
    if not parameter_collectives(graph):
        return 0
    assert settings.machine is not None  # by rules.py
    chosen = greedy(graph, settings.machine, fused=settings.fused)
    names = name_collectives(chosen)
    own = {name: str(chosen[node]) for node, name in names.items()}
    first = first_ranks_choice(own, settings.ranks)
    return merge_buckets(graph, {node: first[name] for node, name in names.items()})


def name_collectives(nodes: Iterable[Node]) -> dict[Node, str]:
    """Return a name per collective of parameters: kind, parameter and number.

    It is the same on ranks with other groups and sizes.
    """
    occurrences: Counter[str] = Counter()
    names = {}
    for node in sorted(nodes):
        name = f"{kind_of(node)} {parameters_of(node)[0]}"
        names[node] = f"{name} {occurrences[name]}"
        occurrences[name] += 1
    return names


@dataclass(frozen=True)
class _BucketItem:
    """The collectives of one parameter in one direction: its gather, or its reduction."""

    nodes: tuple[Node, ...]  # a reduce-scatter may be followed by an all-reduce over replicas
    computation: float  # seconds that read the weight, or make the gradient
    # seconds of collectives of the other direction that run during this computation
    other_transfers: float = 0.0

    @property
    def nbytes(self) -> int:
        return collective_bytes(self.nodes[0])


def greedy(graph: Graph, machine: Machine, *, fused: bool = True) -> Buckets:
    """Return buckets that grow in the order of reads, while computation hides them.

    The next parameter joins if the bucket is then gathered within the computation of the previous
    bucket, less the reductions in it, and if both buckets have no more bytes than two consecutive
    blocks. Gradients follow the same rule from last to first: a bucket is reduced during the
    computation of the one after it. Two rules are not in the paper: a parameter also joins if this
    saves more latency than could hide alone, and one larger than the rest of its bucket leaves if
    copying it takes longer than the latency saved.
    """
    gathers = [node for node in parameter_collectives(graph) if is_all_gather(node)]
    reductions = _reduction_chains(graph)
    computed = computed_before(graph, machine, fused)
    gather_items = _gather_items(graph, gathers, reductions, computed, machine)
    reduce_items = _reduce_items(gathers, reductions, computed, machine)

    buckets: dict[Node, Hashable] = {}
    for direction, items in (("gather", gather_items), ("reduce", reduce_items[::-1])):
        number = 0
        for grown in _grow(items, machine):
            for bucket in _split_large(grown, machine):
                for item in bucket:
                    for node in item.nodes:
                        buckets[node] = (direction, number)
                number += 1
    return buckets


def _reduction_chains(graph: Graph) -> list[list[Node]]:
    """Return each reduction of a gradient, with the reductions of its result behind it."""
    chains: list[list[Node]] = []
    for node in parameter_collectives(graph):
        if is_all_gather(node):
            continue
        for chain in reversed(chains):
            if _reads_only(node, chain[-1]):
                chain.append(node)
                break
        else:
            chains.append([node])
    return chains


def _reads_only(node: Node, earlier: Node) -> bool:
    """Return True if a reduction reads the result of the earlier one, and nothing else."""
    while node is not earlier and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node is earlier


def _gather_items(
    graph: Graph,
    gathers: Sequence[Node],
    reductions: Sequence[Sequence[Node]],
    computed: dict[Node, float],
    machine: Machine,
) -> list[_BucketItem]:
    """Return the all-gathers in the order of reads. A weight is read until the next is gathered."""
    reductions_of = {parameters_of(chain[0])[0]: chain for chain in reductions}
    output = next(iter(reversed(graph.nodes)))
    items = []
    for node, following in itertools.pairwise([*gathers, output]):
        reduced = reductions_of.get(parameters_of(node)[0], [])
        computation = computed[following] - computed[node]
        items.append(_BucketItem((node,), computation, _transfer_time(machine, reduced)))
    return items


def _reduce_items(
    gathers: Sequence[Node],
    reductions: Sequence[Sequence[Node]],
    computed: dict[Node, float],
    machine: Machine,
) -> list[_BucketItem]:
    """Return the reductions in graph order.

    A gradient is made after the reduction before it has started; meanwhile, the weight that comes
    next in backward is gathered.
    """
    gather_of = {parameters_of(node)[0]: node for node in gathers}
    starts = [0.0, *(computed[chain[0]] for chain in reductions)]
    items = []
    for number, chain in enumerate(reductions):
        gathered = []
        if number + 1 < len(reductions):
            fqn = parameters_of(reductions[number + 1][0])[0]
            gathered = [gather_of[fqn]] if fqn in gather_of else []
        computation = starts[number + 1] - starts[number]
        items.append(_BucketItem(tuple(chain), computation, _transfer_time(machine, gathered)))
    return items


def _grow(items: Sequence[_BucketItem], machine: Machine) -> list[list[_BucketItem]]:
    """Return the buckets in the order of `items`, by the rules of `greedy`."""
    buckets: list[list[_BucketItem]] = []
    limit = _bytes_of_two_blocks(items)
    for number, item in enumerate(items):
        if not buckets:
            buckets.append([item])
            continue
        current = buckets[-1]
        previous = buckets[-2] if len(buckets) > 1 else []
        following = items[number + 1 : number + 2]  # starts the next bucket

        together = _price(machine, [*current, item])
        alone = _price(machine, [item])
        hides = together <= sum(
            earlier.computation - earlier.other_transfers for earlier in previous
        )
        saved = _price(machine, current) + alone - together
        could_hide_alone = min(alone, sum(earlier.computation for earlier in current))
        fits = (
            max(_nbytes([*previous, *current, item]), _nbytes([*current, item, *following]))
            <= limit
        )
        if (hides or saved >= could_hide_alone) and fits:
            current.append(item)
        else:
            buckets.append([item])
    return buckets


def _split_large(bucket: list[_BucketItem], machine: Machine) -> list[list[_BucketItem]]:
    """Split off a weight that is larger than the rest of its bucket, if that is faster.

    It is if copying the weight out takes longer than the latency saved.
    """
    large = [item for item in bucket if 2 * item.nbytes > _nbytes(bucket)]  # at most one
    others = [item for item in bucket if item not in large]
    if not large or not others:
        return [bucket]
    saved = _price(machine, large) + _price(machine, others) - _price(machine, bucket)
    copied = 2 * _nbytes(large)  # read and written
    return [bucket] if machine.memory_traffic(copied) <= saved else [others, large]


def _price(machine: Machine, bucket: Sequence[_BucketItem]) -> float:
    """Return the seconds of a bucket's collectives, one per kind and group."""
    sizes: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for item in bucket:
        for node in item.nodes:
            sizes[kind_of(node), tuple(ranks_of(node))] += collective_bytes(node)
    return sum(machine.collective(kind, nbytes, ranks) for (kind, ranks), nbytes in sizes.items())


def _transfer_time(machine: Machine, nodes: Sequence[Node]) -> float:
    """Return the seconds that these collectives take beyond their latency."""
    return math.fsum(
        machine.collective(kind_of(node), collective_bytes(node), ranks_of(node))
        - machine.collective(kind_of(node), 0, ranks_of(node))
        for node in nodes
    )


def _nbytes(bucket: Sequence[_BucketItem]) -> int:
    return sum(item.nbytes for item in bucket)


def _bytes_of_two_blocks(items: Sequence[_BucketItem]) -> int:
    """Return the most bytes of two consecutive blocks."""
    sizes: Counter[str] = Counter()
    names = [parameters_of(item.nodes[0])[0] for item in items]
    last = last_block(names)
    for name, item in zip(names, items, strict=True):
        sizes[block_of(name, last)] += item.nbytes
    pairs = itertools.pairwise([*sizes.values(), 0])
    return max((before + after for before, after in pairs), default=0)
