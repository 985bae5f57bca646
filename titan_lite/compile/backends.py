"""Make what runs a graph: run the passes on it, and compile it.

    compile_graph = inductor_backend(schedule.compiling)
    run = compile_graph(graph, "forward")       # graph: torch.fx.GraphModule
    results = run([*inputs])                    # clears the list

Inductor compiles a graph in segments between collectives (segments.py); aot_eager runs it as it is,
operator by operator. compile.py chooses the backend.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._dynamo.utils import detect_fake_mode
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.distributed._symmetric_memory import enable_symm_mem_for_group
from torch.fx import Graph, GraphModule, Node

from titan_lite.compile.compiled_model import CompileGraph
from titan_lite.compile.report import Compilation
from titan_lite.compile.segments import (
    BoxedFunction,
    compile_segments,
    is_fused,
    is_outside,
)
from titan_lite.config import ConfigError
from titan_lite.cost import collectives

# (graph, its name as in Schedule.run) -> context in which it is compiled
Compiling = Callable[[GraphModule, str], AbstractContextManager[Compilation]]

FUSED_PRODUCTS = (
    "symm_mem.fused_all_gather_matmul.default",
    "symm_mem.fused_matmul_reduce_scatter.default",
)


class ExpectFusedProducts(CustomGraphPass):
    """The function below as a pass of Inductor, with a key for Inductor's cache."""

    def __call__(self, graph: Graph) -> None:
        expect_fused_products(graph)

    def uuid(self) -> bytes:
        return get_hash_for_files((__file__,))


def aot_eager_backend(compiling: Compiling) -> CompileGraph:
    """Return a backend that runs graphs as traced, operator by operator."""

    def compile_graph(graph: GraphModule, name: str) -> BoxedFunction:
        with compiling(graph, name):
            pass

        def run(inputs: list[Any]) -> Sequence[Any]:
            results = graph.forward(*inputs)
            inputs.clear()
            return results

        return run

    return compile_graph


def inductor_backend(compiling: Compiling, async_tensor_parallel_group: str = "") -> CompileGraph:
    """Return a backend that makes kernels, and calls collectives in the order of the passes.

    async_tensor_parallel_group: as in `compile_model`.
    """
    settings: dict[str, object] = {}
    if async_tensor_parallel_group:
        enable_symm_mem_for_group(async_tensor_parallel_group)  # type: ignore[arg-type]
        settings["_micro_pipeline_tp"] = True

    def compile_graph(graph: GraphModule, name: str) -> BoxedFunction:
        with compiling(graph, name) as compilation, inductor_config.patch(settings):
            if async_tensor_parallel_group and not any(map(is_fused, graph.graph.nodes)):
                raise nothing_fused()
            program = compile_segments(
                graph,
                compile_segment,
                is_outside,
                apart=preparations(graph.graph),
                starts=starts_of_blocks(graph.graph),
            )
            compilation.segments = program.segments
            compilation.different_segments = program.different_segments
        return program

    return compile_graph


def starts_of_blocks(graph: Graph) -> set[Node]:
    """Return the first nodes of blocks and of what is behind them, if there are no collectives.

    Otherwise these are what parts a graph into segments that are alike.
    """
    if any(map(is_outside, graph.nodes)):
        return set()
    starts = set()
    block = None
    for node in graph.nodes:
        if node.op == "call_function" and node.meta.get("block") != block:
            block = node.meta.get("block")
            starts.add(node)
    return starts


def compile_segment(segment: GraphModule, inputs: Sequence[Any]) -> BoxedFunction:
    """Compile a segment with Inductor.

    It has a tracing context of its own: that of the graph describes the graph's inputs and outputs.
    """
    settings: dict[str, object] = {}
    if any(map(is_fused, segment.graph.nodes)):
        settings["post_grad_custom_post_pass"] = ExpectFusedProducts()
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
