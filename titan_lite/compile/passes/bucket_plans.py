"""Choose the parameters that share a bucket.

    by_block(graph)                                # one bucket per transformer block
    by_names(graph, ["layers.0 layers.1", ...])    # the recipe's buckets
    greedy(graph, machine)                         # buckets that hide under the computation before them

SimpleFSDP calls the first two manual wrapping and the last automatic wrapping (arXiv 2411.00284,
section 4.1 and algorithm 1).
"""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch.fx import Graph, Node

from titan_lite.cost.collectives import (
    collective_bytes,
    group_of,
    is_all_gather,
    kind_of,
    parameter_collectives,
    parameters_of,
    ranks_of,
)
from titan_lite.cost.machine import Machine
from titan_lite.cost.timeline import computed_before
from titan_lite.models.fqns import block_of, last_block, lies_within

Buckets = dict[Node, object]  # collective -> its bucket


def by_block(graph: Graph) -> Buckets:
    """Return one bucket per block, with the last norm in the last block; embedding and output have
    buckets of their own.
    """
    last = last_block(fqn for node in parameter_collectives(graph) for fqn in parameters_of(node))
    return _by(graph, lambda fqn: block_of(fqn, last))


def by_names(graph: Graph, buckets: Sequence[str]) -> Buckets:
    """Return the given buckets, each a string of module or parameter names.

    A parameter that none names stays alone.
    """
    return _by(
        graph,
        lambda fqn: next(
            (bucket for bucket in buckets if lies_within(fqn, bucket.split())), (fqn,)
        ),
    )


def _by(graph: Graph, bucket_of: Callable[[str], object]) -> Buckets:
    """Return the buckets that `bucket_of` gives by FQN.

    Tied weights have two gradients, reduced in separate buckets.
    """
    numbers: dict[tuple, Iterator[int]] = defaultdict(itertools.count)
    keys = {
        node: (node.target, group_of(node), parameters_of(node))
        for node in parameter_collectives(graph)
    }
    return {
        node: (bucket_of(parameters_of(node)[0]), next(numbers[key])) for node, key in keys.items()
    }


def name_all(plan: Buckets) -> dict[Node, str]:
    """Return a name per collective, the same on ranks with other groups and sizes: kind, parameter
    and number.
    """
    numbers: dict[str, Iterator[int]] = defaultdict(itertools.count)
    kinds = {node: f"{kind_of(node)} {parameters_of(node)[0]}" for node in sorted(plan)}
    return {node: f"{kind} {next(numbers[kind])}" for node, kind in kinds.items()}


@dataclass(frozen=True)
class _Item:
    """A parameter's collectives of one direction.

    A reduce-scatter may be followed by an all-reduce.
    """

    nodes: tuple[Node, ...]
    gap: float  # seconds of computation that reads the weight or makes the gradient
    busy: float = 0.0  # seconds of other collectives in the gap


def greedy(graph: Graph, machine: Machine, *, fused: bool = True) -> Buckets:
    """Return buckets that grow in the order of reads, while they hide under the computation of the
    previous bucket.

    The next parameter joins if the bucket is then gathered within the computation of the previous
    bucket, less the reductions in it, and if both buckets have no more bytes than two consecutive
    blocks. Gradients follow the same rule from last to first: a bucket is reduced during the
    computation of the one after it. Two rules are not in the paper: a parameter also joins if this
    saves more latency than could hide alone, and one larger than the rest of its bucket leaves if
    copying it takes longer than the latency saved.
    """
    nodes = parameter_collectives(graph)
    gathers = [node for node in nodes if is_all_gather(node)]
    chains: list[list[Node]] = []  # a reduction, and the reductions of its result
    for node in nodes:
        if not is_all_gather(node):
            chain = next((chain for chain in reversed(chains) if _reads_only(node, chain[-1])), [])
            if not chain:
                chains.append(chain)
            chain.append(node)
    names = [parameters_of(chain[0])[0] for chain in chains]
    computed = computed_before(graph, machine, fused)

    places = [*(computed[node] for node in gathers), computed[next(iter(reversed(graph.nodes)))]]
    reductions_of = dict(zip(names, chains, strict=True))
    gather_items = [
        _Item(
            (node,),
            after - before,
            _transfer_time(machine, reductions_of.get(parameters_of(node)[0], [])),
        )
        for node, (before, after) in zip(gathers, itertools.pairwise(places), strict=True)
    ]
    places = [0.0, *(computed[chain[0]] for chain in chains)]
    gather_of = {parameters_of(node)[0]: [node] for node in gathers}
    reduce_items = [
        _Item(tuple(chain), after - before, _transfer_time(machine, gather_of.get(following, [])))
        for chain, (before, after), following in zip(
            chains, itertools.pairwise(places), [*names[1:], ""], strict=False
        )
    ]
    plan: Buckets = {}
    for name, items in (("gather", gather_items), ("reduce", reduce_items[::-1])):
        grown = _grow(items, machine)
        buckets = [part for bucket in grown for part in _split_large(bucket, machine)]
        for number, bucket in enumerate(buckets):
            plan |= {node: (name, number) for item in bucket for node in item.nodes}
    return plan


def _reads_only(node: Node, earlier: Node) -> bool:
    """Return whether a reduction reads the result of the earlier one, and nothing else."""
    while node is not earlier and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node is earlier


def _grow(items: Sequence[_Item], machine: Machine) -> list[list[_Item]]:
    buckets: list[list[_Item]] = []
    most = _bytes_of_two_blocks(items)
    for item, following in itertools.zip_longest(items, items[1:]):
        if not buckets:
            buckets.append([item])
            continue
        current, previous = buckets[-1], buckets[-2] if len(buckets) > 1 else []
        together, alone = _price(machine, [*current, item]), _price(machine, [item])
        hides = together <= sum(each.gap - each.busy for each in previous)
        saved = _price(machine, current) + alone - together
        worth = saved >= min(alone, sum(each.gap for each in current))
        next_one = [] if following is None else [following]  # starts the next bucket
        fits = (
            max(_nbytes([*previous, *current, item]), _nbytes([*current, item, *next_one])) <= most
        )
        if (hides or worth) and fits:
            current.append(item)
        else:
            buckets.append([item])
    return buckets


def _split_large(bucket: list[_Item], machine: Machine) -> list[list[_Item]]:
    """Split off a weight larger than the rest of its bucket, if copying it out takes longer than
    the latency saved.
    """
    large = [item for item in bucket if 2 * _nbytes([item]) > _nbytes(bucket)]  # at most one
    others = [item for item in bucket if item not in large]
    if not large or not others:
        return [bucket]
    saved = _price(machine, large) + _price(machine, others) - _price(machine, bucket)
    return [bucket] if machine.memory_traffic(2 * _nbytes(large)) <= saved else [others, large]


def _price(machine: Machine, bucket: Sequence[_Item]) -> float:
    """Return the seconds of a bucket's collectives, one per kind and group."""
    sizes: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for node in (node for item in bucket for node in item.nodes):
        sizes[kind_of(node), tuple(ranks_of(node))] += collective_bytes(node)
    return sum(machine.collective(kind, nbytes, ranks) for (kind, ranks), nbytes in sizes.items())


def _transfer_time(machine: Machine, nodes: Sequence[Node]) -> float:
    """Return the seconds that these collectives take beyond their latency."""
    return math.fsum(
        machine.collective(kind_of(node), collective_bytes(node), ranks_of(node))
        - machine.collective(kind_of(node), 0, ranks_of(node))
        for node in nodes
    )


def _nbytes(bucket: Sequence[_Item]) -> int:
    return sum(collective_bytes(item.nodes[0]) for item in bucket)


def _bytes_of_two_blocks(items: Sequence[_Item]) -> int:
    """Return the most bytes of two consecutive blocks."""
    sizes: Counter[str] = Counter()
    names = [parameters_of(item.nodes[0])[0] for item in items]
    last = last_block(names)
    for name, item in zip(names, items, strict=True):
        sizes[block_of(name, last)] += _nbytes([item])
    return max(
        (before + after for before, after in itertools.pairwise([*sizes.values(), 0])), default=0
    )
