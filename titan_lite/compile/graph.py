"""Edit an FX graph in place, as passes need it: insert calls, move nodes, merge waits.

    with graph.inserting_before(node):
        bucket = add_call(graph, aten.cat.default, [shard_1, shard_2])
    move_before(node, preparation(bucket))

Questions about a graph are in titan_lite/graph.py.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch._dynamo.utils import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.node import Argument, Target, map_arg
from torch.utils._pytree import tree_leaves

from titan_lite.graph import KINDS, parameter_all_gathers, wait_of, waits_of


def placeholders(graph: Graph) -> list[Node]:
    return graph.find_nodes(op="placeholder")


def results_of(graph: Graph) -> list[Any]:
    """Return what a graph returns: nodes, and None for gradients that a backward does not make."""
    results: Any = output_node(graph).args[0]
    return list(results)


def output_node(graph: Graph) -> Node:
    (output,) = graph.find_nodes(op="output")
    return output


def extract(
    nodes: Iterable[Node], inputs: Mapping[str, Node], results: Sequence[Node | None]
) -> Graph:
    """Return copies of some nodes of a graph, in order, as a graph of its own.

    inputs: what the nodes read beside each other, by the names of the placeholders that stand for
    it. Other names do not depend on the graph that the nodes are from: Inductor's cache has code by
    the text of its graph.
    """
    graph = Graph()
    copies: dict[Node, Node] = {}
    for name, node in inputs.items():
        copies[node] = graph.placeholder(name)
        copies[node].meta = dict(node.meta)
    for node in nodes:
        args = map_arg(node.args, copies.__getitem__)
        kwargs = map_arg(node.kwargs, copies.__getitem__)
        copies[node] = graph.create_node(node.op, node.target, args, kwargs)
        copies[node].meta = dict(node.meta)
    graph.output(tuple(None if node is None else copies[node] for node in results))
    return graph


def add_call(graph: Graph, target: Target, *args: Argument, **kwargs: Argument) -> Node:
    """Insert a call of the operator `target`, with its fake result in meta["val"]."""
    assert not isinstance(target, str)  # the name of a method
    node = graph.call_function(target, args, kwargs)
    values = [_fake_value(argument) for argument in args]
    mode = detect_fake_mode([value for value in tree_leaves(values) if isinstance(value, Tensor)])
    if mode is None:  # a graph of real or meta tensors, built by hand
        node.meta["val"] = target(*values, **kwargs)
        return node
    known = _results_of(mode)
    call = (str(target), _described(values), repr(kwargs))
    if call not in known:
        with mode:
            known[call] = target(*values, **kwargs)
    node.meta["val"] = known[call]
    return node


def _results_of(mode: FakeTensorMode) -> dict[Hashable, Any]:
    """Return what calls of operators returned: blocks are alike, so most calls were made before.

    It lives as long as the mode, which its values refer to.
    """
    return mode.__dict__.setdefault("titan_lite_results", {})


def _described(value: object) -> Hashable:
    """Return all of an argument that the shape and dtype of a result depend on."""
    if isinstance(value, Tensor):
        return (
            tuple(value.shape),
            value.stride(),
            value.storage_offset(),
            value.dtype,
            value.device,
        )
    if isinstance(value, list | tuple):
        return tuple(map(_described, value))
    return repr(value)


def _fake_value(argument: object) -> object:
    """Return an argument of an operator with each node replaced by its fake result."""
    if isinstance(argument, Node):
        return argument.meta["val"]
    if isinstance(argument, list):
        return [_fake_value(element) for element in argument]
    return argument


def move_before(
    target: Node, nodes: Iterable[Node], accepted: Callable[[], bool] | None = None
) -> bool:
    """Move those of `nodes` that are behind `target` before it, in their order.

    Undo this if `accepted`, called with the nodes moved, returns False. Return True if nodes moved.
    """
    behind = sorted(node for node in nodes if node > target)
    following = [node.next for node in behind]
    for node in behind:
        target.prepend(node)
    if accepted is None or accepted():
        return bool(behind)
    for node, successor in zip(reversed(behind), reversed(following), strict=True):
        successor.prepend(node)
    return False


def merge_equal_all_gathers(graph: Graph) -> int:
    """Keep one of several equal all-gathers of a parameter: tied weights are read twice. Return the
    number of all-gathers erased.

    torch merges equal nodes when it divides a graph, but since 2.14 none that forward alone needs
    with one that backward needs as well.
    """
    kept: dict[Hashable, Node] = {}
    erased = 0
    for gather in parameter_all_gathers(graph):
        known = kept.setdefault(_expression(gather), gather)
        if known is not gather:
            gather.replace_all_uses_with(known)
            graph.erase_node(gather)
            erased += 1
    if erased:
        merge_waits(graph)
    return erased


def _expression(argument: object) -> Hashable:
    """Return what a node computes from placeholders: equal for nodes with equal results."""
    if isinstance(argument, Node):
        if argument.op != "call_function":
            return argument
        arguments = [*argument.args, *sorted(argument.kwargs.items())]
        return (argument.target, *map(_expression, arguments))
    if isinstance(argument, list | tuple):
        return tuple(map(_expression, argument))
    return (type(argument), repr(argument))


def merge_waits(graph: Graph) -> int:
    """Keep one wait per collective. Return the number of waits erased.

    torch 2.14 merges equal all-gathers, but not their waits.
    """
    erased = 0
    for node in [node for node in graph.nodes if node.target in KINDS]:
        for duplicate in waits_of(node)[1:]:
            duplicate.replace_all_uses_with(wait_of(node))
            graph.erase_node(duplicate)
            erased += 1
    return erased
