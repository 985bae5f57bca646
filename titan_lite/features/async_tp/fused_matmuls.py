"""Let Inductor fuse collectives with their matmuls (asynchronous tensor parallelism, arXiv
2410.06511, section 3.4), and keep them in one segment.

    before   g = all_gather(x); h = all_gather(shard); w = wait(g); y = mm(w, a)
    after    h = all_gather(shard); g = all_gather(x); w = wait(g); y = mm(w, a)

Inductor compiles what lies between the collectives that it does not fuse (segments.py), so none of
these may stand between a fused one (`mark_fused_collectives`) and its matmuls.
`keep_with_matmuls` is the last pass: the order of parameters' collectives among themselves does
not change.
"""

from collections.abc import Collection

from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.distributed._symmetric_memory import enable_symm_mem_for_group
from torch.fx import Graph, Node

from titan_lite.compile.graph import move_before
from titan_lite.compile.segments import is_outside
from titan_lite.compile.settings import PassSettings
from titan_lite.config import ConfigError
from titan_lite.features.async_tp.token_chunks import matmuls_of, site_of
from titan_lite.graph import (
    activation_collectives,
    aten,
    descendants,
    group_size,
    is_all_gather,
    wait_of,
)

FUSED_MATMULS = (
    "symm_mem.fused_all_gather_matmul.default",
    "symm_mem.fused_matmul_reduce_scatter.default",
)


def inductor_settings_of(group: str) -> dict[str, object]:
    """Return the settings with which Inductor fuses the collectives of a group with matmuls, in
    memory that its ranks share.
    """
    enable_symm_mem_for_group(group)  # type: ignore[arg-type]
    return {
        "_micro_pipeline_tp": True,
        "post_grad_custom_post_pass": ExpectFusedMatmuls(),
    }


def mark_fused_collectives(graph: Graph, settings: PassSettings) -> int:
    """Mark the collectives that Inductor fuses with matmuls. Return their number.

    `node_seconds` then prices them so. Each matmul of gathered tokens is fused, unless its other
    factor depends on them. Matmuls of which a sum is reduced are not.
    """
    marked = 0
    for node in activation_collectives(graph):
        site = site_of(node)
        if site is None:
            continue
        matmuls = [site.matmul]
        if is_all_gather(node):
            late = descendants(site.all_tokens)
            matmuls = [
                matmul for matmul in matmuls_of(site.all_tokens) if matmul.args[1] not in late
            ]
        if not matmuls:
            continue
        node.meta["fused_with"] = tuple(matmuls)
        for matmul in matmuls:
            matmul.meta["parts"] = group_size(node)
        marked += 1
    return marked


def keep_with_matmuls(graph: Graph, settings: PassSettings) -> int:
    """Move other collectives and waits out of the way of fused ones. Return how many moved."""
    moved = 0
    for fused in [node for node in graph.nodes if "fused_with" in node.meta]:
        wait = wait_of(fused)
        matmuls: tuple[Node, ...] = fused.meta["fused_with"]
        together = {fused, wait, *matmuls}
        if not is_all_gather(fused):
            move_before(fused.next, [wait])
            together.update(_copy_view(matmul) for matmul in matmuls)
        moved += _clear(graph, together)
    graph.lint()
    return moved


def _copy_view(matmul: Node) -> Node:
    """Give a matmul a view of its own: Inductor fuses one that is viewed on both sides.

    Return the view, or the matmul if its input is none.
    """
    source = matmul.all_input_nodes[0]
    if source.target not in (aten.view.default, aten.reshape.default):
        return matmul
    with matmul.graph.inserting_before(matmul):
        view = matmul.graph.node_copy(source)
    matmul.replace_input_with(source, view)
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


# After Inductor's passes


class ExpectFusedMatmuls(CustomGraphPass):
    """`expect_fused_matmuls` as a pass of Inductor, with a key for Inductor's cache."""

    def __call__(self, graph: Graph) -> None:
        expect_fused_matmuls(graph)

    def uuid(self) -> bytes:
        return get_hash_for_files((__file__,))


def expect_fused_matmuls(graph: Graph) -> int:
    """Return the number of matmuls that overlap with a neighbouring collective.

    Raises ConfigError if there are none, and collectives.
    """
    fused = sum(str(node.target) in FUSED_MATMULS for node in graph.nodes)
    if not fused and activation_collectives(graph):
        raise ConfigError(
            "parallelism.enable_async_tensor_parallel = true: Inductor found no collective beside a"
            " matmul to overlap it with; use false"
        )
    return fused
