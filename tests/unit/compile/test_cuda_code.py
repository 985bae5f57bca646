"""Inductor's code for GPUs keeps the order that the passes decide and touches nothing in flight;
its kernels are counted.

On machines without a GPU: what the code would do is read from it (wrapper_code.py), and nothing of
it runs. Needs triton, and no driver. Each layout is lowered in a process of its own.
"""

import functools
import re
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
    "8B, greedy": ("llama3_8b.toml", 8, GREEDY),
    "8B, auto": ("llama3_8b.toml", 8, AUTO),
    "8B, TP 2 x FSDP 4": ("llama3_8b.toml", 8, TP),
    "8B, TP 2 x FSDP 4, greedy": ("llama3_8b.toml", 8, [*TP, *GREEDY]),
    "8B, TP 2 x FSDP 4, async": ("llama3_8b.toml", 8, [*TP, *ASYNC]),
    "8B on 128": ("llama3_8b.toml", 128, []),
    "8B on 128, greedy": ("llama3_8b.toml", 128, GREEDY),
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
    assert set(graphs) == {"forward", "backward", "inference"}
    for name, graph in graphs.items():
        assert graph.replay.order == graph.fused, name
        assert graph.replay.faults == [], name
        left = [event for event in graph.asked if event in graph.fused]
        assert (left == graph.asked) != fused
        communication = [
            [event for event in each if event[0] in ("start", "wait")]
            for each in (left, graph.fused)
        ]
        assert communication[0] == [event for event in communication[1] if event in left], name


def test_the_code_has_the_order_of_the_graph():
    check(lowered(*EIGHT))


@pytest.mark.skipif(
    not torch.__version__.startswith("2.13"), reason="the numbers are those of torch 2.13"
)
def test_kernels_of_three_blocks_and_of_one():
    """A change of these numbers is a change of what a GPU launches in every block: look at it
    before writing it down.
    """
    whole = {
        "forward": {"triton": 68, "product": 22, "attention": 3, "start": 5, "wait": 5},
        "inference": {"triton": 67, "product": 22, "attention": 3, "start": 5, "wait": 5},
        "backward": {
            "triton": 109,
            "product": 44,
            "attention": 3,
            "start": 8,
            "wait": 8,
            "operator": 7,
        },
    }
    one = {  # from the first attention to the second; shards are cast before, as early as they may
        "forward": {"triton": 12, "product": 7, "attention": 1, "start": 1, "wait": 1},
        "inference": {"triton": 12, "product": 7, "attention": 1, "start": 1, "wait": 1},
        "backward": {
            "triton": 35,
            "product": 14,
            "attention": 1,
            "start": 2,
            "wait": 2,
            "operator": 3,
        },
    }
    for name, graph in lowered(*EIGHT).items():
        assert Counter(kind for kind, _ in graph.replay.launches) == whole[name], name
        assert Counter(kind for kind, _ in graph.replay.block()) == one[name], name


def test_the_output_weight_is_read_where_it_was_gathered():
    weight = 128256 * 4096 * 2
    for name in ("forward", "inference"):
        assert weight not in lowered(*EIGHT)[name].replay.allocated


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_code_of_other_layouts_has_the_order_of_their_graphs(layout):
    recipe, world_size, options, *stage = LAYOUTS[layout]
    check(lowered(recipe, world_size, tuple(options), *stage), fused=ASYNC[0] in options)


@pytest.mark.slow
def test_attention_within_documents_is_a_kernel_and_no_mask():
    graphs = lowered(*DOCUMENTS)
    check(graphs)
    for name, graph in graphs.items():
        operator = "flash_attention_within_documents" + "_backward" * (name == "backward")
        assert [
            kernel.startswith(operator)
            for kind, kernel in graph.replay.launches
            if kind == "attention"
        ] == [True] * 3
        assert "8192, 8192" not in graph.source  # no tensor of all pairs


@pytest.mark.slow
@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("name", ["forward", "backward"])
def test_all_kernels_compile(name, capability):
    (compiled,) = run_ranks(
        1, _compile, lowered(*EIGHT)[name], capability, init=False, seconds=SECONDS
    )
    assert set(compiled) == {
        kernel for kind, kernel in lowered(*EIGHT)[name].replay.launches if kind == "triton"
    }
    assert all(compiled.values())


def _compile(*arguments):
    from cuda_code import compile_kernels

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)  # which run_ranks ends
    return compile_kernels(*arguments)


# The checker finds what is wrong

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
            buf1 = torch.ops._c10d_functional.all_gather_into_tensor.default(buf0, 8, '0')
            assert_size_stride(buf1, (32, 8), (8, 1))
            buf2 = empty_strided_cuda((4, 8), (8, 1), torch.bfloat16)
            extern_kernels.mm(x, reinterpret_tensor(primals_2, (8, 8), (1, 8), 0), out=buf2)
            del x
            torch.ops._c10d_functional.wait_tensor.default(buf1)
            del buf0
            buf3 = empty_strided_cuda((4, 32), (32, 1), torch.bfloat16)
            extern_kernels.mm(buf2, reinterpret_tensor(buf1, (8, 32), (1, 8), 0), out=buf3)
            del buf1
            buf4 = buf2; del buf2  # reuse
            triton_poi_fused_0.run(buf3, buf4, 32, stream=raw_stream0)
        return (buf3, buf4, )
"""
WAIT = "torch.ops._c10d_functional.wait_tensor.default(buf1)\n"
PLANTED = {
    "freed": ("            del x\n", "            del x, buf0\n", "            del buf0\n", ""),
    "written": (
        "out=buf2)\n            del x",
        "out=buf2)\n            triton_poi_fused_0.run(x, buf0, 32)\n            del x",
    ),
    "reused": ("buf2 = empty_strided_cuda((4, 8), (8, 1), torch.bfloat16)", "buf2 = buf0"),
    "used": ("extern_kernels.mm(x, ", "extern_kernels.mm(buf1, "),
    "never waited for": (WAIT, "args.clear()\n"),
}


def replayed(code):
    return Replay(
        code, {"buf1": ["gather"], "buf2": ["mm"], "buf3": ["mm_1"]}, {"buf1": 512, "x": 64}
    )


def test_the_checker_reads_order_lifetimes_and_memory():
    replay = replayed(CODE)
    assert replay.order == [
        ("start", "gather"),
        ("product", "mm"),
        ("wait", "gather"),
        ("product", "mm_1"),
    ]
    assert replay.launches[0] == replay.launches[-1] == ("triton", "triton_poi_fused_0")
    assert replay.faults == []
    assert replay.peak == 512 + 64 + 256  # buf1 to buf3: buf0 and x are freed before buf3 is made
    assert replay.allocated == [64, 64, 256]


@pytest.mark.parametrize("fault", PLANTED)
def test_the_checker_finds_a_planted_fault(fault):
    code = CODE
    for old, new in zip(PLANTED[fault][::2], PLANTED[fault][1::2], strict=True):
        assert code.count(old) == 1
        code = code.replace(old, new)
    said = {"reused": "is written in flight", "never waited for": "gather is never waited for"}
    assert any(said.get(fault, f"is {fault} in flight") in each for each in replayed(code).faults)


def test_the_checker_finds_a_fault_planted_in_real_code():
    graph = lowered(*EIGHT)["backward"]
    first, *_ = re.findall(
        r"^ +torch\.ops\._c10d_functional\.wait_tensor\.default\(\w+\)\n", graph.source, re.M
    )
    late = graph.source.replace(first, "", 1)
    late = re.sub(r"^( +)return \(", lambda end: first + end[0], late, count=0, flags=re.M)
    assert any(
        "is used in flight" in fault for fault in Replay(late, graph.kernels, graph.nbytes).faults
    )


def test_a_statement_that_is_not_understood_is_an_error():
    with pytest.raises(ValueError, match=r"^not understood: line 23: launch\(buf3\)$"):
        replayed(CODE.replace("del buf1\n", "launch(buf3)\n"))
