"""Cut collectives of tensor parallelism and their matrix products into chunks of tokens: one
travels while another is computed.

    before   y = wait(all_gather(x)) @ w
    after    a0 = all_gather(x[0]); a1 = all_gather(x[1]); y = cat(wait(a0) @ w, wait(a1) @ w)

    before   z = wait(reduce_scatter(x @ w))
    after    r0 = reduce_scatter(x[0] @ w); r1 = reduce_scatter(x[1] @ w); z = cat(wait(r0), wait(r1))

Plain collectives, as in arXiv 2302.05442 (section 2.2) and unlike asynchronous tensor parallelism,
which needs symmetric memory: Inductor does that, and `mark_fused` finds what it will fuse. Of the
products that read gathered tokens, only the first is cut; it hides all chunks but the first. A
product of fewer rows may round differently.
"""

import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch._inductor.inductor_prims import force_stride_order
from torch.fx import Graph, Node

from titan_lite.compile.passes.bucketing import add_call
from titan_lite.cost.collectives import (
    activation_collectives,
    aten,
    collectives,
    descendants,
    group_size,
    is_all_gather,
    kind_of,
    wait_of,
)
from titan_lite.cost.machine import Machine
from titan_lite.cost.op_cost import node_seconds
from titan_lite.cost.timeline import costs_of

FLOAT8_ROWS = 16  # of which the rows of a float8 product are a multiple
PRODUCTS = (aten.mm.default, aten._scaled_mm.default)
VIEWS = (
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.view.dtype,
    aten.alias.default,
)


class _Site(NamedTuple):
    """A collective of tokens and its product.

    whole: the tokens of all ranks, (B, T, C), gathered or to be reduced.
    """

    collective: Node
    whole: Node
    product: Node


def choose_collectives(
    graph: Graph, chunks: int, machine: Machine | None = None, *, fused: bool = True
) -> list[int]:
    """Return the numbers, among collectives of activations, of those to cut: directly before or
    behind a product.

    With a machine, only those that are then faster, as estimated. A collective that is hidden
    already gains nothing. All ranks must use those of one.
    """
    costs = costs_of(graph, machine, fused) if machine else {}
    chosen = []
    for number, node in enumerate(activation_collectives(graph)):
        site = _site_of(node)
        if (
            site is None
            or not _divides(site.product, chunks)
            or site.whole.meta["val"].shape[1] % (chunks * group_size(node))
        ):
            continue
        if machine is not None:
            known, made = set(graph.nodes), _add_chunks(graph, site, chunks)
            before, after = made.seconds(machine, fused, costs[node])
            _erase(graph, *(new for new in reversed(graph.nodes) if new not in known))
            if after >= before:
                continue
        chosen.append(number)
    return chosen


def cut_into_chunks(graph: Graph, chunks: int, chosen: Sequence[int]) -> int:
    """Cut the chosen collectives and their products, in place. Return how many were cut."""
    found = activation_collectives(graph)
    number_cut = 0
    for number in chosen:
        site = _site_of(found[number])
        if site is None:  # its product has been cut for another collective
            continue
        _replace(graph, site, _add_chunks(graph, site, chunks))
        number_cut += 1
    graph.eliminate_dead_code()
    graph.lint()
    return number_cut


def mark_fused(graph: Graph) -> int:
    """Mark the collectives of activations that Inductor fuses with products (asynchronous tensor
    parallelism, arXiv 2410.06511, section 3.4), so that `Machine.cost` prices them so. Return their
    number.

    Each product of gathered tokens is fused, unless its other factor depends on them. Products of
    which a sum is reduced are not.
    """
    marked = 0
    for node in activation_collectives(graph):
        if (site := _site_of(node)) is None:
            continue
        products = [site.product]
        if is_all_gather(node):
            late = descendants(site.whole)
            products = [each for each in _products_of(site.whole) if each.args[1] not in late]
        if not products:
            continue
        node.meta["fused_with"] = tuple(products)
        for product in products:
            product.meta["parts"] = group_size(node)
        marked += 1
    return marked


def _site_of(node: Node) -> _Site | None:
    return (
        _gathered(node)
        if is_all_gather(node)
        else _reduced(node)
        if kind_of(node) == "reduce_scatter"
        else None
    )


def _gathered(node: Node) -> _Site | None:
    """Return the first product of the tokens that `node` gathers, if they are split by rank and
    joined along the sequence.
    """
    split, *others = wait_of(node).users
    if others or len(node.users) > 1 or split.target is not aten.split.Tensor:
        return None
    joined = {user for part in split.users for user in part.users}
    whole = joined.pop()
    if (
        joined
        or whole.target is not aten.cat.default
        or whole.args[1:] != (1,)
        or not _is_in_order(whole, split)
    ):
        return None
    products = sorted(_products_of(whole))
    return _Site(node, whole, products[0]) if products else None


def _products_of(tokens: Node) -> Iterator[Node]:
    """Yield the products with `tokens`, as rows, on the left."""
    for user in tokens.users:
        if user.target in PRODUCTS and user.args[0] is tokens:
            yield user
        elif user.target in VIEWS and user.meta["val"].shape[-1] == tokens.meta["val"].shape[-1]:
            yield from _products_of(user)


def _reduced(node: Node) -> _Site | None:
    """Return the product whose result `node` reduces, if it is split along the sequence and joined
    by rank.
    """
    joined = node.all_input_nodes[0]
    if joined.target is not aten.cat.default or joined.args[1:] not in ((), (0,)):
        return None
    split = joined.all_input_nodes[0].all_input_nodes[0]
    if (
        split.target is not aten.split.Tensor
        or split.args[2:] != (1,)
        or not _is_in_order(joined, split)
    ):
        return None
    whole = product = split.all_input_nodes[0]
    while product.target in VIEWS and len(product.users) == 1:
        product = product.all_input_nodes[0]
    if product.target not in PRODUCTS or len(product.users) > 1 or len(wait_of(node).users) == 0:
        return None
    return _Site(node, whole, product)


def _divides(product: Node, chunks: int) -> bool:
    """Return False for a float8 product that has a scale for each row, or whose chunks have rows
    that it cannot have. Its second factor is a transposed one.
    """
    if product.target is aten.mm.default:
        return True
    if cast(Node, product.args[1]).target not in (aten.permute.default, aten.t.default):
        return False
    rows, scale = (cast(Node, product.args[place]).meta["val"] for place in (0, 2))
    return scale.numel() == 1 and rows.shape[0] % (chunks * FLOAT8_ROWS) == 0


def _is_in_order(joined: Node, split: Node) -> bool:
    """Return whether `joined` has all parts of `split` in their order."""
    parts: Any = joined.args[0]
    return [(part.target, part.args) for part in parts] == [
        (operator.getitem, (split, place)) for place in range(len(parts))
    ]


class _Chunks(NamedTuple):
    """The nodes of a site in chunks, which nothing uses yet.

    whole: None if the collective comes last.
    """

    site: _Site
    starts: list[Node]  # collectives
    products: list[Node]
    copies: list[Node]  # of chunks before a collective or a product
    whole: Node | None  # replaces the tokens of all ranks
    result: Node  # replaces the product, or what is waited for

    def seconds(self, machine: Machine, fused: bool, left: float) -> tuple[float, float]:
        """Return the seconds before and after. left: those of the collective that nothing hides."""

        def cost(*nodes: Node) -> float:
            return sum(node_seconds(node, machine, fused) for node in nodes)

        node, _, product = self.site
        computed = sent = 0.0  # ends of computation and communication
        if self.whole is not None:
            computed = cost(*self.copies)
            for start, part in zip(self.starts, self.products, strict=True):
                sent += cost(start)
                computed = max(computed, sent) + cost(part)
            return left + cost(product), computed + cost(*self.result.all_input_nodes)
        for copy, part, start in zip(self.copies, self.products, self.starts, strict=True):
            computed += cost(copy, part)
            sent = max(sent, computed) + cost(start)
        return cost(product, *node.all_input_nodes) + left, sent + cost(self.result)


def _add_chunks(graph: Graph, site: _Site, chunks: int) -> _Chunks:
    """Add the nodes of a site in chunks."""
    node, whole, product = site
    gathers, ranks = is_all_gather(node), group_size(node)
    batch, tokens = whole.meta["val"].shape[:2]
    size = tokens // ranks // chunks
    left, right = cast(tuple[Node, Node], product.args[:2])
    x, dtype = (node.args[0] if gathers else left), left.meta["val"].dtype
    starts, waits, products, copies = list[Node](), list[Node](), list[Node](), list[Node]()

    def contiguous(part: Node) -> Node:
        copies.append(
            add_call(graph, aten.clone.default, part, memory_format=torch.contiguous_format)
        )
        return copies[-1]

    def multiply(rows: Node) -> None:
        flat = add_call(graph, aten.view.default, rows, [ranks * batch * size, -1])
        if rows.meta["val"].dtype != dtype:  # float8, gathered as bytes
            flat = add_call(graph, aten.view.dtype, flat, dtype)
        factor = right if base is None else add_call(graph, aten.permute.default, base, [1, 0])
        products.append(
            add_call(
                graph,
                product.target,
                flat,
                factor,
                *product.args[2:],
                **cast(dict[str, Any], product.kwargs),
            )
        )

    base = None
    if product.target is aten._scaled_mm.default:
        # Inductor would store a transposed factor that several products read by rows, which float8
        # products cannot read.
        with graph.inserting_before(product):
            base = add_call(
                graph, force_stride_order, right.all_input_nodes[0], right.meta["val"].t().stride()
            )
            base.meta["is_view"] = True
    if gathers:
        with graph.inserting_before(node):
            for chunk in range(chunks):
                own = contiguous(
                    add_call(graph, aten.slice.Tensor, x, 1, chunk * size, (chunk + 1) * size)
                )
                starts.append(add_call(graph, node.target, own, *node.args[1:]))
        with graph.inserting_before(product):
            for start in starts:
                waits.append(add_call(graph, collectives.wait_tensor.default, start))
                multiply(waits[-1])
            joined, result = (
                _join(graph, parts, (ranks, batch, size), to)
                for parts, to in ((waits, whole), (products, product))
            )
        return _Chunks(site, starts, products, copies, joined, result)
    with graph.inserting_before(product):
        by_chunk = add_call(graph, aten.reshape.default, x, [batch, ranks, chunks, size, -1])
        for chunk in range(chunks):
            rows = add_call(graph, aten.select.int, by_chunk, 2, chunk)
            multiply(contiguous(add_call(graph, aten.permute.default, rows, [1, 0, 2, 3])))
            part = add_call(graph, aten.view.default, products[-1], [ranks * batch, size, -1])
            starts.append(add_call(graph, node.target, part, *node.args[1:]))
    with graph.inserting_before(wait_of(node)):
        waits = [add_call(graph, collectives.wait_tensor.default, start) for start in starts]
        return _Chunks(
            site, starts, products, copies, None, add_call(graph, aten.cat.default, waits, 1)
        )


def _replace(graph: Graph, site: _Site, chunks: _Chunks) -> None:
    """Replace a site by its chunks."""
    node, whole, product = site
    if chunks.whole is None:
        wait, joined = wait_of(node), node.all_input_nodes[0]
        wait.replace_all_uses_with(chunks.result)
        _erase(graph, wait)
        node.replace_all_uses_with(
            chunks.result
        )  # selective checkpointing saves it from before the wait
        _erase(graph, node, joined, *_parts(joined))
        return
    for late in sorted(later for later in descendants(whole) if later < product):
        product.prepend(late)
    whole.replace_all_uses_with(chunks.whole)
    product.replace_all_uses_with(chunks.result)
    _erase(graph, product, whole, *_parts(whole), wait_of(node), node)


def _join(graph: Graph, parts: Sequence[Node], layout: tuple[int, int, int], like: Node) -> Node:
    """Join the chunks of all ranks along the sequence, in the shape of `like`.

    layout: ranks, sequences, tokens of a chunk.
    """
    ranks, batch, size = layout
    by_rank = [
        add_call(graph, aten.view.default, part, [ranks, batch, 1, size, -1]) for part in parts
    ]
    by_sequence = [add_call(graph, aten.permute.default, part, [1, 0, 2, 3, 4]) for part in by_rank]
    joined = add_call(graph, aten.cat.default, by_sequence, 2)
    return add_call(graph, aten.view.default, joined, list(like.meta["val"].shape))


def _parts(joined: Node) -> list[Node]:
    """Return the parts that a cat joins and the split that they come from."""
    parts = joined.all_input_nodes
    return [*parts, *parts[0].all_input_nodes]


def _erase(graph: Graph, *nodes: Node) -> None:
    for node in nodes:
        graph.erase_node(node)
