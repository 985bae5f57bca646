"""Inductor's code for GPUs: every segment has some, and its kernels are counted.

On machines without a GPU: what the code would do is read from it (wrapper_code.py), and nothing of
it runs. Needs triton, and no driver. Each layout is lowered in a process of its own.
"""

import functools
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.testing._internal.distributed.fake_pg import FakeStore
from wrapper_code import Replay

SECONDS = 900  # until a process counts as hung; on an idle core it takes 40
TP = ["--parallelism.tensor_parallel_degree=2"]
ASYNC = ["--parallelism.enable_async_tensor_parallel"]
GREEDY, AUTO = (["--compile.bucketing=" + bucketing] for bucketing in ("greedy", "auto"))
EIGHT = "llama3_8b.toml", 8
DOCUMENTS = *EIGHT, ("--training.mask_documents",)
LAYOUTS = {  # recipe, world size, options, pipeline stage
    "8B, TP 2 x FSDP 4, greedy": ("llama3_8b.toml", 8, [*TP, *GREEDY]),
    "8B, TP 2 x FSDP 4, async": ("llama3_8b.toml", 8, [*TP, *ASYNC]),
    "8B on 128, auto": ("llama3_8b.toml", 128, AUTO),
    "8B, float8": ("llama3_8b_float8.toml", 8, []),
    "8B, float8 by rows": (
        "llama3_8b_float8.toml",
        8,
        ["--float8.recipe=rowwise", "--float8.no-all_gather"],
    ),
    "8B, float8, TP 2 x FSDP 4": ("llama3_8b_float8.toml", 8, TP),
    "70B, float8": ("llama3_70b_float8.toml", 256, []),
    "70B": ("llama3_70b.toml", 256, []),
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


@pytest.mark.release
@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("name", ["forward", "backward"])
def test_all_kernels_compile(name, capability):
    for segment in {id(each): each for each in lowered(*EIGHT)[name].segments}.values():
        (compiled,) = run_ranks(1, _compile, segment, capability, init=False, seconds=SECONDS)
        launched = {kernel for kind, kernel in segment.replay.launches if kind == "triton"}
        assert set(compiled) == launched
        assert all(compiled.values())


def _compile(*arguments):
    from cuda_code import compile_kernels

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)  # which run_ranks ends
    return compile_kernels(*arguments)


CODE = """
triton_poi_fused_0 = async_compile.triton('triton_poi_fused_0', '''
def triton_poi_fused_0(in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    pass
''', device_str='cuda')
class Runner:
    def call(self, args):
        primals_1, primals_2, x = args
        args.clear()
        with torch.cuda._DeviceGuard(0):
            buf0 = empty_strided_cuda((4, 8), (8, 1), torch.bfloat16)
            raw_stream0 = get_raw_stream(0)
            triton_poi_fused_0.run(primals_1, buf0, 32, stream=raw_stream0)
            buf2 = empty_strided_cuda((4, 8), (8, 1), torch.float32)
            extern_kernels.mm(x, reinterpret_tensor(primals_2, (8, 8), (1, 8), 0), out=buf2)
            del x
            buf4 = buf2; del buf2  # reuse
        return (buf4, )
"""


def test_launches_and_allocations_are_read_from_code():
    replay = Replay(CODE, {"buf2": ["mm_1"]})
    assert replay.launches == [("triton", "triton_poi_fused_0"), ("matmul", "mm_1")]
    assert replay.allocated == [64, 128]


def test_a_statement_that_is_not_understood_is_an_error():
    with pytest.raises(ValueError, match=r"^not understood: line 16: launch\(buf2\)$"):
        Replay(CODE.replace("del x\n", "launch(buf2)\n"), {})
