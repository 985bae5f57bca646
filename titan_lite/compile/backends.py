"""Make what runs the graphs of a model: run the passes on each, and compile them.

    backend = inductor_backend(graph_passes)
    run = backend({"forward": graph, "backward": other})    # graphs: torch.fx.GraphModule
    results = run["forward"]([*inputs])                     # clears the list

Inductor compiles graphs in segments between collectives (segments.py); aot_eager runs them as they
are, operator by operator. compile.py chooses the backend.

The ranks of a node share out the segments. Each rank begins at another one, and later finds in
Inductor's cache on disk what the others have compiled. No rank waits for another: what is not in
the cache yet, or is never put there, it compiles itself. On GPUs every rank compiles all segments,
since the keys of Inductor's cache contain the index of the GPU.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.utils import counters, detect_fake_mode
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx_inner
from torch.fx import Graph, GraphModule, Node

from titan_lite.compile.compiled_model import Backend
from titan_lite.compile.graph_passes import GraphPasses
from titan_lite.compile.rank_agreement import PlaceOnNode
from titan_lite.compile.segments import (
    BoxedFunction,
    CutGraph,
    Segment,
    Structure,
    is_outside,
)
from titan_lite.graph import parameter_all_gathers


@dataclass(frozen=True)
class CompiledSegment:
    """A segment as Inductor has compiled it."""

    function: BoxedFunction
    seconds: float
    was_cached: bool  # by an earlier start, or by another rank


def aot_eager_backend(graph_passes: GraphPasses) -> Backend:
    """Return a backend that runs graphs as traced, operator by operator."""

    def compile_graphs(graphs: Mapping[str, GraphModule]) -> dict[str, BoxedFunction]:
        for name, graph in graphs.items():
            graph_passes.run(graph, name)
        return {name: as_traced(graph) for name, graph in graphs.items()}

    return compile_graphs


def as_traced(graph: GraphModule) -> BoxedFunction:
    def run(inputs: list[Any]) -> Sequence[Any]:
        results = graph.forward(*inputs)
        inputs.clear()
        return results

    return run


def inductor_backend(graph_passes: GraphPasses, settings: Mapping[str, object]) -> Backend:
    """Return a backend that makes kernels, and calls collectives in the order of the passes.

    settings: of Inductor, beside its own.
    """
    place = graph_passes.settings.ranks.place_on_node
    # torch 2.11 has no such setting
    autotunes_together = getattr(inductor_config, "distributed_max_autotune_gemm", False)
    if settings or autotunes_together:
        place = PlaceOnNode()  # compilation may communicate, so that all ranks need one order

    def compile_graphs(graphs: Mapping[str, GraphModule]) -> dict[str, BoxedFunction]:
        with inductor_config.patch(dict(settings)):
            cuts: dict[str, CutGraph] = {}
            for name, graph in graphs.items():
                graph_passes.run(graph, name)
                cuts[name] = cut_graph(graph)
            segments = {key: part for cut in cuts.values() for key, part in cut.segments.items()}
            compiled = {
                key: compile_segment(segments[key]) for key in compile_order(segments, place)
            }
        functions = {key: segment.function for key, segment in compiled.items()}
        programs = {name: cut.program(functions) for name, cut in cuts.items()}
        for name, cut in cuts.items():
            own = [compiled[key] for key in cut.segments]
            graph_passes.add_compilation(
                name,
                seconds=sum(segment.seconds for segment in own),
                segments=programs[name].segments,
                different_segments=len(own),
                cached_segments=sum(segment.was_cached for segment in own),
            )
        return dict(programs)

    return compile_graphs


def cut_graph(graph: GraphModule) -> CutGraph:
    """Cut a graph at its collectives, or between blocks if it has none."""
    return CutGraph(
        graph,
        is_outside,
        apart=preparations(graph.graph),
        starts=starts_of_blocks(graph.graph),
    )


def compile_order(segments: Mapping[Structure, Segment], place: PlaceOnNode) -> list[Structure]:
    """Return the segments in the order in which this rank compiles them.

    After its own share, a rank goes through those of the following ranks, each from its end, where
    its owner has not begun. Ranks whose graphs are equal have the same shares.
    """
    shares = shares_of(segments, place.ranks)
    own, *others = [*shares[place.index :], *shares[: place.index]]
    return own + [structure for share in others for structure in reversed(share)]


def shares_of(segments: Mapping[Structure, Segment], ranks: int) -> list[list[Structure]]:
    """Divide segments into a share for each rank, of about as many nodes each.

    Neighbours are together: they are of one graph, and often have kernels in common. A share
    begins with the largest segment.
    """
    shares: list[list[Structure]] = [[] for _ in range(ranks)]
    total = sum(segment.nodes for segment in segments.values())
    before = 0
    for structure, segment in segments.items():
        middle = before + segment.nodes / 2
        shares[int(middle * ranks / total)].append(structure)
        before += segment.nodes
    for share in shares:
        share.sort(key=lambda structure: -segments[structure].nodes)
    return shares


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


def compile_segment(segment: Segment) -> CompiledSegment:
    """Compile a segment with Inductor, or take it from Inductor's cache.

    It has a tracing context of its own: that of the graph describes the graph's inputs and outputs.
    """
    started = time.perf_counter()
    context = torch._guards.TracingContext(detect_fake_mode(segment.inputs))
    hits_before = counters["inductor"]["fxgraph_cache_hit"]
    with torch._guards.tracing(context):
        function = compile_fx_inner(segment.module, segment.inputs)
    return CompiledSegment(
        function,
        seconds=time.perf_counter() - started,
        was_cached=counters["inductor"]["fxgraph_cache_hit"] > hits_before,
    )


def preparations(graph: Graph) -> list[list[Node]]:
    """Return what prepares the shards of each all-gather: casts and copies into a bucket.

    A pass may move all of it to the first all-gather. In one segment it would grow with the model.
    """
    found: list[list[Node]] = []
    seen: set[Node] = set()
    for nodes in parameter_all_gathers(graph).values():
        if seen.isdisjoint(nodes):  # tied weights share some
            found.append(nodes)
            seen.update(nodes)
    return found
