"""Inductor's code for GPUs: every segment has some, and its kernels are counted.

On machines without a GPU: what the code would do is read from it (wrapper_code.py), and nothing of
it runs. Needs triton, and no driver. Each layout is lowered in a process of its own.
"""

import functools
from collections import Counter

import pytest
import torch
from ranks import run_ranks

SECONDS = 900  # until a process counts as hung; on an idle core it takes 40
TP = ["--parallelism.tensor_parallel_degree=2"]
ASYNC = ["--parallelism.enable_async_tensor_parallel"]
EIGHT = "llama3_8b.toml", 8
DOCUMENTS = *EIGHT, ("--training.mask_documents",)
LAYOUTS = {  # recipe, world size, options, pipeline stage
    "8B, TP 2 x FSDP 4, async": ("llama3_8b.toml", 8, [*TP, *ASYNC]),
    "8B, float8": ("llama3_8b_float8.toml", 8, []),
    "405B, second stage": ("llama3_405b.toml", 512, [], 1),
}


@functools.cache
def lowered(recipe, world_size, options=(), stage=0):
    pytest.importorskip(
        "triton",
        reason=(
            "needs triton, which writes kernels without a GPU: pip install 'titan_lite[cuda-code]'"
        ),
    )
    (graphs,) = run_ranks(
        1, _lower, recipe, world_size, list(options), stage, init=False, seconds=SECONDS
    )
    return graphs


def _lower(*arguments):
    from cuda_code import lower_stage  # imports much of Inductor, which only this process needs

    return lower_stage(*arguments)


def check(graphs, fused=False):
    halves = {"backward_input", "backward_weight"}  # of a schedule that runs them apart
    backward = set(graphs) - {"forward", "inference"}
    assert backward in ({"backward"}, halves, {"backward"} | halves)
    for name, graph in graphs.items():
        started = [operator for kind, operator in graph.launches if kind == "start"]
        assert started, name
        for segment in graph.segments:
            # a collective in a segment could start late
            assert ("_c10d_functional" in segment.source) <= fused, name
        assert (graph.marked > 0) == fused


@pytest.mark.slow
def test_there_is_code_for_every_segment():
    check(lowered(*EIGHT))


@pytest.mark.slow
@pytest.mark.skipif(
    not torch.__version__.startswith("2.13"), reason="the numbers are those of torch 2.13"
)
def test_kernels_of_three_blocks_and_of_one():
    """A change of these numbers is a change of what a GPU launches in every block: look at it
    before writing it down.
    """
    whole = {
        "forward": {"triton": 71, "matmul": 22, "attention": 3, "start": 5, "wait": 5},
        "inference": {"triton": 70, "matmul": 22, "attention": 3, "start": 5, "wait": 5},
        "backward": {
            "triton": 112,
            "matmul": 44,
            "attention": 3,
            "start": 8,
            "wait": 8,
            "operator": 7,
        },
    }
    one = {  # from the first attention to the second; shards are cast before, as early as they may
        "forward": {"triton": 13, "matmul": 7, "attention": 1, "start": 1, "wait": 1},
        "inference": {"triton": 13, "matmul": 7, "attention": 1, "start": 1, "wait": 1},
        "backward": {
            "triton": 36,
            "matmul": 14,
            "attention": 1,
            "start": 2,
            "wait": 2,
            "operator": 2,
        },
    }
    for name, graph in lowered(*EIGHT).items():
        assert Counter(kind for kind, _ in graph.launches) == whole[name], name
        assert Counter(kind for kind, _ in graph.block()) == one[name], name


@pytest.mark.slow
def test_the_output_weight_is_read_where_it_was_gathered():
    weight = 128256 * 4096 * 2
    for name in ("forward", "inference"):
        for segment in lowered(*EIGHT)[name].segments:
            assert weight not in segment.replay.allocated


@pytest.mark.release
@pytest.mark.parametrize("layout", LAYOUTS)
def test_there_is_code_for_the_segments_of_other_layouts(layout):
    recipe, world_size, options, *stage = LAYOUTS[layout]
    check(lowered(recipe, world_size, tuple(options), *stage), fused=ASYNC[0] in options)


@pytest.mark.release
def test_attention_within_documents_is_a_kernel_and_no_mask():
    graphs = lowered(*DOCUMENTS)
    check(graphs)
    for name, graph in graphs.items():
        operator = "flash_attention_within_documents" + "_backward" * (name == "backward")
        assert [
            kernel.startswith(operator) for kind, kernel in graph.launches if kind == "attention"
        ] == [True] * 3
        for segment in graph.segments:
            assert "8192, 8192" not in segment.source  # no tensor of all pairs
