"""Trace a function and its backward as FX graphs, and divide them into forward and backward.

    traced = trace(function, inputs, settings)
    traced.forward          # inputs -> outputs and saved values
    traced.backward         # saved values and gradients of outputs -> gradients of inputs

torch's AOTAutograd traces operators: no Dynamo reads the code, so a function must not depend on
values of tensors, and what it reads beside its inputs is a constant of the graphs. Activation
checkpointing and resharding are tags on the joint graph of forward and backward, which the
partitioner reads when it divides the graph.
"""

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.fx.traceback
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.virtualized import V
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from titan_lite.compile.graph import merge_equal_all_gathers, results_of
from titan_lite.compile.passes import resharding
from titan_lite.compile.torch_patches import is_compiling, no_random_state_saved
from titan_lite.models.experts import CHOICE

if TYPE_CHECKING:
    from titan_lite.compile.model_parts import Value

MIN_BUDGET = 1e-9  # a memory budget that is not 0
# Takes and returns tensors.
TensorFunction = Callable[..., Sequence[Tensor]]
# What activation checkpointing does with the result of an operator. It is called for the operators
# of a forward in order.
CheckpointRule = Callable[[OpOverload], CheckpointPolicy]


@dataclass(frozen=True)
class TraceSettings:
    """Settings of tracing, and of the division into forward and backward."""

    decomposes: bool = False  # operators, as Inductor does
    rewrites: bool = False  # operators, by Inductor's passes on joint graphs
    # FQNs of parameters that stay gathered until backward; None: all
    keep_gathered: Collection[str] | None = None
    # share of the activations saved at 1.0 that may be saved; the partitioner recomputes the
    # cheapest per byte
    memory_budget: float = 1.0
    # the graphs of backward: a full one, one for each half, or all three
    full_backward: bool = True
    split_backward: "SplitBackward | None" = None
    # tags the joint graph last, before it is divided
    tag_joint: Callable[[Graph], None] | None = None


@dataclass(frozen=True)
class TracedFunction:
    """The graphs of a function. Nodes have fake results in meta["val"]."""

    forward: GraphModule  # inputs -> (*outputs, *saved values)
    outputs: int
    backward: GraphModule | None  # None: no output has a gradient
    differentiable: Sequence[int]  # the outputs that have a gradient, in the order of backward

    @property
    def results(self) -> list[Node]:
        """The outputs, in the forward graph."""
        return results_of(self.forward.graph)[: self.outputs]

    @property
    def saved(self) -> list[Node]:
        """The saved values, in the forward graph: what backward takes first."""
        return results_of(self.forward.graph)[self.outputs :]


@dataclass(frozen=True)
class BackwardHalves:
    """The halves of a backward graph. Values between them have the names of the graph's nodes.

    Each half returns a gradient for each input of forward, None for those of the other half. After
    them, the half of the input returns the values of `crossing`.
    """

    input: GraphModule  # has all placeholders of the graph that was split
    weight: GraphModule  # its placeholders: `saved`, then `crossing`
    saved: tuple[str, ...]  # placeholders of the graph that was split
    crossing: tuple[str, ...]


# Splits the backward of a part of a model, whose inputs are these.
SplitBackward: TypeAlias = Callable[[TracedFunction, Sequence["Value"]], BackwardHalves]


def trace(
    function: TensorFunction,
    inputs: Sequence[Tensor],
    mode: FakeTensorMode,
    settings: TraceSettings,
    checkpoint: CheckpointRule | None = None,
    static: Collection[int] = (),
) -> TracedFunction:
    """Return the graphs of `function` for inputs of such shapes, with or without gradients.

    inputs: fake tensors of `mode`. The results of `function` must not be views of its inputs.
    checkpoint: None: the partitioner saves what is expensive to recompute. static: indices of the
    inputs that stay in memory in any case, so that saving them is free.
    """
    with mode, is_compiling():
        results = function(*inputs)
    differentiable = [index for index, result in enumerate(results) if result.requires_grad]
    graphs: dict[str, GraphModule] = {}

    def compile_forward(gm: GraphModule, example_inputs: object) -> Callable[[list[Any]], Any]:
        if not graphs:  # without gradients there was no partition
            rewrite(gm)
            graphs["forward"] = gm
        results = [node.meta["val"] for node in results_of(gm.graph)]
        return make_boxed_func(lambda *inputs: results)

    def rewrite(graph: GraphModule) -> None:
        if settings.rewrites:
            joint_graph_passes(graph, inputs[0].device)

    def partition(
        joint: GraphModule, *args: Any, **options: Any
    ) -> tuple[GraphModule, GraphModule]:
        assert options["num_fwd_outputs"] == len(results), "a result is a view"
        merge_equal_all_gathers(joint.graph)
        if checkpoint is not None:
            tag_for_checkpointing(joint.graph, checkpoint)
        routes = save_choices(joint.graph)
        rewrite(joint)
        resharding.reshard_after_forward(joint.graph, settings.keep_gathered)
        if settings.tag_joint is not None:
            settings.tag_joint(joint.graph)
        options["static_lifetime_input_indices"] = list(static)
        budget = settings.memory_budget
        if routes and not budget:  # with 0 the partitioner saves inputs alone
            budget = MIN_BUDGET
        within = functorch_config.patch(activation_memory_budget=budget)
        with within, no_random_state_saved():
            forward, backward = min_cut_rematerialization_partition(joint, *args, **options)
        graphs.update(forward=forward, backward=backward)
        return forward, backward

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        with torch.fx.traceback.preserve_node_meta():
            return tuple(function(*tensors))

    traced = aot_function(
        run,
        fw_compiler=compile_forward,
        partition_fn=partition,
        decompositions=select_decomp_table() if settings.decomposes else None,
    )
    with is_compiling(), V.set_fake_mode(mode):
        traced(*inputs)  # traces at its first call, and computes nothing
    return TracedFunction(graphs["forward"], len(results), graphs.get("backward"), differentiable)


def tag_for_checkpointing(graph: Graph, checkpoint: CheckpointRule) -> None:
    """Tag the operators of forward, as torch's checkpointing does under torch.compile."""
    for node in graph.nodes:
        if node.op != "call_function" or not is_forward(node):
            continue
        if node.target is operator.getitem:
            node.meta["recompute"] = node.args[0].meta["recompute"]
        else:
            node.meta["recompute"] = checkpoint(node.target)
        node.meta["ac_graph_id"] = 1


def save_choices(graph: Graph) -> bool:
    """Save which experts a router chose, in any case, as eager mode does. Return True for a graph
    with a router.
    """
    choices = [node for node in graph.nodes if node.target is CHOICE]
    for choice in choices:
        for node in (choice, *choice.users):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return bool(choices)


def is_forward(node: Node) -> bool:
    """Return True for a node of the forward of a joint graph."""
    return node.meta.get("partitioner_tag") != "is_backward"
