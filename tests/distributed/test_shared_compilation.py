"""The ranks of a node share out the segments that Inductor compiles: each compiles a part, takes the
others from the cache, and computes the same.
"""

import hashlib
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from parity import batch, build, make_mesh, my_microbatches, step
from ranks import run_ranks
from tiny import HEADS
from torch._functorch.aot_autograd import make_boxed_func

from titan_lite.compile import backends
from titan_lite.compile.rank_agreement import PlaceOnNode, outside_of_tracing
from titan_lite.cost.profiles import load_machine
from titan_lite.distributed.stage_ranks import PipelineStageRanks

CONFIG = replace(HEADS, n_layers=3, vocab_size=64)  # so that the graphs of ranks are equal
RANKS = 2


def one_step(shared):
    """(loss, gradients, compile reports). shared: False: each rank compiles all."""
    mesh, reports = make_mesh(1, RANKS, 1), []
    alone = mock.patch.object(PipelineStageRanks, "place_on_node", PlaceOnNode())
    if not shared:
        alone.start()
    stage = build(
        CONFIG,
        mesh,
        compiled="inductor",
        bucketing="block",
        machine=load_machine("H100"),
        reports=reports,
    )
    tokens, labels = batch()
    loss, gradients = step(
        stage, mesh, my_microbatches(mesh, tokens, labels), (labels != -100).sum()
    )
    return loss, gradients, reports


def equal(first, second):
    (loss, gradients, _), (other_loss, other_gradients, _) = first, second
    return loss == other_loss and all(
        torch.equal(gradient, other_gradients[fqn]) for fqn, gradient in gradients.items()
    )


def with_stand_in(folder, shared):
    """(`one_step`, the segments that this rank compiled, by hash), where ranks compile in step."""
    compiled = []

    def compile_in_step(segment, inputs):
        """In place of Inductor, with a cache that has a file a segment."""
        shapes = [tuple(value.shape) for value in inputs]
        key = hashlib.sha256(f"{shapes} {segment.code}".encode()).hexdigest()
        file = Path(folder, key)
        if not file.exists():
            compiled.append(key)
        with outside_of_tracing():
            dist.barrier()
            file.touch()
            dist.barrier()
        return make_boxed_func(segment.forward)

    with mock.patch.object(backends, "compile_fx_inner", compile_in_step):
        return one_step(shared), compiled


@pytest.mark.slow
def test_each_rank_compiles_another_half_and_computes_the_same(tmp_path):
    folders = [tmp_path / name for name in ("shared", "alone")]
    for folder in folders:
        folder.mkdir()
    shared = run_ranks(RANKS, with_stand_in, folders[0], True)
    alone = run_ranks(RANKS, with_stand_in, folders[1], False)
    (_, first), (_, second) = shared
    everything = set(alone[0][1])
    assert len(everything) > 4
    assert {*first, *second} == everything
    assert len({*first} & {*second}) <= 1  # an odd one is left when both have compiled their halves
    assert abs(len(first) - len(second)) <= 1
    for (result, _), (expected, compiled) in zip(shared, alone, strict=True):
        assert set(compiled) == everything
        assert equal(result, expected)


@pytest.mark.release
def test_inductor_has_in_its_cache_what_another_rank_or_an_earlier_start_has_compiled(
    monkeypatch, tmp_path
):
    def results(folder, shared):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / folder))
        return run_ranks(RANKS, one_step, shared)

    first, again = results("shared", True), results("shared", True)
    alone = results("alone", False)
    compiled = 0
    for result, cached, expected in zip(first, again, alone, strict=True):
        assert equal(result, expected)
        assert equal(cached, expected)
        assert [report.graph for report in result[2]] == ["forward", "backward"]
        different = sum(report.different_segments for report in result[2])
        compiled += different - sum(report.cached_segments for report in result[2])
        assert all(report.cached_segments == report.different_segments for report in cached[2])
    assert different <= compiled < RANKS * different
