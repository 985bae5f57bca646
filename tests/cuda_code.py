"""Inductor's code for a GPU, of a stage of a recipe's layout, written on a machine that has none.

    graphs = lower_stage("llama3_8b.toml", 8, ["--compile.bucketing=greedy"])
    graphs["backward"].launches         # what a GPU is given, in order; "forward", "inference", too

A stage is traced as the trainer builds it, on fake CPU tensors in a fake process group. Each
different segment of a graph is copied onto fake CUDA tensors and goes through the real
compile_fx_inner, which is stopped where the code is written. To be called in a process of its own
(ranks.run_ranks): the process group is one per process, and fake CUDA tensors may abort the
interpreter.
"""

import contextlib
import copy
import ctypes
import dataclasses
import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._inductor.config as inductor_config
from tiny import RECIPES
from torch import Tensor
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import compile_fx, ir, scheduler
from torch._inductor.exc import InductorError
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed import _symmetric_memory
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils import _triton
from wrapper_code import Replay

from titan_lite.compile import backends
from titan_lite.compile.graph_passes import GraphPasses, choose_passes
from titan_lite.compile.segments import BoxedFunction, CutGraph, Program, SegmentCall, Structure
from titan_lite.compile.settings import PassSettings
from titan_lite.config import load_config
from titan_lite.cost.profiles import load_machine
from titan_lite.distributed.layout import Layout
from titan_lite.distributed.mesh import build_mesh
from titan_lite.distributed.pipeline_schedule import backwards_of
from titan_lite.features.async_tp.fused_matmuls import FUSED_MATMULS
from titan_lite.graph import aten
from titan_lite.tools.plan.trace import (
    PlannedLayout,
    materialize_stage,
    modules_beside_blocks,
    parallelize_stage,
    stage_inputs,
    start_fake_world,
)

CUDA = torch.device("cuda", 0)
MATMULS = {aten.mm.default, aten.bmm.default, aten.addmm.default}
H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    type="cuda",
    index=0,
    major=9,
    minor=0,
    total_memory=80 << 30,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    shared_memory_per_multiprocessor=233472,
    shared_memory_per_block_optin=232448,
    shared_memory_per_block=49152,
    L2_cache_size=50 << 20,
    gcnArchName="",
    is_integrated=False,
    clock_rate=1980000,
    memory_clock_rate=2619000,
    memory_bus_width=5120,
)


@dataclasses.dataclass(frozen=True)
class Segment:
    """The code of a segment."""

    source: str  # the module that Inductor writes
    kernels: dict[str, list[str]]  # as in Replay

    @functools.cached_property
    def replay(self) -> Replay:
        return Replay(self.source, self.kernels)


@dataclasses.dataclass(frozen=True)
class Lowered:
    """The code of a graph."""

    calls: list[Segment | tuple[str, str]]  # a collective: ("start" or "wait", operator)
    marked: int  # collectives that Inductor is to fuse with matmuls

    @property
    def segments(self) -> list[Segment]:
        """Those that are called, each as often as it is."""
        return [call for call in self.calls if isinstance(call, Segment)]

    @functools.cached_property
    def launches(self) -> list[tuple[str, str]]:
        """As in Replay, with collectives and waits."""
        found = []
        for call in self.calls:
            found += call.replay.launches if isinstance(call, Segment) else [call]
        return found

    def block(self) -> list[tuple[str, str]]:
        """The launches of one block: from the first attention to the second."""
        first, second, *_ = (
            index for index, (kind, _) in enumerate(self.launches) if kind == "attention"
        )
        return self.launches[first:second]


@dataclasses.dataclass(eq=False)
class _Captured:
    """A segment in place of its code, which gives fake results."""

    module: GraphModule
    settings: dict[str, Any]  # of Inductor

    def __call__(self, inputs: list[Any]) -> list[Any]:
        (results,) = self.module.graph.find_nodes(op="output")[0].args
        return [result.meta["val"] for result in results]


def lower_stage(
    recipe: str, world_size: int, options: Sequence[str] = (), number: int = 0
) -> dict[str, Lowered]:
    """The code of each graph of a pipeline stage, cut to three blocks: "forward" and "backward",
    and "inference".
    """
    start_fake_world(world_size)
    programs = capture(RECIPES / recipe, world_size, options, 3, number)
    _guard_cuda()
    return {name: lower(program) for name, program in programs.items()}


def capture(
    recipe: Path, world_size: int, options: Sequence[str], blocks: int, number: int
) -> dict[str, Program]:
    """The program of each graph of a stage, of segments on fake CPU tensors: with gradients, then
    without.
    """
    config = load_config(recipe, options)
    layout = PlannedLayout(**vars(Layout.from_config(config, world_size)), config=config)
    mesh = build_mesh(layout.degrees, "cpu")
    beside = modules_beside_blocks(layout.pipeline.modules[number])
    settings = PassSettings(config.compile, load_machine("H100"), fused=True)
    graph_passes = GraphPasses(settings, choose_passes(config))
    kinds = backwards_of(config.parallelism, layout.pipeline)[number]
    (stage,) = parallelize_stage(layout, mesh, beside, kinds, blocks, graph_passes).stages
    programs: list[Program] = []
    make_program = CutGraph.program
    defaults = inductor_config.get_config_copy()

    def keep_segment(module: GraphModule, inputs: Sequence[Any]) -> _Captured:
        """In place of compile_fx_inner."""
        changed = {
            key: value
            for key, value in inductor_config.get_config_copy().items()
            if value != defaults[key]
        }
        return _Captured(module, changed)

    def keep_program(cut: CutGraph, functions: Mapping[Structure, BoxedFunction]) -> Program:
        programs.append(make_program(cut, functions))
        return programs[-1]

    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        mock.patch.object(backends, "compile_fx_inner", keep_segment),
        mock.patch.object(CutGraph, "program", keep_program),
    ):
        materialize_stage(layout, stage)
        inputs = stage_inputs(config, layout, stage, load_machine("H100"))
        documents = {name: value for name, value in inputs.model_kwargs.items() if name != "labels"}
        stage(inputs.input, **documents)
        with torch.no_grad():
            stage(inputs.input.detach(), **documents)
    names = [report.graph for report in graph_passes.reports]
    return dict(zip(names, programs, strict=True))


def lower(program: Program) -> Lowered:
    """The code of a graph for an H100, by Inductor as the compile stage has set it."""
    captured = {call.function: None for call in program.calls if isinstance(call, SegmentCall)}
    segments = {function: lower_segment(function) for function in captured}
    calls: list[Segment | tuple[str, str]] = []
    for call in program.calls:
        if isinstance(call, SegmentCall):
            calls.append(segments[call.function])
        else:
            name = call.operator.name()
            calls.append(("wait" if "wait" in name else "start", name))
    marked = sum(
        "fused_with" in node.meta
        for call in program.calls
        if isinstance(call, SegmentCall)
        for node in call.function.module.graph.nodes
    )
    return Lowered(calls, marked)


def lower_segment(captured: _Captured) -> Segment:
    module, inputs = on_cuda(captured.module)
    found: list[tuple[str, GraphLowering]] = []

    def write(graph: GraphLowering) -> None:
        code, _ = graph.codegen()
        found.append((code.value, graph))
        raise NotImplementedError("there is no GPU to load the code on")

    settings = {**captured.settings, "fx_graph_cache": False, "compile_threads": 1}
    with (
        _cuda_there(),
        inductor_config.patch(settings),
        mock.patch.object(GraphLowering, "compile_to_module", write),
        torch._guards.tracing(torch._guards.TracingContext(None)),
        _symmetric_memory._test_mode(),
    ):
        try:
            compile_fx.compile_fx_inner(module, inputs)
        except InductorError:
            if not found:
                raise
    ((source, graph),) = found
    return Segment(source, _kernels(graph))


def _is_matmul(node: Node) -> bool:
    return node.target in MATMULS or str(node.target) in FUSED_MATMULS


def _is_attention(node: Node) -> bool:
    return node.op == "call_function" and any(
        word in str(node.target) for word in ("scaled_dot_product", "flash_attention")
    )


def on_cuda(module: GraphModule) -> tuple[GraphModule, list[Any]]:
    """A copy of a graph of CPU tensors, and its inputs, on a GPU, where attention is another
    operator.
    """
    copied = GraphModule(module, copy.deepcopy(module.graph))
    graph, mode = copied.graph, FakeTensorMode()
    for node in list(graph.nodes):
        if node.target is aten._scaled_dot_product_flash_attention_for_cpu.default:
            node.target = aten._scaled_dot_product_flash_attention.default
            node.kwargs = {key: value for key, value in node.kwargs.items() if key != "attn_mask"}
        elif node.target is aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
            gradient, q, k, v, out, lse, dropout, causal = node.args
            lengths = [each.meta["val"].shape[2] for each in (q, k)]
            state = [
                _random_state(graph, name, shape)
                for name, shape in (("philox_seed", (2,)), ("philox_offset", ()))
            ]
            node.target = aten._scaled_dot_product_flash_attention_backward.default
            node.args = (gradient, q, k, v, out, lse, None, None, *lengths, dropout, causal, *state)
            node.kwargs = {key: value for key, value in node.kwargs.items() if key != "attn_mask"}
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": CUDA}
    inputs = []
    counts = [
        node.args[-1] for node in graph.nodes if "within_documents" in str(node.target)
    ]  # which stay on the host
    for node in graph.nodes:
        if node.op == "placeholder":
            node.meta["val"] = _fake(
                node.meta["val"], mode, torch.device("cpu") if node in counts else CUDA
            )
            inputs.append(node.meta["val"])
        else:
            node.meta.pop("val", None)
    graph.lint()
    copied.recompile()
    with mode, torch.no_grad():
        FakeTensorProp(copied, mode=mode).propagate_dont_convert_inputs(*inputs)
    return copied, inputs


def _random_state(graph: Graph, name: str, shape: tuple[int, ...]) -> Node:
    """An input with the state of a random generator, which the forward with CUDA's attention would
    save.
    """
    inputs = graph.find_nodes(op="placeholder")
    found = next((node for node in inputs if node.name == name), None)
    if found is None:
        with graph.inserting_after(inputs[-1]):
            found = graph.placeholder(name)
        found.meta["val"] = torch.empty(shape, dtype=torch.uint64, device="meta")
    return found


def _fake(value: Any, mode: FakeTensorMode, device: torch.device) -> Any:
    if not isinstance(value, Tensor):
        return value
    with unset_fake_temporarily():
        meta = torch.empty_strided(
            tuple(value.shape), tuple(value.stride()), dtype=value.dtype, device="meta"
        )
    return FakeTensor(mode, meta, device)


def _kernels(graph: GraphLowering) -> dict[str, list[str]]:
    """As in Replay."""
    found: dict[str, list[str]] = defaultdict(list)
    for kernel in graph.operations:
        if isinstance(kernel, ir.ExternKernel):
            for node in kernel.get_origins():
                if _is_matmul(node) or _is_attention(node):
                    found[kernel.get_name()].append(node.name)
    return dict(found)


def _guard_cuda() -> None:
    """Operators that PyTorch composes in C++ ask for a guard of their device, which only CUDA
    builds register; the one of meta tensors does nothing, which will do.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libc10.so"))
    guards = (ctypes.c_void_p * 22).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    cuda, meta = 1, 14  # of c10::DeviceType
    guards[cuda] = guards[cuda] or guards[meta]


@contextlib.contextmanager
def _cuda_there() -> Iterator[None]:
    """Within: what Inductor asks of a GPU is answered as by an H100."""

    def yes(*_: Any, **__: Any) -> bool:
        return True

    def zero(*_: Any, **__: Any) -> int:
        return 0

    properties = {"get_device_properties": lambda *_: H100, "current_device": zero}
    answers: Mapping[Any, Mapping[str, Any]] = {
        torch.cuda: {
            **properties,
            "is_available": yes,
            "device_count": lambda: 1,
            "_lazy_init": zero,
            "get_device_capability": lambda *_: (9, 0),
            "get_device_name": lambda *_: H100.name,
            "is_bf16_supported": yes,
            "set_device": zero,
            "synchronize": zero,
            "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
            "set_rng_state": zero,
            "_get_device_properties": lambda *_: H100,
        },
        torch.version: {"cuda": "12.8"},
        _triton: {"triton_hash_with_backend": lambda: "", "has_triton": yes},
        scheduler: {"has_triton": yes},
        compile_fx: {"get_cuda_device_context": contextlib.nullcontext},
        torch.distributed: {"is_nccl_available": yes},
    }
    interface: Mapping[Any, Mapping[str, Any]] = {
        CudaInterface: {
            **properties,
            "is_available": yes,
            "get_compute_capability": lambda *_: 90,
            "device_count": lambda: 1,
            "raise_if_triton_unavailable": zero,
            "is_triton_capable": yes,
        },
        CudaInterface.Worker: properties,
    }
    with contextlib.ExitStack() as stack:
        for owner, values in answers.items():
            for name, value in values.items():
                stack.enter_context(mock.patch.object(owner, name, value, create=True))
        for owner, values in interface.items():
            for name, value in values.items():
                stack.enter_context(
                    mock.patch.object(owner, name, staticmethod(value), create=True)
                )
        yield
