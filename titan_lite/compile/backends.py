"""Make the backends of torch.compile: trace forward and backward, run the passes on both, compile.

    backend = inductor_backend(schedule.compiling)
    model.compile(backend=backend, fullgraph=True)

    joint graph -> resharding.py -> partitioner -> forward, backward -> `compiling`: the passes
    -> Inductor, in segments between collectives (segments.py), or the graph as it is (aot_eager)

compile.py chooses the backend.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import detect_fake_mode
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.decomposition import select_decomp_table
from torch.distributed._symmetric_memory import enable_symm_mem_for_group
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from titan_lite.compile.passes import resharding
from titan_lite.compile.report import Compilation
from titan_lite.compile.segments import (
    BoxedFunction,
    Program,
    compile_segments,
    is_fused,
    is_outside,
)
from titan_lite.compile.torch_patches import no_random_state_saved
from titan_lite.config import ConfigError
from titan_lite.cost import collectives

# (graph, inputs) -> what runs it, as torch.compile wants it
Backend = Callable[[GraphModule, Sequence[torch.Tensor]], Any]
# (graph, its name: "forward", "backward" or "inference") -> context in which it is compiled
Compiling = Callable[[GraphModule, str], AbstractContextManager[Compilation]]

FUSED_PRODUCTS = (
    "symm_mem.fused_all_gather_matmul.default",
    "symm_mem.fused_matmul_reduce_scatter.default",
)


class CachedPass(CustomGraphPass):
    """A graph pass of Inductor, with a key for its cache: name, arguments and sources."""

    def __init__(self, function: Callable[..., object], **arguments: object):
        self.function = function
        self.arguments = arguments

    def __call__(self, graph: Graph) -> None:
        self.function(graph, **self.arguments)

    def uuid(self) -> bytes:
        call = f"{self.function.__name__} {self.arguments}".encode()
        sources = (__file__, collectives.__file__, resharding.__file__)
        return call + get_hash_for_files(sources)


def aot_eager_backend(
    compiling: Compiling, reshard: CachedPass | None = None, priced_as: str = ""
) -> Backend:
    """Return a backend that runs the graphs as traced, operator by operator.

    reshard: the pass on the joint graph. priced_as: as in Schedule.
    """

    def partition(joint: GraphModule, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 torch's
        if reshard is not None:
            reshard(joint.graph)
        if priced_as == "eager":
            save_as_autograd(joint.graph)
        with no_random_state_saved():
            return min_cut_rematerialization_partition(joint, *args, **kwargs)

    def compile_as(name: str) -> Callable:
        def compile_graph(graph: GraphModule, inputs: Sequence[Any]) -> Callable:
            with compiling(graph, name):
                return make_boxed_func(graph.forward)

        return compile_graph

    return aot_autograd(
        fw_compiler=compile_as("forward"),
        bw_compiler=compile_as("backward"),
        inference_compiler=compile_as("inference"),
        partition_fn=partition,
        decompositions=select_decomp_table() if priced_as == "inductor" else None,
    )


def save_as_autograd(graph: Graph) -> None:
    """Let forward save what autograd saves.

    These are all activations but those within checkpointed blocks. Forward computes nothing of
    backward.
    """
    in_forward = [node for node in graph.nodes if node.meta.get("partitioner_tag") == "is_forward"]
    plain = {node for node in in_forward if not node.meta.get("recompute")}
    for node in graph.nodes:
        is_checkpointed = node.meta.get("ac_graph_id", resharding.REGION) != resharding.REGION
        is_read_outside = is_checkpointed and plain & node.users.keys()
        if node in plain or is_read_outside:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        elif node.op == "call_function" and node.meta.get("partitioner_tag") != "is_forward":
            node.meta["partitioner_tag"] = "must_be_in_backward"


def inductor_backend(
    compiling: Compiling, reshard: CachedPass | None = None, async_tensor_parallel_group: str = ""
) -> Backend:
    """Return a backend that makes kernels, and calls collectives in the order of the passes.

    reshard: the pass on the joint graph. async_tensor_parallel_group: as in `compile_model`.
    """
    settings: dict[str, object] = {}
    if reshard is not None:
        settings["joint_custom_post_pass"] = reshard
    if async_tensor_parallel_group:
        enable_symm_mem_for_group(async_tensor_parallel_group)  # type: ignore[arg-type]
        settings["_micro_pipeline_tp"] = True

    def compile_graph(graph: GraphModule, inputs: Sequence[Any], **options: Any) -> Any:  # noqa: ANN401 torch's
        """Run the passes here, since graphs from Inductor's cache skip its own hooks for passes."""
        with compiling(graph, graph_name(options)) as compilation:
            nodes = graph.graph.nodes
            if async_tensor_parallel_group and not any(map(is_fused, nodes)):
                raise nothing_fused()
            if not any(map(is_outside, nodes)):
                return compile_fx_inner(graph, inputs, **options)
            program = compile_segments(
                graph, compile_segment, is_outside, preparations(graph.graph)
            )
            compilation.segments = program.segments
            compilation.different_segments = program.different_segments
            return boxed(program)

    def compile_both(graph: GraphModule, inputs: Sequence[torch.Tensor]) -> Any:  # noqa: ANN401 torch's
        with no_random_state_saved():
            return compile_fx(graph, inputs, inner_compile=compile_graph, config_patches=settings)

    return compile_both


def compile_segment(segment: GraphModule, inputs: Sequence[Any]) -> BoxedFunction:
    """Compile a segment with Inductor.

    It has a tracing context of its own: that of the graph describes the graph's inputs and outputs.
    """
    settings: dict[str, object] = {}
    if any(map(is_fused, segment.graph.nodes)):
        settings["post_grad_custom_post_pass"] = CachedPass(expect_fused_products)
    context = torch._guards.TracingContext(detect_fake_mode(inputs))
    with torch._guards.tracing(context), inductor_config.patch(settings):
        return compile_fx_inner(segment, inputs)


def preparations(graph: Graph) -> list[list[Node]]:
    """Return what prepares the shards of each all-gather: casts and copies into a bucket.

    A pass may move all of it to the first all-gather. In one segment it would grow with the model.
    """
    found: list[list[Node]] = []
    seen: set[Node] = set()
    for nodes in collectives.parameter_all_gathers(graph).values():
        if seen.isdisjoint(nodes):  # tied weights share some
            found.append(nodes)
            seen.update(nodes)
    return found


def boxed(program: Program) -> BoxedFunction:
    """Return a program as AOTAutograd calls it: marked as a function that takes a list."""

    def call(inputs: list[Any]) -> list[Any]:
        return program(inputs)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def graph_name(options: Mapping[str, object]) -> str:
    """Return "forward", "backward" or "inference", from the options of compile_fx_inner."""
    if options.get("is_backward"):
        return "backward"
    return "inference" if options.get("is_inference") else "forward"


def expect_fused_products(graph: Graph) -> int:
    """Return the number of matrix products that overlap with a neighbouring collective.

    Raises ConfigError if there are none.
    """
    fused = [
        node
        for node in graph.nodes
        if node.op == "call_function" and str(node.target) in FUSED_PRODUCTS
    ]
    if not fused:
        raise nothing_fused()
    return len(fused)


def nothing_fused() -> ConfigError:
    return ConfigError(
        "parallelism.enable_async_tensor_parallel = true: Inductor found no collective beside a"
        " matrix product to overlap it with; use false"
    )


def compiled_at_first_call(backend: Backend, memory_budget: float = 1.0) -> Backend:
    """Return a backend that also compiles backward at the first call.

    Otherwise an error of the compiler would come in the first backward, like an error of the run.
    memory_budget: as in `compile_model`.
    """
    settings: dict[str, object] = {
        "activation_memory_budget": memory_budget,
        "force_non_lazy_backward_lowering": True,
        # Its key does not include our passes, and a hit would run none. Inductor's own cache comes
        # after them.
        "enable_autograd_cache": False,
    }
    if hasattr(functorch_config, "unsafe_treat_script_objects_as_zero_size"):  # torch >= 2.13
        settings["unsafe_treat_script_objects_as_zero_size"] = True  # the meshes of DTensors

    def compile_both(graph: GraphModule, inputs: Sequence[torch.Tensor]) -> Any:  # noqa: ANN401 torch's
        with functorch_config.patch(settings):
            return backend(graph, inputs)

    return compile_both
