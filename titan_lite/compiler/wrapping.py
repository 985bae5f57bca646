"""Wrapping: which parameters' collectives share a bucket.

    by_block(graph)                                # one bucket a transformer block
    by_names(graph, ["layers.0 layers.1", ...])    # as a recipe says
    greedy(graph, machine, memory=limit)           # as many as hide under the computation before them

SimpleFSDP calls the first two manual wrapping and the last automatic wrapping (arXiv 2411.00284, section 4.1 and algorithm 1).
"""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Graph, Node

from titan_lite.compiler.collectives import (
    collective_bytes,
    group_of,
    is_all_gather,
    kind_of,
    parameter_collectives,
    parameters_of,
    ranks_of,
)
from titan_lite.compiler.fqns import block_of, lies_within
from titan_lite.compiler.hardware import Machine
from titan_lite.compiler.timeline import computed_before

Buckets = dict[Node, object]  # collective -> the bucket it belongs to


def by_block(graph: Graph) -> Buckets:
    """One bucket a transformer block, one for the embedding, one for last norm and output."""
    return {node: (block_of(parameters_of(node)[0]), time) for node, time in _times(graph).items()}


def by_names(graph: Graph, buckets: Sequence[str]) -> Buckets:
    """buckets: each the names of modules or parameters, with spaces between; what none names stays alone."""

    def bucket_of(fqn: str) -> object:
        return next((bucket for bucket in buckets if lies_within(fqn, bucket.split())), (fqn,))

    return {node: (bucket_of(parameters_of(node)[0]), time) for node, time in _times(graph).items()}


def name_all(plan: Buckets) -> dict[Node, str]:
    """A name of each collective, the same on ranks with other groups and sizes: kind, parameter, and the how manieth of these."""
    seen: Counter = Counter()
    result = {}
    for node in sorted(plan):
        key = f"{kind_of(node)} {parameters_of(node)[0]}"
        result[node] = f"{key} {seen[key]}"
        seen[key] += 1
    return result


def _times(graph: Graph) -> dict[Node, int]:
    """Each collective, and how many of its kind and parameter stand before it: the gradient of tied weights has two parts."""
    seen: Counter = Counter()
    result = {}
    for node in parameter_collectives(graph):
        key = node.target, group_of(node), parameters_of(node)
        result[node] = seen[key]
        seen[key] += 1
    return result


@dataclass(frozen=True)
class _Item:
    """A parameter's collectives of one direction (a reduce-scatter may have an all-reduce behind it); gap: seconds of computation
    that the weight is read for, or that makes the gradient; busy: seconds that other collectives take of these."""

    nodes: tuple[Node, ...]
    gap: float
    busy: float = 0.0


def greedy(graph: Graph, machine: Machine, *, memory: int | None = None, fused: bool = True) -> Buckets:
    """Buckets grow in the order in which weights are read, while they hide under the computation of the bucket before.

    The rule: the next parameter joins while gathering the bucket takes no longer than what the previous bucket computes, less
    what is reduced meanwhile, and both together have no more than `memory` bytes (by default, as much as buckets by block ever
    have). Gradients are grouped by the same rule, from the last one backwards: a bucket is reduced under the computation of the
    one after it. Beyond the paper: a parameter also joins where the latency that this saves is more than could hide alone.
    """
    nodes = parameter_collectives(graph)
    gathers = [node for node in nodes if is_all_gather(node)]
    reductions = [node for node in nodes if not is_all_gather(node)]
    chains: list[list[Node]] = []  # a reduction, and those that its result goes through
    for node in reductions:
        before = next((chain for chain in reversed(chains) if _is_of(node, chain[-1])), None)
        if before is None:
            chains.append([node])
        else:
            before.append(node)
    names = [parameters_of(chain[0])[0] for chain in chains]
    by_fqn = dict(zip(names, chains, strict=True))
    computed = computed_before(graph, machine, fused)
    end = computed[next(iter(reversed(graph.nodes)))]

    starts = [computed[node] for node in gathers]
    reading = [after - before for before, after in itertools.pairwise([*starts, end])]
    gather_items = [
        _Item((node,), gap, _moving(machine, by_fqn.get(parameters_of(node)[0], [])))
        for node, gap in zip(gathers, reading, strict=True)
    ]
    ready = [computed[chain[0]] for chain in chains]
    making = [after - before for before, after in itertools.pairwise([0.0, *ready])]
    gather_of = {parameters_of(node)[0]: node for node in gathers}
    following = [*names, ""][1:] if names else []
    reduce_items = [
        _Item(tuple(chain), gap, _moving(machine, [gather_of[fqn]] if fqn in gather_of else []))
        for chain, gap, fqn in zip(chains, making, following, strict=True)
    ]
    plan: Buckets = {}
    for name, items in (("gather", gather_items), ("reduce", reduce_items[::-1])):
        limit = _bytes_of_two_blocks(items) if memory is None else memory
        for number, bucket in enumerate(_grow(items, machine, limit)):
            plan |= {node: (name, number) for item in bucket for node in item.nodes}
    return plan


def _is_of(node: Node, earlier: Node) -> bool:
    """Whether a reduction's input is the result of the earlier one, and of nothing else."""
    source = node
    while len(source.all_input_nodes) == 1:
        source = source.all_input_nodes[0]
        if source is earlier:
            return True
    return False


def _grow(items: Sequence[_Item], machine: Machine, memory: int) -> list[list[_Item]]:
    buckets: list[list[_Item]] = []
    for item, following in itertools.zip_longest(items, items[1:]):
        if not buckets:
            buckets.append([item])
            continue
        current, previous = buckets[-1], buckets[-2] if len(buckets) > 1 else []
        together, alone = _price(machine, [*current, item]), _price(machine, [item])
        hides = together <= sum(each.gap - each.busy for each in previous)
        saved = _price(machine, current) + alone - together
        worth = saved >= min(alone, sum(each.gap for each in current))
        next_one = [] if following is None else [following]  # which the bucket after this one begins with
        fits = max(_nbytes([*previous, *current, item]), _nbytes([*current, item, *next_one])) <= memory
        if (hides or worth) and fits:
            current.append(item)
        else:
            buckets.append([item])
    return buckets


def _price(machine: Machine, bucket: Sequence[_Item]) -> float:
    """Seconds of a bucket's collectives: one of each kind and group."""
    sizes: dict[tuple[str, tuple[int, ...]], int] = {}
    for item in bucket:
        for node in item.nodes:
            key = kind_of(node), tuple(ranks_of(node))
            sizes[key] = sizes.get(key, 0) + collective_bytes(node)
    return sum(machine.collective(kind, size, ranks) for (kind, ranks), size in sizes.items())


def _moving(machine: Machine, nodes: Sequence[Node]) -> float:
    """Seconds of collectives without their latencies."""
    return math.fsum(
        machine.collective(kind_of(node), collective_bytes(node), ranks_of(node))
        - machine.collective(kind_of(node), 0, ranks_of(node))
        for node in nodes
    )


def _nbytes(bucket: Sequence[_Item]) -> int:
    return sum(collective_bytes(item.nodes[0]) for item in bucket)


def _bytes_of_two_blocks(items: Sequence[_Item]) -> int:
    """The most that a block and the one after it have."""
    sizes: dict[str, int] = {}
    for item in items:
        block = block_of(parameters_of(item.nodes[0])[0])
        sizes[block] = sizes.get(block, 0) + _nbytes([item])
    blocks = list(sizes.values())
    return max((before + after for before, after in itertools.pairwise([*blocks, 0])), default=0)
