"""Ask an FX graph about its collectives and operators: parameters, waits, sizes, ranks; views,
what is fused.

    for node in parameter_collectives(graph):
        print(kind_of(node), parameters_of(node), collective_bytes(node), ranks_of(node))
    storages(graph)             # the node that allocated the storage of each node

Edits of a graph are in compile/graph.py, and what a node costs in cost/; collectives are run by
titan_lite/collectives.py.
"""

import operator
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.fx import Graph, Node

from titan_lite.collectives import collectives

aten = torch.ops.aten
# Operators on shards before an all-gather: copying from host memory, casting, padding, copying into
# a bucket.
PREPARATION = frozenset(
    {
        aten._to_copy.default,
        torch.ops.prims.convert_element_type.default,
        torch.ops.prims.device_put.default,
        aten.cat.default,
        aten.new_zeros.default,
        aten.full.default,
        aten.constant_pad_nd.default,
        aten.view.default,
        aten.reshape.default,
        aten.alias.default,
        aten.detach.default,
        # the cast to float8, and as Inductor decomposes it
        aten.select.int,
        aten.mul.Tensor,
        aten.clamp.default,
        aten.clamp_min.default,
        aten.clamp_max.default,
        aten.view.dtype,
    }
)
# Operators that return no view, and yet move no bytes.
NO_VIEWS = frozenset({collectives.wait_tensor.default, aten.empty.memory_format})
FREE = NO_VIEWS | {operator.getitem, aten.reshape.default, aten._unsafe_view.default}
MATMULS = frozenset(
    {
        aten._scaled_mm.default,
        aten.mm.default,
        aten.bmm.default,
        aten.addmm.default,
        aten.baddbmm.default,
    }
)
# Operators that Inductor fuses like pointwise ones. scatter writes a constant, in the loss's
# backward.
AS_POINTWISE = frozenset(
    {
        aten._to_copy.default,
        torch.ops.prims.convert_element_type.default,
        aten.cat.default,
        aten.full.default,
        aten.scatter.value,
    }
)
# Operators that may end a fused kernel. gather computes only the elements that it selects.
REDUCTIONS = frozenset(
    {
        aten.sum.default,
        aten.sum.dim_IntList,
        aten.mean.default,
        aten.mean.dim,
        aten.amax.default,
        aten.gather.default,
    }
)
KINDS = {
    collectives.all_gather_into_tensor.default: "all_gather",
    collectives.all_gather_into_tensor_out.default: "all_gather",
    collectives.reduce_scatter_tensor.default: "reduce_scatter",
    collectives.all_reduce.default: "all_reduce",
}


# Collectives


def kind_of(node: Node) -> str:
    """Return the kind of a collective, a value of KINDS."""
    return KINDS[node.target]  # type: ignore[index]


def is_all_gather(node: Node) -> bool:
    return node.target in KINDS and kind_of(node) == "all_gather"


def parameters_of(node: Node) -> tuple[str, ...]:
    """Return the FQNs of a collective's parameters: one, several in a bucket, none for others."""
    if node.target not in KINDS:
        return ()
    if "bucket" in node.meta:
        return tuple(node.meta["bucket"])
    fqn = node.meta.get("custom", {}).get("fqn")
    return () if fqn is None else (fqn,)


def named_axis(node: Node) -> str:
    """Return the mesh axis that the model's code names for a collective; "": none."""
    return node.meta.get("custom", {}).get("axis", "")


def parameter_collectives(graph: Graph) -> list[Node]:
    """Return the collectives that gather parameters or reduce their gradients."""
    return [node for node in graph.nodes if parameters_of(node)]


def activation_collectives(graph: Graph) -> list[Node]:
    """Return the collectives of tensor, context and expert parallelism: of tokens and heads."""
    return [node for node in graph.nodes if node.target in KINDS and not parameters_of(node)]


def collective_bytes(node: Node) -> int:
    """Return a collective's unsharded bytes: the output of an all-gather, the input of others."""
    if is_all_gather(node):
        return nbytes_of(node)
    return sum(nbytes_of(source) for source in node.all_input_nodes)


def group_of(node: Node) -> str:
    """Return the name of a collective's process group."""
    return str(node.args[-1])


def ranks_of(node: Node) -> Sequence[int]:
    """Return the global ranks of a collective's process group, which must exist."""
    return dist.get_process_group_ranks(_resolve_process_group(group_of(node)))  # type: ignore[arg-type]


def waits_of(node: Node) -> list[Node]:
    """Return the waits for a collective in graph order."""
    return sorted(user for user in node.users if user.target is collectives.wait_tensor.default)


def wait_of(node: Node) -> Node:
    """Return the first wait for a collective."""
    return waits_of(node)[0]


def start_of(wait: Node) -> Node:
    """Return the collective that a wait is for."""
    (started,) = wait.all_input_nodes
    return started


def nbytes_of(node: Node) -> int:
    """Return the bytes of a node's result, summed over its tensors."""
    values = node.meta.get("val")
    tensors = values if isinstance(values, list | tuple) else (values,)
    return sum(
        tensor.numel() * tensor.element_size() for tensor in tensors if isinstance(tensor, Tensor)
    )


def group_size(node: Node) -> int:
    """Return the number of ranks of an all-gather or a reduce-scatter."""
    size = node.args[1] if is_all_gather(node) else node.args[2]
    assert isinstance(size, int)
    return size


def parameter_all_gathers(graph: Graph) -> dict[Node, list[Node]]:
    """Return the all-gathers of SimpleFSDP's parameters, each with what prepares its shard."""
    prepared_by = {}
    for node in graph.nodes:
        nodes = preparation(node) if is_all_gather(node) else None
        if nodes is not None:
            prepared_by[node] = nodes
    return prepared_by


def preparation(gather: Node) -> list[Node] | None:
    """Return the nodes between graph inputs and `gather`.

    None if one is not in PREPARATION: then no parameter is gathered.
    """
    nodes: list[Node] = []
    open_nodes = list(gather.all_input_nodes)
    while open_nodes:
        node = open_nodes.pop()
        if node.op == "placeholder" or node in nodes:
            continue
        if node.target not in PREPARATION:
            return None
        nodes.append(node)
        open_nodes += node.all_input_nodes
    return nodes


def shards_of(graph: Graph) -> set[Node]:
    """Return the nodes that prepare shards for all-gathers, and those that process reduced
    gradients.
    """
    of_parameters = parameter_collectives(graph)
    gathers = [node for node in of_parameters if is_all_gather(node)]
    reductions = [node for node in of_parameters if not is_all_gather(node)]
    prepared = {node for gather in gathers for node in preparation(gather) or ()}
    return prepared | (descendants(*reductions) - set(of_parameters))


def descendants(*starts: Node) -> set[Node]:
    """Return `starts` and all nodes that depend on them, except the graph's output."""
    dependent = set(starts)
    open_nodes = list(starts)
    while open_nodes:
        for user in open_nodes.pop().users:
            if user.op != "output" and user not in dependent:
                dependent.add(user)
                open_nodes.append(user)
    return dependent


def ancestors(nodes: Iterable[Node], stop_at: Collection[Node] = ()) -> set[Node]:
    """Return `nodes` and all nodes that they depend on, but not what `stop_at` depends on."""
    found = set(nodes)
    open_nodes = list(found)
    while open_nodes:
        node = open_nodes.pop()
        if node in stop_at:
            continue
        for source in node.all_input_nodes:
            if source not in found:
                found.add(source)
                open_nodes.append(source)
    return found


# Operators


def is_free(node: Node) -> bool:
    """Return True if a node moves no bytes: a view, a wait or a number.

    meta["is_view"]: a pass says that it is one.
    """
    return (
        getattr(node.target, "is_view", False)
        or node.target in FREE
        or "is_view" in node.meta
        or not nbytes_of(node)
    )


def is_fused_away(node: Node) -> bool:
    """Return True if Inductor stores no result for `node`, since each reader is fused with it or
    recomputes it.
    """
    return (
        is_pointwise(node) and bool(node.users) and all(map(fuses_with_inputs, all_readers(node)))
    )


def is_pointwise(node: Node) -> bool:
    if node.op != "call_function":
        return False
    if _is_complex(node) or any(map(_is_complex, node.all_input_nodes)):
        return False
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target in AS_POINTWISE


def _is_complex(node: Node) -> bool:
    """Return True if a node's value is of complex numbers, whose operators Inductor does not
    compile.
    """
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_complex()


def fuses_with_inputs(node: Node) -> bool:
    """Return True if `node` is fused into the kernel that computes its inputs."""
    return is_pointwise(node) or node.target in REDUCTIONS


def is_view(node: Node) -> bool:
    return (
        node.op == "call_function"
        and is_free(node)
        and node.target not in NO_VIEWS
        and bool(nbytes_of(node))
    )


def base_of(node: Node) -> Node:
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def all_readers(node: Node) -> Iterator[Node]:
    """Yield the nodes that read `node` or a view of it."""
    for user in node.users:
        if is_view(user):
            yield from all_readers(user)
        else:
            yield user


def storages(graph: Graph) -> dict[Node, Node]:
    """Return the node that allocated the storage of each node."""
    storage: dict[Node, Node] = {}
    for node in graph.nodes:
        base = _viewed(node)
        storage[node] = node if base is None else storage[base]
    return storage


def _viewed(node: Node) -> Node | None:
    """Return the input whose storage a node shares, or writes into; None if it has its own."""
    if node.op != "call_function" or not nbytes_of(node):
        return None
    if not is_free(node) and "out" not in node.kwargs:
        return None
    if node.target is operator.getitem and not getattr(
        node.all_input_nodes[0].target, "is_view", False
    ):
        return None  # one of several results of an operator is not a view
    source = node.kwargs.get("out") or next(iter(node.all_input_nodes), None)
    return source if isinstance(source, Node) else None
