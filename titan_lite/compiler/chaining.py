"""Gather a chunk of tokens as soon as it is reduced, while others are still computed: chunks of two products in one chain.

    before   z = cat(wait(r0), wait(r1)); y = norm(x + z); a0 = all_gather(y[0]); a1 = all_gather(y[1])
    after    a0 = all_gather(norm(x[0] + wait(r0))); a1 = all_gather(norm(x[1] + wait(r1)))

chunking.py cuts the reduce-scatter behind a product and the all-gather before the next one. What is between them, a residual sum
and a norm, treats each token by itself, so it is computed chunk by chunk. The order is then that of a pipeline, for four chunks:

    product 0, reduce 0, product 1, reduce 1, gather 0, product 2, reduce 2, gather 1, product 3, reduce 3,
    next product 0, gather 2, gather 3, next product 1, ...

The first of the next products runs while the last reductions travel, and waits for none of them. Where a product takes at least
as long as two chunks travel, reduction 2 is done by the end of product 3, and gather 2 starts before the next product 0.

With two chunks, gather 0 starts before the next product 0 as well. Domino (arXiv 2409.15241) splits rows for the same purpose.
Numbers do not change, but for the rounding of compiled kernels.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from titan_lite.compiler.bucketing import add_call
from titan_lite.compiler.collectives import aten, descendants, move_before, wait_of


class Reduced(NamedTuple):
    """Tokens, (B, t, C), that are reduced in chunks along dimension 1. whole: the chunks joined."""

    starts: Sequence[Node]  # collectives
    whole: Node
    long: bool  # the product of a chunk takes at least as long as two chunks travel


class Gathered(NamedTuple):
    """Tokens that are gathered in chunks along dimension 1. tokens: the whole, (B, t, C)."""

    tokens: Node
    own: Sequence[Node]  # a rank's own chunks
    starts: Sequence[Node]  # collectives
    products: Sequence[Node]


def chain_chunks(graph: Graph, reduced: Sequence[Reduced], gathered: Sequence[Gathered]) -> int:
    """Chain gathers with the reductions before them, in place, if only work on single tokens is between. Return their number.

    All have the same number of chunks. A reduction is chained with one gather.
    """
    left, number = list(reduced), 0
    for gather in gathered:
        before = max(
            (each for each in reduced if each.whole < gather.tokens),
            key=lambda each: each.whole,
            default=None,
        )
        if before in left and _chain(graph, before, gather):
            left.remove(before)
            number += 1
    return number


def _chain(graph: Graph, before: Reduced, gather: Gathered) -> bool:
    late = descendants(before.whole)
    between = _between(before.whole, gather.tokens, late)
    if between is None or any(
        source in late for product in gather.products for source in product.all_input_nodes[1:]
    ):
        return False
    chunks = len(gather.starts)
    early = (
        chunks - 1 if before.long or chunks == 2 else chunks - 2
    )  # chunks that are gathered before the next products
    # Each chunk is gathered behind one of these: the others behind the first of these products, one after another.
    behind = [*before.starts[1 : 1 + early], gather.products[0], gather.starts[-2]][:chunks]
    size = gather.tokens.meta["val"].shape[1] // chunks
    for number, (own, start, place) in enumerate(
        zip(gather.own, gather.starts, behind, strict=True)
    ):
        wait = wait_of(before.starts[number])
        place.append(wait)
        with graph.inserting_before(wait.next):
            made = _copy_of_chunk(graph, between, {before.whole: wait}, number * size, size)
        if made.meta["val"].is_contiguous():
            own.replace_all_uses_with(made)
        else:
            own.args = (made,)
            made.append(own)
            made = own
        made.append(start)
        move_before(wait, _ancestors_behind(start, wait))  # such as the weight of a norm
    last = gather.products[-1]
    for node in sorted((node for node in descendants(before.whole) if node < last), reverse=True):
        last.append(node)  # what the whole is for; no chunk depends on it any more
    return True


def _between(whole: Node, tokens: Node, late: set[Node]) -> list[Node] | None:
    """Return the nodes by which `tokens` depend on `whole`, in order, or None if one does not treat each token by itself.

    late: all nodes that depend on `whole`.
    """
    found, open_nodes = set[Node](), [tokens]
    while open_nodes:
        node = open_nodes.pop()
        if node is whole or node in found:
            continue
        if node not in late or not _is_tokenwise(node, late, _shape_of(tokens)[:2]):
            return None
        found.add(node)
        open_nodes += [source for source in node.all_input_nodes if source in late]
    return sorted(found)


def _is_tokenwise(node: Node, late: set[Node], tokens: torch.Size) -> bool:
    """Return whether a node computes each of its tokens, (B, t, C), from the same token of its inputs."""
    target = node.target
    if (
        not isinstance(target, torch._ops.OpOverload)
        or target._schema.is_mutable
        or not _has(node, tokens)
    ):
        return False
    if target in (aten.mean.dim, aten.sum.dim_IntList):
        return node.args[1] in ([2], [-1]) and node.args[2:3] == (True,)
    if (
        torch.Tag.pointwise not in target.tags
        and target is not torch.ops.prims.convert_element_type.default
    ):
        return False
    named = any(isinstance(each, Node) for each in node.kwargs.values())
    return not named and all(
        _has(each, tokens) or (each not in late and _is_broadcast(each))
        for each in node.all_input_nodes
    )


def _shape_of(node: Node) -> torch.Size:
    value = node.meta.get("val")
    return value.shape if isinstance(value, Tensor) else torch.Size()


def _has(node: Node, tokens: torch.Size) -> bool:
    return len(_shape_of(node)) == 3 and _shape_of(node)[:2] == tokens


def _is_broadcast(node: Node) -> bool:
    """Return whether a factor is the same for all tokens, as the weight of a norm is."""
    shape = _shape_of(node)
    return len(shape) < 2 or shape[:-1].numel() == 1


def _copy_of_chunk(
    graph: Graph, nodes: Sequence[Node], known: Mapping[Node, Node], start: int, size: int
) -> Node:
    """Add a copy of `nodes` for some tokens, and return the last one. known: chunks of nodes that have them."""
    found, tokens = dict(known), _shape_of(nodes[-1])[:2]

    def chunk_of(node: Node) -> Node:
        if node not in found:
            found[node] = (
                add_call(graph, aten.slice.Tensor, node, 1, start, start + size)
                if _has(node, tokens)
                else node
            )
        return found[node]

    for node in nodes:
        arguments = cast(Sequence[Any], map_arg(node.args, chunk_of))
        found[node] = add_call(graph, node.target, *arguments, **cast(dict[str, Any], node.kwargs))
    return found[nodes[-1]]


def _ancestors_behind(node: Node, first: Node) -> set[Node]:
    """Return the ancestors of `node` that lie behind it. Those of nodes before `first` are not followed."""
    found, open_nodes = set[Node](), [node]
    while open_nodes:
        late = [
            source
            for source in open_nodes.pop().all_input_nodes
            if source > first and source not in found
        ]
        found.update(late)
        open_nodes += late
    return {each for each in found if each > node}
