"""The compile stage: the parallelized model becomes one graph, and passes on it do what hooks do elsewhere.

    compile_model(model, config.compile, reshard_after_forward=True)      # in place, compiled at the first call
    loss_sum = compile_function(loss_sum, config.compile, "loss")         # as it is, without passes

Both backends run the same passes; every setting of the compiler is scoped to a compilation. What cannot be compiled is a
CompileError, which says what of the recipe to change.
"""

import functools
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit, TorchDynamoException
from torch._functorch import config as functorch_config
from torch._functorch import partitioners
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.codecache import FxGraphCachePickler
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.exc import InvalidCxxCompiler
from torch.distributed._symmetric_memory import enable_symm_mem_for_group
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import Graph, GraphModule
from torch.utils._triton import has_triton
from torch.utils.checkpoint import CheckpointPolicy

from titan_lite.compiler import collectives, pinning, resharding
from titan_lite.compiler.fqns import parameters_within
from titan_lite.compiler.receipt import DoesNotFit
from titan_lite.compiler.schedule import Schedule
from titan_lite.config import Compile, ConfigError

Compiling = Callable[[GraphModule, str], AbstractContextManager]  # of a graph and its name; compiled within
# All stages of a pipeline are calls of one function, of which torch compiles 8 variants; each stage has two, with gradients and
# without, and where ways to bucket are tried two for each way.
RECOMPILE_LIMIT = 256
FUSED_PRODUCTS = ("symm_mem.fused_all_gather_matmul.default", "symm_mem.fused_matmul_reduce_scatter.default")


class CompileError(RuntimeError):
    """Something of the run cannot be compiled; the message says what, why, and which keys to change."""


def check_backend(config: Compile, device_type: str) -> None:
    """Raises ConfigError where the recipe's backend cannot generate code on this machine."""
    if not config.enable or config.backend != "inductor":
        return
    works = 'install it, or compile.enable = false or compile.backend = "aot_eager" would work'
    if device_type == "cuda":
        if not has_triton():
            raise ConfigError(f'compile.backend = "inductor" needs triton for this GPU, and there is none here; {works}')
        compilers = [os.environ.get("CC"), "gcc", "clang"]  # Triton compiles its launchers, with the first of them
        if not any(shutil.which(compiler) for compiler in compilers if compiler):
            raise ConfigError(f'compile.backend = "inductor" needs a C compiler for triton (gcc, clang, or CC); {works}')
        header = Path(sysconfig.get_path("include")) / "Python.h"
        if not header.exists():
            package = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
            raise ConfigError(f'compile.backend = "inductor": triton needs {header} ({package} on Debian); {works}')
    else:
        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            raise ConfigError(f'compile.backend = "inductor" needs a C++ compiler for the CPU (g++, or CXX); {works}') from None


def compile_model(
    model: nn.Module,
    config: Compile,
    *,
    reshard_after_forward: bool,
    keep_gathered: Sequence[str] = (),
    memory_budget: float = 1.0,
    async_tensor_parallel: str = "",
    schedule: Schedule | None = None,
    priced_as: str = "",
) -> None:
    """Compile `model` as one graph, in place; FQNs do not change. Anything that breaks the graph is an error.

    reshard_after_forward, keep_gathered: as in `apply_simple_fsdp` (distributed/simple_fsdp.py).
    schedule: the passes on each graph when it is compiled, at the first call: forward, then backward.
    memory_budget: the share of activations that the partitioner may keep, of those it keeps at 1.0; what it then recomputes
    are the operators that cost least for what they free. async_tensor_parallel: the group whose collectives Inductor cuts into
    pieces that overlap with pieces of the matrix products beside them (arXiv 2410.06511, section 3.4); where it finds none, an
    error. priced_as: with aot_eager, for what is priced and not run: "inductor" has graphs of the operators that Inductor
    would have, "eager" of those that eager mode runs, which keeps for backward what autograd does.
    """
    reshard = None
    if reshard_after_forward:
        kept = parameters_within(model, keep_gathered)
        reshard = _Pass(resharding.recompute_parameter_all_gathers, keep_gathered=kept)
    compiling = (schedule or Schedule(config)).compiling
    if config.backend == "inductor":
        backend = _inductor(reshard, compiling, async_tensor_parallel)
    else:
        backend = _aot_eager(reshard, compiling, priced_as)

    model.compile(backend=_with_backward(backend, memory_budget), fullgraph=True)
    assert model._compiled_call_impl is not None
    model._compiled_call_impl = _told(model._compiled_call_impl, config, "model")


class _Pass(CustomGraphPass):
    """A pass on a graph as Inductor wants it: with what its cache knows of it, name, arguments and sources."""

    def __init__(self, run: Callable[..., Any], **arguments: Any):
        self.run, self.arguments = run, arguments

    def __call__(self, graph: Graph) -> None:
        self.run(graph, **self.arguments)

    def uuid(self) -> Any:
        call = f"{self.run.__name__} {self.arguments}".encode()
        return call + get_hash_for_files((__file__, collectives.__file__, pinning.__file__, resharding.__file__))


def _aot_eager(reshard: _Pass | None, compiling: Compiling, priced_as: str = "") -> Callable:
    def partition(joint: GraphModule, *args: Any, **kwargs: Any) -> Any:
        if reshard is not None:
            reshard(joint.graph)
        if priced_as == "eager":  # keeps for backward all that no tag says is recomputed
            for node in joint.graph.nodes:
                if node.op == "call_function" and not node.meta.get("recompute"):
                    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        with _nothing_is_random():
            return min_cut_rematerialization_partition(joint, *args, **kwargs)

    def run_as_is(name: str, graph: GraphModule, inputs: Sequence[Any]) -> Callable:
        with compiling(graph, name):
            return make_boxed_func(graph.forward)

    return aot_autograd(
        fw_compiler=functools.partial(run_as_is, "forward"),
        bw_compiler=functools.partial(run_as_is, "backward"),
        inference_compiler=functools.partial(run_as_is, "inference"),
        partition_fn=partition,
        decompositions=select_decomp_table() if priced_as == "inductor" else None,
    )


def _inductor(reshard: _Pass | None, compiling: Compiling, async_tensor_parallel: str = "") -> Callable:
    # Inductor would order nodes by memory, by locality and by what it fuses; theirs is ours.
    orders = ("reorder_for_peak_memory", "reorder_for_compute_comm_overlap", "reorder_for_locality")
    patches: dict[str, Any] = {"_pre_fusion_custom_pass": pinning.PinnedOrder(), **dict.fromkeys(orders, False)}
    if reshard is not None:
        patches["joint_custom_post_pass"] = reshard
    if async_tensor_parallel:
        enable_symm_mem_for_group(async_tensor_parallel)  # type: ignore[arg-type]
        patches |= {"_micro_pipeline_tp": True, "post_grad_custom_post_pass": _Pass(check_fused_products)}

    def compile_one(graph: GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        """Here and not in one of Inductor's own places for passes, which a graph from its cache does not come by."""
        name = "backward" if options.get("is_backward") else "inference" if options.get("is_inference") else "forward"
        with compiling(graph, name), _meshes_in_keys():
            pinning.note_places(graph.graph)
            return compile_fx_inner(graph, inputs, **options)

    def backend(graph: GraphModule, inputs: Sequence[torch.Tensor]) -> Any:
        with _nothing_is_random():
            return compile_fx(graph, inputs, inner_compile=compile_one, config_patches=patches)

    return backend


def check_fused_products(graph: Graph) -> None:
    """Raises as expect_fused_products; what was moved to fuse them goes back."""
    expect_fused_products(graph)
    pinning.restore_places(graph)


def expect_fused_products(graph: Graph) -> int:
    """The number of matrix products in `graph` that overlap with the collective beside them. Raises ConfigError for none."""
    fused = [node for node in graph.nodes if node.op == "call_function" and str(node.target) in FUSED_PRODUCTS]
    if not fused:
        raise ConfigError(
            "parallelism.enable_async_tensor_parallel = true: Inductor found no collective beside a matrix product to overlap it "
            "with; false would work"
        )
    return len(fused)


def _meshes_in_keys() -> Any:
    """Within: a mesh, an input of graphs with DTensors, enters the key of Inductor's cache by its ranks.

    torch 2.13 pickles it whole, in a mode whose bytes depend on which strings are one object, so that no key came twice.
    """
    reduce: Any = FxGraphCachePickler._reduce_fake_script_object

    def reduced(self: FxGraphCachePickler, value: Any) -> Any:
        mesh = value.real_obj
        if not isinstance(mesh, DeviceMesh):
            return reduce(self, value)
        return str, (f"{mesh.device_type} {mesh.mesh_dim_names} {mesh.mesh.tolist()}",)

    return mock.patch.object(FxGraphCachePickler, "_reduce_fake_script_object", reduced)


def _nothing_is_random() -> Any:
    """Within: recomputing an operator needs no state of a random generator.

    Attention operators count as random because they could drop out, which Llama does not. Their states would be saved, and
    torch 2.13 then mixes them up with the meshes of DTensors, which it saves as well.
    """
    return mock.patch.object(partitioners, "has_recomputable_rng_ops", return_value=False)


def compile_function(function: Callable, config: Compile, component: str) -> Callable:
    """`function` of tensors, or lists of them, as one graph for each of their shapes; as it is where the recipe does not compile
    `component`."""
    if not config.compiles(component):
        return function
    # no passes: collectives stay where they are, each waited for at once
    backend = (_inductor if config.backend == "inductor" else _aot_eager)(None, lambda graph, name: nullcontext())
    compiled = torch.compile(function, backend=_with_backward(backend), fullgraph=True, dynamic=False)
    return _told(compiled, config, component)


def _with_backward(backend: Callable, memory_budget: float = 1.0) -> Callable:
    """`backend`, which also compiles backward at the first call, and not in the first backward, where an error would not be told
    from one of the run."""

    settings = {
        "activation_memory_budget": memory_budget,
        "force_non_lazy_backward_lowering": True,
        # Its key knows nothing of our passes, and a hit would run none; Inductor's own cache comes after them.
        "enable_autograd_cache": False,
    }
    if hasattr(functorch_config, "unsafe_treat_script_objects_as_zero_size"):  # from torch 2.13 on
        settings["unsafe_treat_script_objects_as_zero_size"] = True  # meshes, which DTensors bring along

    def compile_both(graph: GraphModule, inputs: Sequence[torch.Tensor]) -> Any:
        with functorch_config.patch(settings):
            return backend(graph, inputs)

    return compile_both


def _told(compiled: Callable, config: Compile, component: str) -> Callable:
    """`compiled`, where a failure to compile is a CompileError, or the schedule's own DoesNotFit."""

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):
                return compiled(*args, **kwargs)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            cause: BaseException = error
            while isinstance(cause, BackendCompilerFailed):
                cause = cause.inner_exception
            if isinstance(cause, DoesNotFit):
                raise cause from error
            raise CompileError(_sentence(error, cause, config, component)) from error

    return call


def _sentence(error: Exception, cause: BaseException, config: Compile, component: str) -> str:
    if isinstance(cause, ConfigError):  # of a pass, which knows the key
        return str(cause)
    ways = []
    if cause is not error and config.backend == "inductor":  # what is not even traced is so for any backend
        ways.append('compile.backend = "aot_eager"')
    others = [f'"{other}"' for other in config.components if other != component]
    if others:
        ways.append(f"compile.components = [{', '.join(others)}]")
    why = next(filter(None, map(str.strip, str(cause).splitlines())), "") or type(cause).__name__
    return (
        f'compile.backend = "{config.backend}" cannot compile the {component} ({why}); '
        f"{' or '.join([*ways, 'compile.enable = false'])} would work"
    )
