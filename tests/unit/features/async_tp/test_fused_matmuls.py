"""Asynchronous tensor parallelism without GPUs: what Inductor's pass makes of our graphs, on ranks
that only pretend.
"""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tiny import HEADS
from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch.distributed import _symmetric_memory
from torch.testing._internal.distributed.fake_pg import FakeStore

from titan_lite.compile.joint import TraceSettings
from titan_lite.compile.model_graph import compose
from titan_lite.compile.model_parts import TraceableModel, trace_parts
from titan_lite.compile.segments import CutGraph, is_fused, is_outside
from titan_lite.compile.settings import PassSettings
from titan_lite.config import Compile, ConfigError
from titan_lite.distributed.mesh import build_mesh, parameter_mesh
from titan_lite.distributed.simple_fsdp import FSDPOptions, apply_simple_fsdp
from titan_lite.distributed.tensor_parallel import apply_tensor_parallel
from titan_lite.features.async_tp.fused_matmuls import (
    FUSED_MATMULS,
    expect_fused_matmuls,
    keep_with_matmuls,
    mark_fused_collectives,
)
from titan_lite.models.transformer import Transformer

F32 = torch.float32


@pytest.fixture
def mesh():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield build_mesh(dict(pp=1, dp_replicate=1, dp_shard=2, cp=1, tp=2), "cpu")
    dist.destroy_process_group()


def graphs_of(mesh):
    """(forward, backward) as Inductor sees them."""
    model = Transformer(HEADS)
    model.init_weights(0)
    apply_tensor_parallel(model, mesh["tp"], "llama3")
    sharding = apply_simple_fsdp(model, parameter_mesh(mesh), FSDPOptions())
    traceable = TraceableModel(model, sharding, model.layers)
    tokens = torch.zeros(4, 16, dtype=torch.int64)
    graphs = compose(trace_parts(traceable, {"tokens": tokens}, TraceSettings(decomposes=True)))
    return graphs.forward, graphs.backward


def test_the_matmuls_of_every_block_overlap_with_their_collectives(mesh):
    forward, backward = graphs_of(mesh)
    with pytest.raises(
        ConfigError, match=r"enable_async_tensor_parallel = true: Inductor found no collective"
    ):
        expect_fused_matmuls(forward.graph)
    group = mesh.get_group("tp").group_name
    with (
        _symmetric_memory._test_mode({group}),
        mock.patch("torch.distributed.is_nccl_available", return_value=True),
    ):
        for graph in (forward, backward):
            view_to_reshape(graph)  # as Inductor does before
            micro_pipeline_tp_pass(graph.graph)
    # A layer gathers before attention and feed-forward and scatters after both, and the output
    # gathers; the embedding scatters a look-up.
    assert expect_fused_matmuls(forward.graph) == 4 * HEADS.n_layers + 1
    # Backward gathers before wo and w2; what it scatters is a sum of two or three matmuls, but for
    # the output's.
    assert expect_fused_matmuls(backward.graph) == 2 * HEADS.n_layers + 1


def test_a_segment_without_collectives_has_nothing_to_fuse():
    graph = torch.fx.Graph()
    graph.output(graph.call_function(torch.ops.aten.neg.default, (graph.placeholder("x"),)))
    assert expect_fused_matmuls(graph) == 0


def test_segments_keep_collectives_and_their_matmuls_together(mesh):
    """Collectives of parameters stand between them in the traced graphs."""
    group = mesh.get_group("tp").group_name
    settings = PassSettings(Compile(enable=True))
    for graph in graphs_of(mesh):
        marked = mark_fused_collectives(graph.graph, settings)
        assert keep_with_matmuls(graph.graph, settings) > 0
        fused = 0
        with (
            _symmetric_memory._test_mode({group}),
            mock.patch("torch.distributed.is_nccl_available", return_value=True),
        ):
            for segment in CutGraph(graph, is_outside).segments.values():
                view_to_reshape(segment.module)
                nodes = segment.module.graph.nodes
                micro_pipeline_tp_pass(segment.module.graph)
                fused += sum(str(node.target) in FUSED_MATMULS for node in nodes)
                assert not any(map(is_fused, nodes))
        assert fused > 0
        assert marked >= fused
