"""Cut collectives of tensor parallelism and their matmuls into chunks of tokens.

    before   y = wait(all_gather(x)) @ w
    after    a0 = all_gather(x[0]); a1 = all_gather(x[1]); y = cat(wait(a0) @ w, wait(a1) @ w)

    before   z = wait(reduce_scatter(x @ w))
    after    r0 = reduce_scatter(x[0] @ w); r1 = reduce_scatter(x[1] @ w)
             z = cat(wait(r0), wait(r1))

One chunk travels while another is computed. Plain collectives, as in arXiv 2302.05442 (section 2.2)
and unlike asynchronous tensor parallelism (fused_matmuls.py), which needs symmetric memory. Of the
matmuls that read gathered tokens, only the first is cut; it hides all chunks but the first. A
matmul of fewer rows may round differently.
"""

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch._inductor.inductor_prims import force_stride_order
from torch.fx import Graph, Node

from titan_lite.collectives import collectives
from titan_lite.compile.graph import add_call
from titan_lite.compile.rank_agreement import first_ranks_choice
from titan_lite.compile.settings import PassSettings
from titan_lite.cost.machine import Machine
from titan_lite.cost.op_cost import node_seconds
from titan_lite.cost.timeline import costs_of
from titan_lite.features.async_tp.keys import TokenChunksKeys
from titan_lite.graph import (
    activation_collectives,
    aten,
    descendants,
    group_size,
    is_all_gather,
    kind_of,
    wait_of,
)

FLOAT8_ROWS = 16  # of which the rows of a float8 matmul are a multiple
MATMULS = (aten.mm.default, aten._scaled_mm.default)
VIEWS = (
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.view.dtype,
    aten.alias.default,
)


def cut_token_chunks(graph: Graph, settings: PassSettings) -> int:
    """Cut collectives and matmuls, in place. Return the number of collectives cut.

    The first rank chooses, since the costs of tensor-parallel ranks may differ.
    """
    if not activation_collectives(graph):
        return 0
    chunks = cast("TokenChunksKeys", settings.config).tensor_parallel_chunks
    own = choose_collectives(graph, chunks, settings.machine, fused=settings.fused)
    return cut_into_chunks(graph, chunks, first_ranks_choice(own, settings.ranks))


def choose_collectives(
    graph: Graph, chunks: int, machine: Machine | None = None, *, fused: bool = True
) -> list[int]:
    """Return the collectives to cut, by their numbers among those of activations.

    They stand directly before or behind a matmul. With a machine, only those that are then faster,
    as estimated. A collective that is hidden already gains nothing. All ranks must use those of
    one.
    """
    costs = costs_of(graph, machine, fused) if machine else {}
    chosen = []
    for number, node in enumerate(activation_collectives(graph)):
        site = site_of(node)
        if site is None or not _divides(site, chunks):
            continue
        if machine is None or _is_faster(graph, site, chunks, machine, fused, costs[node]):
            chosen.append(number)
    return chosen


def cut_into_chunks(graph: Graph, chunks: int, chosen: Sequence[int]) -> int:
    """Cut the chosen collectives and their matmuls, in place. Return how many were cut."""
    activations = activation_collectives(graph)
    cut = 0
    for number in chosen:
        site = site_of(activations[number])
        if site is None:  # its matmul has been cut for another collective
            continue
        _replace(graph, site, _add_chunks(graph, site, chunks))
        cut += 1
    graph.eliminate_dead_code()
    graph.lint()
    return cut


# Find a collective and its matmul


class Site(NamedTuple):
    """A collective of tokens and its matmul."""

    collective: Node
    all_tokens: Node  # the tokens of all ranks, (B, T, C), gathered or to be reduced
    matmul: Node


def site_of(node: Node) -> Site | None:
    if is_all_gather(node):
        return _gathered(node)
    if kind_of(node) == "reduce_scatter":
        return _reduced(node)
    return None


def _gathered(node: Node) -> Site | None:
    """Return the first matmul of the tokens that `node` gathers.

    None if they are not split by rank and joined along the sequence.
    """
    split, *others = wait_of(node).users
    if others or len(node.users) > 1 or split.target is not aten.split.Tensor:
        return None
    users = {user for part in split.users for user in part.users}
    if len(users) != 1:
        return None
    all_tokens = users.pop()
    if all_tokens.target is not aten.cat.default or all_tokens.args[1:] != (1,):
        return None
    if not _is_in_order(all_tokens, split):
        return None
    matmuls = sorted(matmuls_of(all_tokens))
    return Site(node, all_tokens, matmuls[0]) if matmuls else None


def matmuls_of(tokens: Node) -> Iterator[Node]:
    """Yield the matmuls with `tokens`, as rows, on the left."""
    for user in tokens.users:
        if user.target in MATMULS and user.args[0] is tokens:
            yield user
        elif user.target in VIEWS and user.meta["val"].shape[-1] == tokens.meta["val"].shape[-1]:
            yield from matmuls_of(user)


def _reduced(node: Node) -> Site | None:
    """Return the matmul whose result `node` reduces.

    None if it is not split along the sequence and joined by rank.
    """
    joined = node.all_input_nodes[0]
    if joined.target is not aten.cat.default or joined.args[1:] not in ((), (0,)):
        return None
    split = joined.all_input_nodes[0].all_input_nodes[0]
    if split.target is not aten.split.Tensor or split.args[2:] != (1,):
        return None
    if not _is_in_order(joined, split):
        return None
    all_tokens = split.all_input_nodes[0]
    matmul = all_tokens
    while matmul.target in VIEWS and len(matmul.users) == 1:
        matmul = matmul.all_input_nodes[0]
    if matmul.target not in MATMULS or len(matmul.users) > 1 or len(wait_of(node).users) == 0:
        return None
    return Site(node, all_tokens, matmul)


def _is_in_order(joined: Node, split: Node) -> bool:
    """Return True if `joined` has all parts of `split` in their order."""
    parts: Any = joined.args[0]
    return [(part.target, part.args) for part in parts] == [
        (operator.getitem, (split, index)) for index in range(len(parts))
    ]


def _divides(site: Site, chunks: int) -> bool:
    """Return True if the tokens can be cut into equal chunks that the matmul can have as rows.

    A float8 matmul cannot be cut if it has a scale for each row. Its second factor is a transposed
    one.
    """
    if site.all_tokens.meta["val"].shape[1] % (chunks * group_size(site.collective)):
        return False
    if site.matmul.target is aten.mm.default:
        return True
    left, right, scale = (cast(Node, argument) for argument in site.matmul.args[:3])
    if right.target not in (aten.permute.default, aten.t.default):
        return False
    rows = left.meta["val"].shape[0]
    return scale.meta["val"].numel() == 1 and rows % (chunks * FLOAT8_ROWS) == 0


# Make the chunks


@dataclass
class _Chunks:
    """The nodes of a site in chunks, which nothing uses yet."""

    starts: list[Node]  # collectives
    matmuls: list[Node]
    copies: list[Node]  # of chunks, made contiguous before a collective or a matmul
    all_tokens: Node | None  # replaces the tokens of all ranks; None if the collective comes last
    result: Node  # replaces the matmul, or what is waited for


def _add_chunks(graph: Graph, site: Site, chunks: int) -> _Chunks:
    """Add the nodes of a site in chunks."""
    if is_all_gather(site.collective):
        return _add_gathered_chunks(graph, site, chunks)
    return _add_reduced_chunks(graph, site, chunks)


def _add_gathered_chunks(graph: Graph, site: Site, chunks: int) -> _Chunks:
    """Add gathers of chunks, where the gather is, and matmuls of them, where the matmul is."""
    node = site.collective
    shard = cast(Node, node.args[0])
    size = _chunk_tokens(site, chunks)
    factor = _reusable_factor(graph, site.matmul)
    copies = []
    starts = []
    with graph.inserting_before(node):
        for chunk in range(chunks):
            tokens = add_call(graph, aten.slice.Tensor, shard, 1, chunk * size, (chunk + 1) * size)
            copies.append(_contiguous(graph, tokens))
            starts.append(add_call(graph, node.target, copies[-1], *node.args[1:]))
    waits = []
    matmuls = []
    with graph.inserting_before(site.matmul):
        for start in starts:
            waits.append(add_call(graph, collectives.wait_tensor.default, start))
            matmuls.append(_multiply(graph, site, waits[-1], factor, size))
        all_tokens = _join_chunks(graph, site, waits, site.all_tokens, size)
        result = _join_chunks(graph, site, matmuls, site.matmul, size)
    return _Chunks(starts, matmuls, copies, all_tokens, result)


def _add_reduced_chunks(graph: Graph, site: Site, chunks: int) -> _Chunks:
    """Add matmuls of chunks and their reductions where the matmul is, waits where the wait is."""
    node = site.collective
    ranks = group_size(node)
    left = cast(Node, site.matmul.args[0])
    batch = site.all_tokens.meta["val"].shape[0]
    size = _chunk_tokens(site, chunks)
    factor = _reusable_factor(graph, site.matmul)
    copies = []
    matmuls = []
    starts = []
    with graph.inserting_before(site.matmul):
        by_chunk = add_call(graph, aten.reshape.default, left, [batch, ranks, chunks, size, -1])
        for chunk in range(chunks):
            rows = add_call(graph, aten.select.int, by_chunk, 2, chunk)
            by_rank = add_call(graph, aten.permute.default, rows, [1, 0, 2, 3])
            copies.append(_contiguous(graph, by_rank))
            matmuls.append(_multiply(graph, site, copies[-1], factor, size))
            part = add_call(graph, aten.view.default, matmuls[-1], [ranks * batch, size, -1])
            starts.append(add_call(graph, node.target, part, *node.args[1:]))
    with graph.inserting_before(wait_of(node)):
        waits = [add_call(graph, collectives.wait_tensor.default, start) for start in starts]
        result = add_call(graph, aten.cat.default, waits, 1)
    return _Chunks(starts, matmuls, copies, None, result)


def _chunk_tokens(site: Site, chunks: int) -> int:
    """Return the tokens of a chunk on one rank."""
    return site.all_tokens.meta["val"].shape[1] // group_size(site.collective) // chunks


def _contiguous(graph: Graph, part: Node) -> Node:
    return add_call(graph, aten.clone.default, part, memory_format=torch.contiguous_format)


def _reusable_factor(graph: Graph, matmul: Node) -> Node | None:
    """Return the untransposed second factor of a float8 matmul, None for other matmuls.

    Inductor would store a transposed factor that several matmuls read by rows, which float8
    matmuls cannot read. So each matmul of a chunk transposes this one for itself.
    """
    if matmul.target is not aten._scaled_mm.default:
        return None
    right = cast(Node, matmul.args[1])
    strides = right.meta["val"].t().stride()
    with graph.inserting_before(matmul):
        factor = add_call(graph, force_stride_order, right.all_input_nodes[0], strides)
    factor.meta["is_view"] = True
    return factor


def _multiply(graph: Graph, site: Site, rows: Node, factor: Node | None, size: int) -> Node:
    """Add the matmul of a chunk, of `size` tokens of each sequence on each rank."""
    matmul = site.matmul
    left, right = cast(tuple[Node, Node], matmul.args[:2])
    batch = site.all_tokens.meta["val"].shape[0]
    flat = add_call(
        graph, aten.view.default, rows, [group_size(site.collective) * batch * size, -1]
    )
    dtype = left.meta["val"].dtype
    if rows.meta["val"].dtype != dtype:  # float8, gathered as bytes
        flat = add_call(graph, aten.view.dtype, flat, dtype)
    if factor is not None:
        right = add_call(graph, aten.permute.default, factor, [1, 0])
    return add_call(graph, matmul.target, flat, right, *matmul.args[2:], **matmul.kwargs)


def _join_chunks(graph: Graph, site: Site, parts: Sequence[Node], like: Node, size: int) -> Node:
    """Join the chunks of all ranks along the sequence, in the shape of `like`.

    size: tokens of a chunk on one rank.
    """
    ranks = group_size(site.collective)
    batch = site.all_tokens.meta["val"].shape[0]
    by_rank = [
        add_call(graph, aten.view.default, part, [ranks, batch, 1, size, -1]) for part in parts
    ]
    by_sequence = [add_call(graph, aten.permute.default, part, [1, 0, 2, 3, 4]) for part in by_rank]
    joined = add_call(graph, aten.cat.default, by_sequence, 2)
    return add_call(graph, aten.view.default, joined, list(like.meta["val"].shape))


def _replace(graph: Graph, site: Site, chunks: _Chunks) -> None:
    """Replace a site by its chunks."""
    node, all_tokens, matmul = site
    if chunks.all_tokens is None:
        wait = wait_of(node)
        joined = node.all_input_nodes[0]
        wait.replace_all_uses_with(chunks.result)
        graph.erase_node(wait)
        # selective checkpointing saves it from before the wait
        node.replace_all_uses_with(chunks.result)
        _erase(graph, node, joined, *_split_and_parts(joined))
        return
    for late in sorted(node for node in descendants(all_tokens) if node < matmul):
        matmul.prepend(late)
    all_tokens.replace_all_uses_with(chunks.all_tokens)
    matmul.replace_all_uses_with(chunks.result)
    _erase(graph, matmul, all_tokens, *_split_and_parts(all_tokens), wait_of(node), node)


def _split_and_parts(joined: Node) -> list[Node]:
    """Return the parts that a cat joins and the split that they come from, users first."""
    parts = joined.all_input_nodes
    return [*parts, *parts[0].all_input_nodes]


def _erase(graph: Graph, *nodes: Node) -> None:
    for node in nodes:
        graph.erase_node(node)


# Estimate whether chunks are faster


def _is_faster(
    graph: Graph, site: Site, chunks: int, machine: Machine, fused: bool, exposed: float
) -> bool:
    """Return True if a site takes less time in chunks.

    exposed: seconds of the collective that nothing hides. The chunks are added to price them, and
    erased again.
    """
    known = set(graph.nodes)
    added = _add_chunks(graph, site, chunks)
    before = exposed + _seconds_of_matmul(site, machine, fused)
    after = _seconds_in_chunks(added, machine, fused)
    _erase(graph, *(node for node in reversed(graph.nodes) if node not in known))
    return after < before


def _seconds_of_matmul(site: Site, machine: Machine, fused: bool) -> float:
    """Return the seconds of the matmul, and of the copy that puts ranks first for a reduction."""
    seconds = node_seconds(site.matmul, machine, fused)
    if is_all_gather(site.collective):
        return seconds
    return seconds + sum(
        node_seconds(node, machine, fused) for node in site.collective.all_input_nodes
    )


def _seconds_in_chunks(chunks: _Chunks, machine: Machine, fused: bool) -> float:
    """Return the seconds of a site in chunks.

    Each collective queues behind the one before, and travels while another chunk is computed.
    """

    def cost(*nodes: Node) -> float:
        return sum(node_seconds(node, machine, fused) for node in nodes)

    computed = 0.0  # end of what has been computed
    sent = 0.0  # end of what has been sent
    if chunks.all_tokens is not None:
        computed = cost(*chunks.copies)
        for start, matmul in zip(chunks.starts, chunks.matmuls, strict=True):
            sent += cost(start)
            computed = max(computed, sent) + cost(matmul)
        return computed + cost(*chunks.result.all_input_nodes)
    for copy, matmul, start in zip(chunks.copies, chunks.matmuls, chunks.starts, strict=True):
        computed += cost(copy, matmul)
        sent = max(sent, computed) + cost(start)
    return sent + cost(chunks.result)
