"""The vocabulary-parallel loss, compiled, on two ranks."""

import itertools

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from titan_lite.collectives import Axis
from titan_lite.compile.compile import compile_function
from titan_lite.config import Compile
from titan_lite.models.loss import Loss, VocabularyShard

BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.release)]


def loss_and_gradient(backend):
    """Return [(loss, gradients, loss without gradients)] compiled and eager, and their graphs, of
    each kind of loss.
    """
    kinds = itertools.product((0, 4), (torch.float32, torch.bfloat16))
    return [of_kind(backend, *kind) for kind in kinds]


def of_kind(backend, chunk, dtype):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    generator = torch.Generator().manual_seed(0)
    shard = VocabularyShard(61, Axis(dist.group.WORLD.group_name, 2, dist.get_rank()))
    own = shard.entries
    hidden = torch.randn(2, 5, 8, generator=generator).to(dtype)
    weight = torch.randn(61, 8, generator=generator)[own.start : own.stop].to(dtype)
    labels = torch.randint(61, (2, 5), generator=generator)
    labels[0, 1] = -100
    eager = Loss(shard, chunk=chunk)
    compiled = compile_function(eager, Compile(enable=True, backend=backend))
    results = []
    for function in (compiled, compiled, eager):
        leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
        loss = function(*leaves, labels)
        (loss / 9).sum().backward()
        with torch.no_grad():
            results.append(
                (loss.detach(), *(leaf.grad for leaf in leaves), function(hidden, weight, labels))
            )
    return results[1:], torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_vocabulary_parallel_loss_compiled_is_the_eager_one(backend):
    for rank in run_ranks(2, loss_and_gradient, backend):
        assert [graphs for _, graphs in rank] == [2] * 4  # with gradients and without
        for (compiled, eager), _ in rank:
            assert eager[1].any()
            tolerance = dict(rtol=0, atol=0) if backend == "aot_eager" else {}
            for found, expected in zip(compiled, eager, strict=True):
                torch.testing.assert_close(found, expected, **tolerance)
