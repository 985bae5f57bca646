"""Keep the collectives that Inductor fuses with products in one segment with them.

    before   g = all_gather(x); h = all_gather(shard); w = wait(g); y = mm(w, a)
    after    h = all_gather(shard); g = all_gather(x); w = wait(g); y = mm(w, a)

Inductor compiles what lies between the collectives that it does not fuse (segments.py), so none of
these may stand between a fused one (`mark_fused_collectives`) and its products. This is the last
pass: the order of parameters' collectives among themselves does not change.
"""

from collections.abc import Collection

from torch.fx import Graph, Node

from titan_lite.compile.graph import move_before
from titan_lite.compile.segments import is_outside
from titan_lite.compile.settings import PassSettings
from titan_lite.graph import aten, descendants, is_all_gather, wait_of


def keep_with_products(graph: Graph, settings: PassSettings) -> int:
    """Move other collectives and waits out of the way of fused ones. Return how many moved."""
    moved = 0
    for fused in [node for node in graph.nodes if "fused_with" in node.meta]:
        wait = wait_of(fused)
        products: tuple[Node, ...] = fused.meta["fused_with"]
        together = {fused, wait, *products}
        if not is_all_gather(fused):
            move_before(fused.next, [wait])
            together.update(_copy_view(product) for product in products)
        moved += _clear(graph, together)
    graph.lint()
    return moved


def _copy_view(product: Node) -> Node:
    """Give a product a view of its own: Inductor fuses one that is viewed on both sides.

    Return the view, or the product if its input is none.
    """
    source = product.all_input_nodes[0]
    if source.target not in (aten.view.default, aten.reshape.default):
        return product
    with product.graph.inserting_before(product):
        view = product.graph.node_copy(source)
    product.replace_input_with(source, view)
    return view


def _clear(graph: Graph, together: Collection[Node]) -> int:
    """Move other collectives from between the nodes `together`, to before or after all of them."""
    first, last = min(together), max(together)
    dependent = descendants(*together)
    moved = 0
    for node in [node for node in graph.nodes if first < node < last]:
        if not is_outside(node):
            continue
        if node in dependent:
            last.append(node)
            last = node
        else:
            move_before(first, _needed(node, first))
        moved += 1
    return moved


def _needed(node: Node, first: Node) -> list[Node]:
    """Return a node and what it needs of the nodes behind `first`."""
    needed = {node}
    open_nodes = [node]
    while open_nodes:
        for source in open_nodes.pop().all_input_nodes:
            if first < source and source not in needed and source.op != "placeholder":
                needed.add(source)
                open_nodes.append(source)
    return sorted(needed)
