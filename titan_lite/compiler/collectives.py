"""Questions about an FX graph's collectives."""

import operator
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.fx import Graph, Node

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
collectives = torch.ops._c10d_functional
aten = torch.ops.aten
# What is done to shards before they are gathered, in the words of the graph: casting, padding, putting them into a bucket.
PREPARATION = frozenset(
    {
        aten._to_copy.default,
        torch.ops.prims.convert_element_type.default,
        aten.cat.default,
        aten.new_zeros.default,
        aten.full.default,
        aten.constant_pad_nd.default,
        aten.view.default,
        aten.reshape.default,
        aten.alias.default,
        aten.detach.default,
    }
)
# Of several tensors in one launch; each result is waited for by itself, and the first wait is the one that holds computation up.
COALESCED = {
    collectives.all_gather_into_tensor.default: collectives.all_gather_into_tensor_coalesced.default,
    collectives.reduce_scatter_tensor.default: collectives.reduce_scatter_tensor_coalesced.default,
}
KINDS = {
    collectives.all_gather_into_tensor_coalesced.default: "all_gather",
    collectives.reduce_scatter_tensor_coalesced.default: "reduce_scatter",
    collectives.all_gather_into_tensor.default: "all_gather",
    collectives.all_gather_into_tensor_out.default: "all_gather",
    collectives.reduce_scatter_tensor.default: "reduce_scatter",
    collectives.all_reduce.default: "all_reduce",
}


def kind_of(node: Node) -> str:
    """The kind of a node whose target is one of KINDS."""
    return KINDS[node.target]  # type: ignore[index]


def is_all_gather(node: Node) -> bool:
    return node.target in KINDS and kind_of(node) == "all_gather"


def parameters_of(node: Node) -> tuple[str, ...]:
    """FQNs of the parameters that a collective is for: one as SimpleFSDP notes it, several in a bucket; none for other nodes."""
    if node.target not in KINDS:
        return ()
    if "bucket" in node.meta:
        return tuple(node.meta["bucket"])
    if "bucketing_custom_sources" in node.meta:  # Inductor's note at what it has merged
        return tuple(source["fqn"] for source in node.meta["bucketing_custom_sources"] if "fqn" in source)
    fqn = node.meta.get("custom", {}).get("fqn")
    return () if fqn is None else (fqn,)


def parameter_collectives(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if parameters_of(node)]


def collective_bytes(node: Node) -> int:
    """The size of the whole that one of KINDS gathers or reduces."""
    return nbytes_of(node) if is_all_gather(node) else sum(map(nbytes_of, node.all_input_nodes))


def tensors_of(node: Node) -> int:
    """The number of tensors that one of KINDS gathers or reduces."""
    return len(node.args[0]) if isinstance(node.args[0], list | tuple) else 1


def group_of(node: Node) -> str:
    """Name of the process group of one of KINDS."""
    return str(node.args[-1])


def ranks_of(node: Node) -> Sequence[int]:
    """The global ranks of the group of one of KINDS; its process group must exist."""
    return dist.get_process_group_ranks(_resolve_process_group(group_of(node)))  # type: ignore[arg-type]


def results_of(node: Node) -> list[Node]:
    """The results of a coalesced collective, in its inputs' order; none for others, which are their own result."""
    return [user for user in node.users if user.target is operator.getitem]


def waits_of(node: Node) -> list[Node]:
    """The waits for one of KINDS, in the graph's order."""
    results = results_of(node) or [node]
    return sorted(user for each in results for user in each.users if user.target is collectives.wait_tensor.default)


def wait_of(node: Node) -> Node:
    """The wait for one of KINDS, the first of several."""
    return waits_of(node)[0]


def merge_waits(graph: Graph) -> None:
    """Keep one wait for each collective, in place. torch 2.14 merges equal gathers of a graph, but not the waits for them."""
    for node in [node for node in graph.nodes if node.target in KINDS and not results_of(node)]:
        for again in waits_of(node)[1:]:
            again.replace_all_uses_with(wait_of(node))
            graph.erase_node(again)


def start_of(wait: Node) -> Node:
    """The collective of a wait."""
    (started,) = wait.all_input_nodes
    return started.all_input_nodes[0] if started.target is operator.getitem else started


def nbytes_of(node: Node) -> int:
    """The size of the tensor, or of all tensors, that a node gives."""
    values = node.meta.get("val")
    tensors = values if isinstance(values, list | tuple) else (values,)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if isinstance(tensor, Tensor))


def group_size(node: Node) -> int:
    """Ranks of an all-gather or a reduce-scatter."""
    size = node.args[1] if is_all_gather(node) else node.args[2]
    assert isinstance(size, int)
    return size


def parameter_all_gathers(graph: Graph) -> dict[Node, list[Node]]:
    """The all-gathers by which SimpleFSDP reads parameters, each with the nodes that prepare its shard, a graph input."""
    found = {node: preparation(node) for node in graph.nodes if is_all_gather(node)}
    return {gather: nodes for gather, nodes in found.items() if nodes is not None}


def preparation(gather: Node) -> list[Node] | None:
    """The nodes between graph inputs and `gather`; None where they compute anything, so that it gathers no parameter."""
    found: list[Node] = []
    open_nodes = list(gather.all_input_nodes)
    while open_nodes:
        node = open_nodes.pop()
        if node.op == "placeholder" or node in found:
            continue
        if node.target not in PREPARATION:
            return None
        found.append(node)
        open_nodes += node.all_input_nodes
    return found


def descendants(*starts: Node) -> set[Node]:
    """starts and all that is computed from them, but for the graph's output."""
    found, open_nodes = set(starts), list(starts)
    while open_nodes:
        for user in open_nodes.pop().users:
            if user.op != "output" and user not in found:
                found.add(user)
                open_nodes.append(user)
    return found


def move_before(place: Node, nodes: Iterable[Node], keep: Callable[[], bool] = lambda: True) -> bool:
    """Move the nodes that stand behind `place` before it, in their order, and back unless `keep` is then true; returns whether
    any has moved."""
    behind = sorted(node for node in nodes if node > place)
    following = [node.next for node in behind]
    for node in behind:
        place.prepend(node)
    if keep():
        return bool(behind)
    for node, back in zip(reversed(behind), reversed(following), strict=True):
        back.prepend(node)
    return False
